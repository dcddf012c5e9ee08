"""Tables of a squashfs image with lookup by number: owners, fragments, extended attributes."""

from __future__ import annotations

import os
import struct

from envbuild.image.squashfs.model import NO_FRAGMENT, Fragment
from envbuild.image.squashfs.read_tables import METADATA, Cursor, ImageBytes, MetadataReader

_FRAGMENT = struct.Struct("<QII")
_XATTR_ID = struct.Struct("<QII")
_PREFIXES = ("user.", "trusted.", "security.")
_OUT_OF_LINE = 0x100
# Linux's limits (XATTR_SIZE_MAX, XATTR_LIST_MAX), and a limit for all values of one file.
_MAX_VALUE, _MAX_NAMES, _MAX_VALUES = 1 << 16, 1 << 16, 4 << 20
_KEPT_SETS = 16

Xattrs = tuple[tuple[str, bytes], ...]


class Lookup:
    """A table of rows of one size with lookup by number: owners, fragments, sets of attributes.

    The list of the positions of its metadata blocks is at `index`.
    """

    def __init__(self, source: ImageBytes, blocks: MetadataReader, index: int, rows: int, size: int) -> None:
        self._source, self._blocks, self._index = source, blocks, index
        self._rows, self._size = rows, size

    def row(self, number: int) -> bytes:
        """Return the row with this number. Raises BuildError when there is none."""
        if not 0 <= number < self._rows:
            raise self._source.damaged(f"row {number} of a table of {self._rows}")
        block, offset = divmod(number * self._size, METADATA)
        place = int.from_bytes(self._source.at(self._index + 8 * block, 8), "little")
        data = self._blocks.block(place)[0][offset : offset + self._size]
        if len(data) != self._size:
            raise self._source.damaged(f"row {number} of a table is cut short")
        return data


class Attributes:
    """The extended attributes of an image, in sets that files refer to by number."""

    def __init__(self, source: ImageBytes, blocks: MetadataReader) -> None:
        self._source = source
        table = source.superblock.xattr_table
        self._sets: Lookup | None = None
        self._kept: dict[int, Xattrs] = {}
        if table is not None:
            start, count, _ = _XATTR_ID.unpack(source.at(table, _XATTR_ID.size))
            self._pairs = MetadataReader(source, start, table)
            self._sets = Lookup(source, blocks, table + _XATTR_ID.size, count, _XATTR_ID.size)

    def of(self, number: int) -> Xattrs:
        """Return the set with this number, sorted by name."""
        if self._sets is None or number == NO_FRAGMENT:
            return ()
        known = self._kept.get(number)
        if known is None:
            if len(self._kept) >= _KEPT_SETS:
                self._kept.clear()
            known = self._kept[number] = self._read(self._sets.row(number))
        return known

    def _read(self, row: bytes) -> Xattrs:
        place, count, _ = _XATTR_ID.unpack(row)
        cursor = self._pairs.cursor(place >> 16, place & 0xFFFF)
        found: dict[str, bytes] = {}
        names = values = 0
        for _ in range(count):
            kind, length = struct.unpack("<HH", cursor.take(4))
            if kind & 0xFF >= len(_PREFIXES):
                raise self._source.damaged(f"an extended attribute of type {kind:#x}")
            name = _PREFIXES[kind & 0xFF] + os.fsdecode(cursor.take(length))
            value = self._value(cursor)
            if kind & _OUT_OF_LINE:
                place = int.from_bytes(value, "little")
                value = self._value(self._pairs.cursor(place >> 16, place & 0xFFFF))
            names, values = names + len(name) + 1, values + len(value)
            if name in found or "\0" in name or names > _MAX_NAMES or values > _MAX_VALUES:
                raise self._source.damaged("extended attributes named twice, or too many")
            found[name] = value
        return tuple(sorted(found.items()))

    def _value(self, cursor: Cursor) -> bytes:
        length = int.from_bytes(cursor.take(4), "little")
        if length > _MAX_VALUE:
            raise self._source.damaged(f"an extended attribute of {length} bytes")
        return cursor.take(length)


def owners(source: ImageBytes, blocks: MetadataReader) -> tuple[int, ...]:
    """Return the user and group IDs that files refer to by number."""
    count = source.superblock.ids
    table = Lookup(source, blocks, source.superblock.id_table, count, 4)
    return tuple(int.from_bytes(table.row(number), "little") for number in range(count))


def fragment(row: bytes) -> Fragment:
    """Parse a row of the fragment table."""
    start, word, _ = _FRAGMENT.unpack(row)
    return Fragment(start, word)


def fragments(source: ImageBytes, blocks: MetadataReader) -> Lookup:
    """Return the fragment table; `fragment` parses its rows."""
    superblock = source.superblock
    rows = superblock.fragments if superblock.fragment_table is not None else 0
    return Lookup(source, blocks, superblock.fragment_table or 0, rows, _FRAGMENT.size)
