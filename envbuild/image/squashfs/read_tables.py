"""Parsers of a squashfs image: superblock, metadata blocks, inodes, directory listings and extended attributes."""

from __future__ import annotations

import io
import os
import struct
import threading
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from envbuild.base.errors import BuildError, UsageError
from envbuild.image.entry import BLOCK, CHAR, FILE, SYMLINK
from envbuild.image.squashfs import model
from envbuild.image.squashfs.model import (
    DIR_ENTRY,
    DIR_HEADER,
    KINDS,
    MAGIC,
    METADATA_SIZE,
    METADATA_STORED,
    NO_FRAGMENT,
    NO_TABLE,
    NO_XATTRS,
    REST,
    SUPERBLOCK,
    decompressor,
)

_KEPT_BLOCKS = 512

# Sizes are in bytes, `mtime` is in seconds since 1970. `inodes` counts files of every kind, each once; the positions of
# tables are relative to the image, NO_TABLE for an absent table.
Superblock = namedtuple(
    "Superblock",
    "magic inodes mtime block_size fragments compressor block_log flags ids major minor root bytes_used id_table "
    "xattr_table inode_table directory_table fragment_table export_table",
)


class ImageBytes:
    """The bytes of an image within a file. Several threads may use it at once."""

    def __init__(self, stream: BinaryIO, base: int, where: str) -> None:
        self.where = where
        self._stream, self._base = stream, base
        self.size = SUPERBLOCK.size
        found = Superblock(*SUPERBLOCK.unpack(self.at(0, SUPERBLOCK.size)))
        self._check(found)
        # Without fragments, the position of their table says nothing.
        self.superblock = found if found.fragments else found._replace(fragment_table=NO_TABLE)
        try:
            self._expand = decompressor(self.superblock.compressor)
        except UsageError as error:
            raise BuildError(f"{where}: {error.message}", error.hint) from None
        self.size = self.superblock.bytes_used
        end = stream.seek(0, io.SEEK_END)
        if base + self.size > end:
            raise BuildError(f"{where}: cut short: {end - base} bytes of a squashfs of {self.size}")

    def damaged(self, what: str) -> BuildError:
        """Return an error about damage in the image."""
        return BuildError(f"{self.where}: damaged squashfs: {what}")

    def at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset` of the image. Raises BuildError when the image or the file ends earlier."""
        if offset < 0 or offset + size > self.size:
            raise self.damaged(f"{size} bytes at {offset} lie outside of it")
        try:
            data = os.pread(self._stream.fileno(), size, self._base + offset)
        except OSError as error:
            raise BuildError(f"{self.where}: cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise BuildError(f"{self.where}: cut short: {size} bytes at {offset} are not there")
        return data

    def metadata_at(self, start: int) -> MetadataReader:
        """Return a reader of the table that begins at `start` and ends before the next one."""
        block = self.superblock
        tables = (block.id_table, block.xattr_table, block.inode_table, block.directory_table, block.fragment_table)
        return MetadataReader(self, start, min(at for at in (*tables, block.export_table, self.size) if at > start))

    def block(self, offset: int, stored: int, compressed: bool, most: int) -> bytes:
        """Return the content, at most `most` bytes, of the block of `stored` bytes at `offset`."""
        data = self.at(offset, stored)
        if not compressed:
            if stored > most:
                raise self.damaged(f"the block at {offset} is longer than {most} bytes")
            return data
        try:
            return self._expand(data, most)
        except ValueError as error:
            raise self.damaged(f"the block at {offset}: {error}") from None

    def _check(self, found: Superblock) -> None:
        if found.magic != MAGIC:
            raise BuildError(f"{self.where}: not a squashfs image")
        if (found.major, found.minor) != (4, 0):
            raise BuildError(f"{self.where}: squashfs {found.major}.{found.minor}; only 4.0 can be read")
        if not 12 <= found.block_log <= 20 or found.block_size != 1 << found.block_log:
            raise self.damaged(f"blocks of {found.block_size} bytes")
        for table in (found.id_table, found.inode_table, found.directory_table):
            if not SUPERBLOCK.size <= table < found.bytes_used:
                raise self.damaged(f"a table at {table} of {found.bytes_used} bytes")
        if not found.ids:
            raise self.damaged("no owners are listed")


class MetadataReader:
    """A reader of the metadata blocks from `start` to `end` of the image, which are decompressed on request."""

    def __init__(self, source: ImageBytes, start: int, end: int) -> None:
        self.source = source
        self._start, self._end = start, end
        self._kept: dict[int, tuple[bytes, int]] = {}
        self._lock = threading.Lock()

    def cursor(self, reference: int) -> Cursor:
        """Return a cursor at `reference`: the offset of a block << 16 | the offset in its content."""
        place, offset = reference >> 16, reference & 0xFFFF
        data, following = self.block(self._start + place)
        if offset > len(data):
            raise self.source.damaged(f"offset {offset} in the metadata block at {place}")
        return Cursor(self, data, offset, following)

    def block(self, position: int) -> tuple[bytes, int]:
        """Return the content of the block at `position` of the image, and the position of the next one."""
        known = self._kept.get(position)
        if known is not None:
            return known
        stored, compressed, begin = self._header(position)
        data = self.source.block(begin, stored, compressed, METADATA_SIZE)
        if not data:
            raise self.source.damaged(f"the metadata block at {position} is empty")
        found = data, begin + stored
        with self._lock:
            if len(self._kept) >= _KEPT_BLOCKS:
                del self._kept[next(iter(self._kept))]
            self._kept[position] = found
        return found

    def capacity(self) -> int:
        """Return the maximum number of bytes that all blocks together can hold."""
        count, position = 0, self._start
        while position < self._end:
            stored, _, begin = self._header(position)
            position = begin + stored
            count += 1
        return count * METADATA_SIZE

    def _header(self, position: int) -> tuple[int, bool, int]:
        """Return a block's stored size, whether it is compressed, and the position of its data."""
        if not self._start <= position < self._end:
            raise self.source.damaged(f"a metadata block at {position}, outside of its table")
        header = int.from_bytes(self.source.at(position, 2), "little")
        stored = header & ~METADATA_STORED
        if not 0 < stored <= METADATA_SIZE or position + 2 + stored > self._end:
            raise self.source.damaged(f"the metadata block at {position} is of {stored} bytes")
        return stored, not header & METADATA_STORED, position + 2


class Cursor:
    """A position in metadata; reading continues across blocks."""

    __slots__ = ("_at", "_data", "_following", "_table")

    def __init__(self, table: MetadataReader, data: bytes, at: int, following: int) -> None:
        self._table, self._data, self._at, self._following = table, data, at, following

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises BuildError when the table ends earlier."""
        taken = self._data[self._at : self._at + size]
        self._at += len(taken)
        if len(taken) == size:
            return taken
        parts, missing = [taken], size - len(taken)
        while missing:
            self._data, self._following = self._table.block(self._following)
            parts.append(self._data[:missing])
            self._at = len(parts[-1])
            missing -= self._at
        return b"".join(parts)

    def number(self) -> int:
        """Return the next 4 bytes as a number."""
        return int.from_bytes(self.take(4), "little")


class Lookup:
    """A table of rows of one size with lookup by number: owners, fragments, sets of attributes.

    The list of the positions of its metadata blocks is at `index`.
    """

    def __init__(self, blocks: MetadataReader, index: int, rows: int, size: int) -> None:
        self._blocks, self._index = blocks, index
        self._rows, self._size = rows, size

    def row(self, number: int) -> bytes:
        """Return the row with this number. Raises BuildError when there is none."""
        source = self._blocks.source
        if not 0 <= number < self._rows:
            raise source.damaged(f"row {number} of a table of {self._rows}")
        block, offset = divmod(number * self._size, METADATA_SIZE)
        place = int.from_bytes(source.at(self._index + 8 * block, 8), "little")
        data = self._blocks.block(place)[0][offset : offset + self._size]
        if len(data) != self._size:
            raise source.damaged(f"row {number} of a table is cut short")
        return data


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
