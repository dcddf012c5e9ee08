"""Parsers of the inodes, directory listings and extended attributes of a squashfs image."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.image.entry import BLOCK, CHAR, FILE, SYMLINK
from envbuild.image.squashfs import model
from envbuild.image.squashfs.model import DIR_ENTRY, DIR_HEADER, KINDS, NO_FRAGMENT, NO_TABLE, NO_XATTRS, REST
from envbuild.image.squashfs.read_tables import Cursor, ImageBytes, Lookup, MetadataReader

_MAX_TARGET = 65535
_MAX_LISTED = 256
_PREFIXES = ("user.", "trusted.", "security.")
_OUT_OF_LINE = 0x100
# Linux's limits (XATTR_SIZE_MAX, XATTR_LIST_MAX), and a limit for all values of one file.
_MAX_VALUE, _MAX_NAMES, _MAX_VALUES = 1 << 16, 1 << 16, 4 << 20
_KEPT_SETS = 16

Xattrs = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Inode:
    """A file of any kind. `size` is that of a regular file in bytes, or that of a directory's listing.

    A regular file's content begins with blocks at `start`, and `rest` reads their size words; the end of the content
    may be in `fragment`, at `offset`. A directory's listing begins in block `start` of its table, at `offset`.
    """

    kind: str
    mode: int
    uid: int
    gid: int
    mtime: int
    rest: Cursor
    links: int
    size: int = 0
    start: int = 0
    fragment: int = NO_FRAGMENT
    offset: int = 0
    target: str = ""
    device: tuple[int, int] = (0, 0)
    xattrs: int = NO_XATTRS


def read_inode(source: ImageBytes, cursor: Cursor, ids: tuple[int, ...]) -> Inode:
    """Parse the inode at `cursor`. Raises BuildError when it is malformed."""
    number, mode, uid, gid, mtime, _ = model.INODE.unpack(cursor.take(model.INODE.size))
    if not 1 <= number <= 2 * len(KINDS):
        raise source.damaged(f"an inode of type {number}")
    if uid >= len(ids) or gid >= len(ids):
        raise source.damaged(f"an owner that is number {max(uid, gid)} of {len(ids)}")
    long, index = divmod(number - 1, len(KINDS))
    kind = KINDS[index]
    head = kind, mode & 0o7777, ids[uid], ids[gid], mtime, cursor
    if kind in REST:
        fields = REST[kind][long].unpack(cursor.take(REST[kind][long].size))
        links, fragment, xattrs = 1, NO_FRAGMENT, NO_XATTRS
        if kind == FILE and long:
            start, size, _, links, fragment, offset, xattrs = fields
        elif kind == FILE:
            start, fragment, offset, size = fields
        elif long:
            links, size, start, _, _, offset, xattrs = fields
        else:
            start, links, size, offset, _ = fields
        return Inode(*head, links, size, start, fragment, offset, xattrs=xattrs)
    links, target, device = cursor.number(), "", (0, 0)
    if kind == SYMLINK:
        length = cursor.number()
        if not 0 < length <= _MAX_TARGET:
            raise source.damaged(f"a symbolic link of {length} bytes")
        target = os.fsdecode(cursor.take(length))
        if "\0" in target:
            raise source.damaged("a symbolic link with a NUL in it")
    elif kind in (BLOCK, CHAR):
        both = cursor.number()
        device = (both >> 8) & 0xFFF, (both & 0xFF) | ((both >> 12) & 0xFFF00)
    return Inode(*head, links, target=target, device=device, xattrs=cursor.number() if long else NO_XATTRS)


def listed(table: MetadataReader, inode: Inode) -> Iterator[tuple[bytes, int]]:
    """Yield the names in a directory and the references of their inodes, block << 16 | offset, while reading.

    Raises BuildError for an invalid name, and for a name that is not greater than the previous one in byte order, as
    the format requires; so no name occurs twice.
    """
    left = inode.size - 3  # the format counts "." and "..", which are not listed, as 3 bytes
    if left <= 0:
        return
    damaged = table.source.damaged
    cursor = table.cursor(inode.start << 16 | inode.offset)
    before = b""
    while left > 0:
        count, start, _ = DIR_HEADER.unpack(cursor.take(DIR_HEADER.size))
        left -= DIR_HEADER.size
        if count >= _MAX_LISTED:
            raise damaged(f"a directory lists {count + 1} names at once")
        for _ in range(count + 1):
            offset, _, _, length = DIR_ENTRY.unpack(cursor.take(DIR_ENTRY.size))
            if length >= _MAX_LISTED:
                raise damaged(f"a directory lists a name of {length + 1} bytes")
            name = cursor.take(length + 1)
            left -= DIR_ENTRY.size + length + 1
            if left < 0:
                raise damaged("a directory's listing is longer than it says")
            if name <= before:
                raise damaged(f"a directory lists {os.fsdecode(name)!a}: twice, or not in order")
            if name in (b".", b"..") or b"/" in name or b"\0" in name:
                raise damaged(f"a directory lists {os.fsdecode(name)!a}: not a name")
            before = name
            yield name, start << 16 | offset


class Attributes:
    """The extended attributes of an image, in sets that files refer to by number."""

    def __init__(self, blocks: MetadataReader) -> None:
        self._source = source = blocks.source
        table = source.superblock.xattr_table
        self._sets: Lookup | None = None
        self._kept: dict[int, Xattrs] = {}
        if table != NO_TABLE:
            start, count, _ = model.XATTR_TABLE.unpack(source.at(table, model.XATTR_TABLE.size))
            self._pairs = MetadataReader(source, start, table)
            self._sets = Lookup(blocks, table + model.XATTR_TABLE.size, count, model.XATTR_SET.size)

    def of(self, number: int) -> Xattrs:
        """Return the set with this number, sorted by name."""
        if self._sets is None or number == NO_XATTRS:
            return ()
        known = self._kept.get(number)
        if known is None:
            if len(self._kept) >= _KEPT_SETS:
                self._kept.clear()
            known = self._kept[number] = self._read(self._sets.row(number))
        return known

    def _read(self, row: bytes) -> Xattrs:
        place, count, _ = model.XATTR_SET.unpack(row)
        cursor = self._pairs.cursor(place)
        found: dict[str, bytes] = {}
        names = values = 0
        for _ in range(count):
            kind, length = struct.unpack("<HH", cursor.take(4))
            if kind & 0xFF >= len(_PREFIXES):
                raise self._source.damaged(f"an extended attribute of type {kind:#x}")
            name = _PREFIXES[kind & 0xFF] + os.fsdecode(cursor.take(length))
            value = self._value(cursor)
            if kind & _OUT_OF_LINE:
                value = self._value(self._pairs.cursor(int.from_bytes(value, "little")))
            names, values = names + len(name) + 1, values + len(value)
            if name in found or "\0" in name or names > _MAX_NAMES or values > _MAX_VALUES:
                raise self._source.damaged("extended attributes named twice, or too many")
            found[name] = value
        return tuple(sorted(found.items()))

    def _value(self, cursor: Cursor) -> bytes:
        length = cursor.number()
        if length > _MAX_VALUE:
            raise self._source.damaged(f"an extended attribute of {length} bytes")
        return cursor.take(length)
