"""Extended attributes of squashfs: sets of names and values, each stored once.

Source: Documentation/filesystems/squashfs.rst of the Linux kernel, section 3.6, and fs/squashfs/xattr_id.c.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from envbuild.errors import BuildError
from envbuild.image.squashfs.arrange import encoded
from envbuild.image.squashfs.codec import Compress
from envbuild.image.squashfs.inodes import NO_XATTRS
from envbuild.image.squashfs.metadata import MetadataWriter, indexed

_PREFIXES = {"user": 0, "trusted": 1, "security": 2}
_NAME = struct.Struct("<HH")
_VALUE = struct.Struct("<I")
_SET = struct.Struct("<QII")
_TABLE = struct.Struct("<QII")
# Linux's limits for an attribute: XATTR_NAME_MAX and XATTR_SIZE_MAX.
_NAME_MOST, _VALUE_MOST = 255, 1 << 16

Set = tuple[tuple[str, bytes], ...]


@dataclass(slots=True)
class Xattrs:
    """The distinct sets so far, numbered in the order of their first use, which determines the tables' bytes."""

    compress: Compress
    _numbers: dict[Set, int] = field(default_factory=dict)
    _values: MetadataWriter = field(init=False)
    _sets: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._values = MetadataWriter(self.compress)

    def number(self, xattrs: Set, path: str) -> int:
        """Return the number of a set in the table; NO_XATTRS for an empty set.

        Raises BuildError, naming `path`, for an attribute that squashfs cannot express.
        """
        if not xattrs:
            return NO_XATTRS
        ordered = tuple(sorted(xattrs))
        known = self._numbers.get(ordered)
        if known is not None:
            return known
        if len(dict(ordered)) < len(ordered):
            raise BuildError(f"{path}: an extended attribute is there twice: {_names(ordered)}")
        record = b"".join(_record(name, value, path) for name, value in ordered)
        # As in mksquashfs, the size counts the names as listxattr(2) returns them, plus the values.
        size = sum(len(encoded(name, path)) + 1 + len(value) for name, value in ordered)
        self._sets += _SET.pack(self._values.add(record), len(ordered), size)
        return self._numbers.setdefault(ordered, len(self._numbers))

    def table(self, at: int) -> tuple[bytes, int] | None:
        """Return the tables for offset `at` of the image, and the offset of their header in the image.

        Returns None when there is no set.
        """
        if not self._numbers:
            return None
        values = self._values.finish()
        sets, places = indexed(self._sets, at + len(values), self.compress)
        blocks = places - at - len(values)
        head = _TABLE.pack(at, len(self._numbers), 0)
        return values + sets[:blocks] + head + sets[blocks:], places


def _record(name: str, value: bytes, path: str) -> bytes:
    prefix, dot, rest = name.partition(".")
    if prefix not in _PREFIXES or not rest:
        raise BuildError(
            f"{path}: squashfs cannot hold its extended attribute {name!r}",
            f"only those that begin with {', '.join(f'{known}.' for known in _PREFIXES)}",
        )
    short = encoded(rest, path)
    if len(prefix) + len(dot) + len(short) > _NAME_MOST or len(value) > _VALUE_MOST:
        raise BuildError(
            f"{path}: its extended attribute {name[:80]!r} is too large",
            f"{_NAME_MOST} bytes of name and {_VALUE_MOST} of value are the most",
        )
    return _NAME.pack(_PREFIXES[prefix], len(short)) + short + _VALUE.pack(len(value)) + value


def _names(xattrs: Set) -> str:
    return ", ".join(sorted({name for name, _ in xattrs}))
