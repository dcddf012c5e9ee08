"""Reader of squashfs 4.0 images of any writer, without mounting them.

Source: Documentation/filesystems/squashfs.rst of the Linux kernel. Images may be hostile: memory use is bounded by the
content of one block, each directory is visited once, and any invalid value raises BuildError.
"""

from __future__ import annotations

import io
import os
import struct
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, TypeVar

from envbuild.base.errors import BuildError, UsageError
from envbuild.base.workers import each
from envbuild.image.entry import BLOCK, CHAR, DIR, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.squashfs import model
from envbuild.image.squashfs.model import (
    DIR_ENTRY,
    DIR_HEADER,
    FRAGMENT,
    KINDS,
    MAGIC,
    METADATA_SIZE,
    METADATA_STORED,
    NO_FRAGMENT,
    NO_TABLE,
    NO_XATTRS,
    REST,
    SIZE_MASK,
    SUPERBLOCK,
    UNCOMPRESSED,
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
        superblock = Superblock(*SUPERBLOCK.unpack(self.at(0, SUPERBLOCK.size)))
        self._check(superblock)
        # Without fragments, the position of their table says nothing.
        self.superblock = superblock if superblock.fragments else superblock._replace(fragment_table=NO_TABLE)
        try:
            self._expand = decompressor(self.superblock.compressor)
        except UsageError as error:
            raise BuildError(f"{where}: {error.message}", error.hint) from None
        self.size = self.superblock.bytes_used
        end = stream.seek(0, io.SEEK_END)
        if base + self.size > end:
            raise BuildError(f"{where}: cut short: {end - base} bytes of a squashfs of {self.size}")

    def damaged(self, problem: str) -> BuildError:
        """Return an error about damage in the image."""
        return BuildError(f"{self.where}: damaged squashfs: {problem}")

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

    def _check(self, superblock: Superblock) -> None:
        if superblock.magic != MAGIC:
            raise BuildError(f"{self.where}: not a squashfs image")
        if (superblock.major, superblock.minor) != (4, 0):
            raise BuildError(f"{self.where}: squashfs {superblock.major}.{superblock.minor}; only 4.0 can be read")
        if not 12 <= superblock.block_log <= 20 or superblock.block_size != 1 << superblock.block_log:
            raise self.damaged(f"blocks of {superblock.block_size} bytes")
        for table in (superblock.id_table, superblock.inode_table, superblock.directory_table):
            if not SUPERBLOCK.size <= table < superblock.bytes_used:
                raise self.damaged(f"a table at {table} of {superblock.bytes_used} bytes")
        if not superblock.ids:
            raise self.damaged("no owners are listed")


class MetadataReader:
    """A reader of the metadata blocks from `start` to `end` of the image, which are decompressed on request."""

    def __init__(self, source: ImageBytes, start: int, end: int) -> None:
        self.source = source
        self._start, self._end = start, end
        # Returns the content of the block at a position of the image, and the position of the next one.
        self.block = lru_cache(_KEPT_BLOCKS)(self._read)

    def cursor(self, reference: int) -> Cursor:
        """Return a cursor at `reference`: the offset of a block << 16 | the offset in its content."""
        place, offset = reference >> 16, reference & 0xFFFF
        data, following = self.block(self._start + place)
        if offset > len(data):
            raise self.source.damaged(f"offset {offset} in the metadata block at {place}")
        return Cursor(self, data, offset, following)

    def _read(self, position: int) -> tuple[bytes, int]:
        stored, compressed, begin = self._header(position)
        data = self.source.block(begin, stored, compressed, METADATA_SIZE)
        if not data:
            raise self.source.damaged(f"the metadata block at {position} is empty")
        return data, begin + stored

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
        self._known = lru_cache(_KEPT_SETS)(self._read)
        if table != NO_TABLE:
            start, count, _ = model.XATTR_TABLE.unpack(source.at(table, model.XATTR_TABLE.size))
            self._pairs = MetadataReader(source, start, table)
            self._sets = Lookup(blocks, table + model.XATTR_TABLE.size, count, model.XATTR_SET.size)

    def of(self, number: int) -> Xattrs:
        """Return the set with this number, sorted by name."""
        return () if self._sets is None or number == NO_XATTRS else self._known(self._sets.row(number))

    def _read(self, row: bytes) -> Xattrs:
        place, count, _ = model.XATTR_SET.unpack(row)
        cursor = self._pairs.cursor(place)
        attributes: dict[str, bytes] = {}
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
            if name in attributes or "\0" in name or names > _MAX_NAMES or values > _MAX_VALUES:
                raise self._source.damaged("extended attributes named twice, or too many")
            attributes[name] = value
        return tuple(sorted(attributes.items()))

    def _value(self, cursor: Cursor) -> bytes:
        length = cursor.number()
        if length > _MAX_VALUE:
            raise self._source.damaged(f"an extended attribute of {length} bytes")
        return cursor.take(length)


# In bytes. Linux cannot open longer paths.
_MAX_PATH = 4095
# The cache of fragment blocks, in bytes: consecutive files share fragment blocks.
_KEPT = 8 << 20
# Threads get files in lots of this many bytes or this many files.
_LOT_BYTES, _LOT_FILES = 4 << 20, 64
_MOST_THREADS = 8

R = TypeVar("R")


def is_squashfs(head: bytes) -> bool:
    """Return whether a file that begins with `head`, at least four bytes, is a squashfs image."""
    return head[:4] == MAGIC.to_bytes(4, "little")


class SquashfsImage:
    """The squashfs image with its superblock at offset `base` of `stream`, a file that stays open.

    `where` is for messages; `limits` are those of the site, for `entries`. Several threads may call the methods at
    once. Raises BuildError when there is no image, or its compressor is not supported.
    """

    def __init__(self, stream: BinaryIO, base: int, where: str, limits: ImageLimits | None = None) -> None:
        self._limits = limits
        self._source = source = ImageBytes(stream, base, where)
        self.superblock = block = source.superblock
        self._inodes = source.metadata_at(block.inode_table)
        self._lists = source.metadata_at(block.directory_table)
        blocks = MetadataReader(source, 0, block.bytes_used)
        owners = Lookup(blocks, block.id_table, block.ids, 4)
        self._owners = tuple(int.from_bytes(owners.row(number), "little") for number in range(block.ids))
        fragments = block.fragments if block.fragment_table != NO_TABLE else 0
        self._fragments = Lookup(blocks, block.fragment_table, fragments, FRAGMENT.size)
        self._attributes = Attributes(blocks)
        self._fragment = lru_cache(max(_KEPT // block.block_size, 2))(self._read_fragment)

    def entries(self) -> Iterator[tuple[Entry, int]]:
        """Yield every path once, with a handle for `content`: parents first, names in the order of their bytes.

        When a file has several names, each after the first is a HARDLINK to the first. A socket has the kind "socket",
        which `Entry` does not define. Raises BuildError when the image is damaged.
        """
        root = self._inode(self.superblock.root)
        if root.kind != DIR:
            raise self._source.damaged("its root is not a directory")
        yield self._entry("", root, ""), self.superblock.root
        quota, where = Quota(self._limits), self._source.where
        count = 1
        names: dict[int, str] = {}
        seen = {self.superblock.root}
        room = self._lists.capacity() - root.size
        stack = [("", listed(self._lists, root))]
        while stack:
            folder, listing = stack[-1]
            item = next(listing, None)
            if item is None:
                stack.pop()
                continue
            name, place = item
            path = folder + os.fsdecode(name)
            if len(path) > _MAX_PATH or (len(path) * 3 > _MAX_PATH < len(os.fsencode(path))):
                raise self._source.damaged(f"{path[:80]!a}…: a path longer than Linux allows")
            inode = self._inode(place)
            first = names.get(place)
            quota.entry(where)
            quota.text(where, path, inode.target)
            if first is None:
                quota.content(where, inode.size if inode.kind == FILE else 0)
                count += 1
                if count > self.superblock.inodes:
                    raise self._source.damaged(f"it has more than {count - 1} files, which it announces")
            if inode.kind == DIR:
                room -= inode.size
                if place in seen or room < 0:
                    raise self._source.damaged(f"{path!a}: a directory in two places")
                seen.add(place)
                stack.append((f"{path}/", listed(self._lists, inode)))
            elif inode.links > 1:
                names.setdefault(place, path)
            yield self._entry(path, inode, first), place

    def content(self, handle: int, most: int) -> bytes:
        """Return the first `most` bytes of a regular file by its handle, also for a hard link."""
        data_read = bytearray()
        for data, length in self.blocks(handle):
            data_read += bytes(length) if data is None else data
            if len(data_read) >= most:
                break
        return bytes(data_read[:most])

    def blocks(self, handle: int) -> Iterator[tuple[bytes | None, int]]:
        """Yield the content of a regular file in pieces of at most one block, with the length of each.

        The data of a piece is None for zeros that are not stored. Raises BuildError when the file is damaged.
        """
        inode = self._inode(handle)
        if inode.kind != FILE:
            raise self._source.damaged("what is no regular file is read as one")
        most = self.superblock.block_size
        in_fragment = inode.size % most if inode.fragment != NO_FRAGMENT else 0
        left = inode.size - in_fragment
        place = inode.start
        while left:
            length = min(left, most)
            word = inode.rest.number()
            if word == 0:
                yield None, length
            else:
                data = self._block(place, word)
                if len(data) != length:
                    raise self._source.damaged(f"the block at {place} is of {len(data)} bytes, not {length}")
                yield data, length
            place += word & SIZE_MASK
            left -= length
        if in_fragment:
            data = self._fragment(inode.fragment)[inode.offset : inode.offset + in_fragment]
            if len(data) != in_fragment:
                raise self._source.damaged(f"fragment {inode.fragment} ends before a file does")
            yield data, in_fragment

    def each_file(self, files: Sequence[tuple[Entry, int]], work: Callable[[Entry, int], R]) -> list[R]:
        """Return the results of `work(entry, handle)` for each of `files`, in order; several threads call `work`.

        Files in the order of `entries` are fastest, because consecutive files share fragment blocks.
        """

        def run(lot: Sequence[tuple[Entry, int]], stop: threading.Event) -> list[R]:
            return [work(*item) for item in lot if not stop.is_set()]

        workers = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        done = each(list(_lots(files)), run, workers)
        return [result for lot in done for result in lot]

    def find(self, path: str) -> int | None:
        """Return the handle of the regular file at `path`, or None; no symbolic link is followed."""
        place = self.superblock.root
        inode = self._inode(place)
        for name in map(os.fsencode, path.split("/")):
            if inode.kind != DIR:
                return None
            # Names are sorted, so the search for a missing name ends early.
            following = (item for item in listed(self._lists, inode) if item[0] >= name)
            known, place = next(following, (b"", 0))
            if known != name:
                return None
            inode = self._inode(place)
        return place if inode.kind == FILE else None

    def _entry(self, path: str, inode: Inode, first: str | None) -> Entry:
        return Entry(
            path,
            HARDLINK if first else inode.kind,
            0o777 if inode.kind == SYMLINK else inode.mode,
            inode.size if inode.kind == FILE else 0,
            first or inode.target,
            inode.uid,
            inode.gid,
            inode.mtime,
            inode.device,
            self._attributes.of(inode.xattrs),
        )

    def _inode(self, place: int) -> Inode:
        return read_inode(self._source, self._inodes.cursor(place), self._owners)

    def _block(self, place: int, word: int) -> bytes:
        stored = word & SIZE_MASK
        # The kernel's buffers hold no more, compressed or not.
        if word > UNCOMPRESSED | SIZE_MASK or not 0 < stored <= self.superblock.block_size:
            raise self._source.damaged(f"the block at {place} is of {stored} bytes")
        return self._source.block(place, stored, not word & UNCOMPRESSED, self.superblock.block_size)

    def _read_fragment(self, number: int) -> bytes:
        start, word, _ = FRAGMENT.unpack(self._fragments.row(number))
        return self._block(start, word)


def _lots(files: Sequence[tuple[Entry, int]]) -> Iterator[Sequence[tuple[Entry, int]]]:
    start = size = 0
    for number, (entry, _) in enumerate(files, 1):
        size += entry.size
        if size >= _LOT_BYTES or number - start >= _LOT_FILES:
            yield files[start:number]
            start, size = number, 0
    if start < len(files):
        yield files[start:]
