"""Streams that tar archives are read from, and the metadata of one member."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from envbuild.base.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Readable

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# The type flags of POSIX.1-2001.
TYPE_FLAGS = {FILE: b"0", HARDLINK: b"1", SYMLINK: b"2", CHAR: b"3", BLOCK: b"4", DIR: b"5", FIFO: b"6"}

Pieces = tuple[tuple[int, int], ...]  # (offset in the file, length), both in bytes
_CHUNK = 1 << 20
_MOST_PADDING = 1 << 30
_OCTAL = re.compile(rb"[0-7]+")


@dataclass(slots=True)
class Member:
    """The metadata of a tar member; names are unchanged, in surrogate-escaped UTF-8.

    `size` is the file's logical size in bytes; `stored` is the number of its bytes in the archive, at `offset`. They
    differ for sparse files, for which `pieces` maps the stored bytes to offsets in the file. `sha256` is that of the
    file's content (hexadecimal), "" where it is not known.
    """

    name: str
    kind: str
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int
    link: str
    device: tuple[int, int]
    offset: int = 0
    stored: int = 0
    pieces: Pieces | None = None
    xattrs: tuple[tuple[str, bytes], ...] = ()
    sha256: str = ""


class Chunks(io.RawIOBase):
    """A stream over an iterator of bytes. Closing it also closes `source`, the file that the bytes come from."""

    def __init__(self, chunks: Iterator[bytes], source: object = None) -> None:
        self._chunks = chunks
        self._source = source
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        while not self._ready:
            data = next(self._chunks, None)
            if data is None:
                return 0
            self._ready = memoryview(data)
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        if not self.closed and isinstance(self._source, io.IOBase):
            self._source.close()
        super().close()


class PositionedStream:
    """A stream with a position: it seeks if possible, else it reads and discards."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self.where = where
        self._stream = stream
        self.position = 0
        self._end: int | None = None
        if stream.seekable():
            self._end = stream.seek(0, 2)
            stream.seek(0)

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer only at the end."""
        data = self._stream.read(size)
        while len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        self.position += len(data)
        return data

    def exactly(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) < size:
            raise self.cut()
        return data

    def go(self, position: int) -> None:
        """Skip to `position`. Raises BuildError when the stream ends earlier."""
        if self._end is not None:
            if position > self._end:
                raise self.cut()
            self._stream.seek(position)
            self.position = position
        while self.position < position:
            self.exactly(min(position - self.position, _CHUNK))

    def finish(self) -> None:
        """Read an unseekable stream to the end, so that the checksum of compressed data is verified.

        Raises BuildError for more than a padding: it may decompress to terabytes.
        """
        most = self.position + _MOST_PADDING
        while self._end is None and self.read(_CHUNK):
            if self.position > most:
                raise BuildError(f"{self.where}: more than {_MOST_PADDING} bytes after the end of the tar archive")

    def cut(self) -> BuildError:
        return BuildError(f"{self.where}: the tar archive is cut short")


class Slice:
    """The next `size` bytes of a layer."""

    def __init__(self, source: PositionedStream, size: int) -> None:
        self._source, self._left = source, size

    def read(self, size: int = -1, /) -> bytes:
        if not self._left:
            return b""
        data = self._source.exactly(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


class Unpacked(Chunks):
    """The content of a sparse file, read from the stored bytes in `stream`."""

    def __init__(self, stream: Readable, size: int, pieces: Pieces) -> None:
        super().__init__(_sparse_chunks(stream, size, pieces))


def _sparse_chunks(stream: Readable, size: int, pieces: Pieces) -> Iterator[bytes]:
    position = 0
    for offset, length in (*pieces, (size, 0)):
        while position < offset:
            count = min(offset - position, _CHUNK)
            yield bytes(count)
            position += count
        end = offset + length
        while position < end:
            data = stream.read(min(end - position, _CHUNK))
            if not data:
                return
            yield data
            position += len(data)


def number(raw: bytes, source: PositionedStream) -> int:
    """Parse a number of a header: octal digits with spaces and NULs around them, or base 256."""
    text = raw.rstrip(b"\0 ")
    if _OCTAL.fullmatch(text):  # nearly all
        return int(text, 8)
    if raw[0] & 0x80:
        bits = 8 * len(raw) - 1
        value = int.from_bytes(raw, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if raw[0] & 0x40 else value
    text = raw.lstrip(b" \0").partition(b"\0")[0].rstrip(b" ")
    if not text:
        return 0
    if _OCTAL.fullmatch(text):
        return int(text, 8)
    raise BuildError(f"{source.where}: not a tar archive, or damaged: {raw!r} is not a number")
