"""Writer of squashfs metadata: records in blocks of 8 KiB, each compressed separately, and extended attributes.

Source: Documentation/filesystems/squashfs.rst of the Linux kernel, section 3, and fs/squashfs/xattr_id.c.
"""

from __future__ import annotations

import struct

from envbuild.errors import BuildError
from envbuild.image.squashfs.codec import Compress
from envbuild.image.squashfs.model import METADATA_SIZE, METADATA_STORED, NO_XATTRS, XATTR_SET, XATTR_TABLE

_HEADER = struct.Struct("<H")
_PREFIXES = ("user", "trusted", "security")  # in the order of their numbers
# Linux's limits for an attribute: XATTR_NAME_MAX and XATTR_SIZE_MAX.
_NAME_MOST, _VALUE_MOST = 255, 1 << 16

XattrSet = tuple[tuple[str, bytes], ...]


def stored_block(data: bytes) -> bytes:
    """Return `data`, at most 8 KiB, as an uncompressed metadata block."""
    return _HEADER.pack(METADATA_STORED | len(data)) + data


class MetadataWriter:
    """A writer of consecutive records in metadata blocks. A record may span several blocks.

    A reference to a record, in inodes and in the superblock, is the offset of its block from the table's start, shifted
    left by 16, plus the record's offset in the uncompressed block.
    """

    def __init__(self, compress: Compress) -> None:
        self._compress = compress
        self._blocks, self._pending = bytearray(), bytearray()

    @property
    def next(self) -> int:
        """The reference of the next record."""
        return len(self._blocks) << 16 | len(self._pending)

    def add(self, record: bytes | bytearray) -> int:
        """Add a record and return its reference."""
        reference = self.next
        self._pending += record
        while len(self._pending) >= METADATA_SIZE:
            self._pack()
        return reference

    def finish(self) -> bytes:
        """Return the complete table. No record can be added afterwards."""
        if self._pending:
            self._pack()
        return bytes(self._blocks)

    def _pack(self) -> None:
        data = bytes(self._pending[:METADATA_SIZE])
        del self._pending[:METADATA_SIZE]
        packed = self._compress(data)
        self._blocks += _HEADER.pack(len(packed)) + packed if len(packed) < len(data) else stored_block(data)


def indexed(records: bytes | bytearray, at: int, compress: Compress) -> tuple[bytes, int]:
    """Return a table with lookup by number: its blocks, followed by the list of their positions.

    `at` is the table's offset in the image. No record in `records` may cross a multiple of 8 KiB. Returns the table's
    bytes, and the offset in the image of the list of positions, which the superblock refers to.
    """
    blocks = MetadataWriter(compress)
    places = []
    for start in range(0, len(records), METADATA_SIZE):
        places.append(at + (blocks.next >> 16))
        blocks.add(records[start : start + METADATA_SIZE])
    data = blocks.finish()
    return data + struct.pack(f"<{len(places)}Q", *places), at + len(data)


class Xattrs:
    """The distinct sets of attributes, numbered in the order of their first use, which determines the tables' bytes."""

    def __init__(self, compress: Compress) -> None:
        self._compress = compress
        self._numbers: dict[XattrSet, int] = {}
        self._values, self._sets = MetadataWriter(compress), bytearray()

    def number(self, xattrs: XattrSet, path: str) -> int:
        """Return the number of a set in the table; NO_XATTRS for an empty set.

        Raises BuildError, naming `path`, for an attribute that squashfs cannot express.
        """
        if not xattrs:
            return NO_XATTRS
        ordered = tuple(sorted(xattrs))
        known = self._numbers.get(ordered)
        if known is not None:
            return known
        names = dict(ordered)
        if len(names) < len(ordered):
            raise BuildError(f"{path}: an extended attribute is there twice: {', '.join(names)}")
        record = b"".join(_record(name, value, path) for name, value in ordered)
        # As in mksquashfs, the size counts the names as listxattr(2) returns them, plus the values.
        size = sum(len(encoded(name, path)) + 1 + len(value) for name, value in ordered)
        self._sets += XATTR_SET.pack(self._values.add(record), len(ordered), size)
        return self._numbers.setdefault(ordered, len(self._numbers))

    def table(self, at: int) -> tuple[bytes, int] | None:
        """Return the tables for offset `at` of the image, and the offset of their header in the image.

        Returns None when there is no set.
        """
        if not self._numbers:
            return None
        values = self._values.finish()
        sets, places = indexed(self._sets, at + len(values), self._compress)
        blocks = places - at - len(values)
        head = XATTR_TABLE.pack(at, len(self._numbers), 0)
        return values + sets[:blocks] + head + sets[blocks:], places


def encoded(text: str, path: str) -> bytes:
    """Return the bytes of a name or a link's text at `path`, the same in every locale.

    Raises BuildError when the text is not valid Unicode.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise BuildError(f"{path!a}: {text[:80]!a} is not valid Unicode") from None


def _record(name: str, value: bytes, path: str) -> bytes:
    prefix, _, rest = name.partition(".")
    if prefix not in _PREFIXES or not rest:
        raise BuildError(
            f"{path}: squashfs cannot hold its extended attribute {name!r}",
            f"only those that begin with {', '.join(f'{known}.' for known in _PREFIXES)}",
        )
    short = encoded(rest, path)
    if len(f"{prefix}.") + len(short) > _NAME_MOST or len(value) > _VALUE_MOST:
        raise BuildError(
            f"{path}: its extended attribute {name[:80]!r} is too large",
            f"{_NAME_MOST} bytes of name and {_VALUE_MOST} of value are the most",
        )
    return struct.pack("<HH", _PREFIXES.index(prefix), len(short)) + short + struct.pack("<I", len(value)) + value
