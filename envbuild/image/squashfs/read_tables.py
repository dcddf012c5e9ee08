"""Reader of the metadata of a squashfs image: superblock and metadata blocks.

Images are not trusted: every offset and size is checked before use.
"""

from __future__ import annotations

import io
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from envbuild.errors import BuildError, UsageError
from envbuild.image.squashfs.codec import NAMES, Decompress, decompressor

_SUPERBLOCK = struct.Struct("<IIIIIHHHHHHQQQQQQQQ")
MAGIC = 0x73717368
_ABSENT = (1 << 64) - 1
# The size of an uncompressed metadata block in bytes; the bit _STORED in a block's header marks it as uncompressed.
METADATA = 8192
_STORED = 0x8000
_KEPT_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Superblock:
    """The superblock of an image; sizes are in bytes, `mtime` is in seconds since 1970.

    `inodes` counts files of every kind, each once; offsets of tables are relative to the image, None for an absent
    table.
    """

    compressor: str
    block_size: int
    mtime: int
    bytes_used: int
    inodes: int
    flags: int
    fragments: int
    ids: int
    root: int
    id_table: int
    xattr_table: int | None
    inode_table: int
    directory_table: int
    fragment_table: int | None
    export_table: int | None

    def end_of(self, start: int) -> int:
        """Return the upper bound for the end of the table that begins at `start`: the start of the next one."""
        starts = [self.id_table, self.inode_table, self.directory_table, self.bytes_used]
        starts += [t for t in (self.xattr_table, self.fragment_table, self.export_table) if t is not None]
        return min(at for at in starts if at > start)


class ImageBytes:
    """The bytes of an image within a file. Several threads may use it at once."""

    def __init__(self, stream: BinaryIO, base: int, where: str) -> None:
        self.where = where
        self._base = base
        self._read = _reader(stream)
        self.size = _SUPERBLOCK.size
        self.superblock, self.undo = self._open()
        self.size = self.superblock.bytes_used
        self._check_end(stream)

    def damaged(self, what: str) -> BuildError:
        """Return an error about damage in the image."""
        return BuildError(f"{self.where}: damaged squashfs: {what}")

    def at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset` of the image. Raises BuildError when the image or the file ends earlier."""
        if offset < 0 or offset + size > self.size:
            raise self.damaged(f"{size} bytes at {offset} lie outside of it")
        try:
            data = self._read(self._base + offset, size)
        except OSError as error:
            raise BuildError(f"{self.where}: cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise BuildError(f"{self.where}: cut short: {size} bytes at {offset} are not there")
        return data

    def block(self, offset: int, stored: int, compressed: bool, most: int) -> bytes:
        """Return the content, at most `most` bytes, of the block of `stored` bytes at `offset`."""
        data = self.at(offset, stored)
        if not compressed:
            if stored > most:
                raise self.damaged(f"the block at {offset} is longer than {most} bytes")
            return data
        try:
            return self.undo(data, most)
        except ValueError as error:
            raise self.damaged(f"the block at {offset}: {error}") from None

    def _open(self) -> tuple[Superblock, Decompress]:
        (magic, inodes, mtime, block_size, fragments, compressor, log, flags, ids, major, minor, root,
         used, id_table, xattrs, inode_table, directories, fragment_table, export) = (
            _SUPERBLOCK.unpack(self.at(0, _SUPERBLOCK.size))
        )  # fmt: skip
        if magic != MAGIC:
            raise BuildError(f"{self.where}: not a squashfs image")
        if (major, minor) != (4, 0):
            raise BuildError(f"{self.where}: squashfs {major}.{minor}; only 4.0 can be read")
        if not 12 <= log <= 20 or block_size != 1 << log:
            raise self.damaged(f"blocks of {block_size} bytes")
        for table in (id_table, inode_table, directories):
            if not _SUPERBLOCK.size <= table < used:
                raise self.damaged(f"a table at {table} of {used} bytes")
        if not ids:
            raise self.damaged("no owners are listed")
        try:
            undo = decompressor(compressor)
        except UsageError as error:
            raise BuildError(f"{self.where}: {error.message}", error.hint) from None
        found = Superblock(
            NAMES.get(compressor, str(compressor)), block_size, mtime, used, inodes, flags, fragments,
            ids, root, id_table, _table(xattrs), inode_table, directories,
            _table(fragment_table) if fragments else None, _table(export),
        )  # fmt: skip
        return found, undo

    def _check_end(self, stream: BinaryIO) -> None:
        end = stream.seek(0, io.SEEK_END)
        if self._base + self.size > end:
            raise BuildError(f"{self.where}: cut short: {end - self._base} bytes of a squashfs of {self.size}")


class MetadataReader:
    """A reader of the metadata blocks from `start` to `end` of the image, which are decompressed on request."""

    def __init__(self, source: ImageBytes, start: int, end: int) -> None:
        self.source = source
        self._start, self._end = start, end
        self._kept: dict[int, tuple[bytes, int]] = {}
        self._lock = threading.Lock()
        self._capacity = -1

    def cursor(self, block: int, offset: int) -> Cursor:
        """Return a cursor `offset` bytes into the block that is `block` bytes after the start."""
        data, following = self.block(self._start + block)
        if offset > len(data):
            raise self.source.damaged(f"offset {offset} in the metadata block at {block}")
        return Cursor(self, data, offset, following)

    def block(self, position: int) -> tuple[bytes, int]:
        """Return the content of the block at `position` of the image, and the position of the next one."""
        known = self._kept.get(position)
        if known is not None:
            return known
        stored, compressed, begin = self._header(position)
        data = self.source.block(begin, stored, compressed, METADATA)
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
        if self._capacity < 0:
            count, position = 0, self._start
            while position < self._end:
                stored, _, begin = self._header(position)
                position = begin + stored
                count += 1
            self._capacity = count * METADATA
        return self._capacity

    def _header(self, position: int) -> tuple[int, bool, int]:
        """Return a block's stored size, whether it is compressed, and the position of its data."""
        if not self._start <= position < self._end:
            raise self.source.damaged(f"a metadata block at {position}, outside of its table")
        header = int.from_bytes(self.source.at(position, 2), "little")
        stored = header & ~_STORED
        if not 0 < stored <= METADATA or position + 2 + stored > self._end:
            raise self.source.damaged(f"the metadata block at {position} is of {stored} bytes")
        return stored, not header & _STORED, position + 2


class Cursor:
    """A position in metadata; reading continues across blocks."""

    __slots__ = ("_at", "_data", "_following", "_table")

    def __init__(self, table: MetadataReader, data: bytes, at: int, following: int) -> None:
        self._table, self._data, self._at, self._following = table, data, at, following

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises BuildError when the table ends earlier."""
        end = self._at + size
        if end <= len(self._data):
            taken = self._data[self._at : end]
            self._at = end
            return taken
        taken = self._data[self._at :]
        parts, missing = [taken], size - len(taken)
        while missing:
            self._data, self._following = self._table.block(self._following)
            parts.append(self._data[:missing])
            self._at = len(parts[-1])
            missing -= self._at
        return b"".join(parts)


def _table(start: int) -> int | None:
    return None if start == _ABSENT else start


def _reader(stream: BinaryIO) -> Callable[[int, int], bytes]:
    """Return a function that reads (offset, size) of a file and is safe to call from several threads."""
    if isinstance(stream, io.FileIO | io.BufferedReader | io.BufferedRandom):
        return lambda offset, size: os.pread(stream.fileno(), size, offset)
    lock = threading.Lock()

    def read(offset: int, size: int) -> bytes:
        with lock:
            stream.seek(offset)
            return stream.read(size)

    return read
