"""Reader of the metadata of a squashfs image: superblock, metadata blocks, and tables with lookup by number.

Images are not trusted: every offset and size is checked before use.
"""

from __future__ import annotations

import io
import os
import threading
from collections import namedtuple
from typing import BinaryIO

from envbuild.base.errors import BuildError, UsageError
from envbuild.image.squashfs.codec import decompressor
from envbuild.image.squashfs.model import MAGIC, METADATA_SIZE, METADATA_STORED, NO_TABLE, SUPERBLOCK

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
