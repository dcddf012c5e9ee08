"""Contents of files as streams: joined, hashed, with errors that name the damaged archive, inflated by isal.

zipfile uses zlib, which takes twice as long. Source: APPNOTE.TXT 6.3.10, sections 4.3.7 (local file header) and 4.4.5
(methods).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, BinaryIO, cast

from envbuild.base.errors import BuildError
from envbuild.image.entry import Readable

try:  # like zipfile itself: a Python may lack it
    from lzma import LZMAError
except ImportError:  # pragma: no cover
    LZMAError = zipfile.BadZipFile  # type: ignore[misc,assignment]

_STEP = 1 << 18
_HEADER = struct.Struct("<4s22xHH")
_MAGIC = b"PK\3\4"
_ENCRYPTED = 1
# For smaller members, the setup of isal costs more than it saves.
_LARGE = 1 << 16
# The exceptions for archives that are damaged, encrypted or of unknown methods.
_DAMAGE = (zipfile.BadZipFile, zlib.error, LZMAError, EOFError, RuntimeError, ValueError, struct.error, OSError)


@contextlib.contextmanager
def reading(name: str, kind: str) -> Iterator[None]:
    """Raise BuildError for errors in the archive `name`; `kind` ("wheel", "conda package") is its expected kind."""
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.strerror:
            raise BuildError(f"{name}: cannot be read: {error.strerror}") from error
        raise BuildError(f"{name}: not a {kind}, or damaged: {str(error) or type(error).__name__}") from error


class Guarded(io.RawIOBase):
    """A forward-only stream of an archive's data; see `reading`."""

    def __init__(self, stream: IO[bytes], name: str, kind: str) -> None:
        self._stream, self._name, self._kind = stream, name, kind

    def read(self, size: int = -1, /) -> bytes:
        with reading(self._name, self._kind):
            return self._stream.read(size)


class Joined:
    """Stream of some bytes, followed by the rest of another stream."""

    def __init__(self, head: bytes, rest: Readable) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int = -1, /) -> bytes:
        count = len(self._head) if size < 0 else size
        data, self._head = self._head[:count], self._head[count:]
        if size < 0 or len(data) < size:
            data += self._rest.read(size if size < 0 else size - len(data))
        return data


class HashedContent:
    """Stream that is hashed while it is read; `size` is the number of bytes read so far."""

    def __init__(self, content: Readable) -> None:
        self._content, self._sha256, self.size = content, hashlib.sha256(), 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._content.read(size)
        self._sha256.update(data)
        self.size += len(data)
        return data

    def digest(self) -> bytes:
        """Read the rest, and return the sha256 of the whole content."""
        while self.read(_STEP):
            pass
        return self._sha256.digest()


def open_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """Open a member like `archive.open(info)`, but faster if it is large; read one member at a time."""
    stream = archive.fp
    deflated = info.compress_type == zipfile.ZIP_DEFLATED and not info.flag_bits & _ENCRYPTED
    if stream is None or not deflated or info.file_size < _LARGE:
        return archive.open(info)
    stream.seek(info.header_offset)
    magic, name, extra = _HEADER.unpack(stream.read(_HEADER.size))
    if magic != _MAGIC:
        raise zipfile.BadZipFile(f"no local header of {info.filename}")
    start = info.header_offset + _HEADER.size + name + extra
    return cast("IO[bytes]", _Inflated(cast(BinaryIO, stream), start, info))


class _Inflated(io.RawIOBase):
    def __init__(self, stream: BinaryIO, start: int, info: zipfile.ZipInfo) -> None:
        from isal import isal_zlib

        self._stream, self._at, self._info = stream, start, info
        self._end = start + info.compress_size
        self._decoder = isal_zlib.decompressobj(-15)
        self._crc32 = isal_zlib.crc32
        self._error = cast("type[Exception]", isal_zlib.error)
        self._crc = self._size = 0
        self._input = b""

    def read(self, size: int = -1, /) -> bytes:
        """Return `size` bytes, fewer only at the end; everything when `size` is negative."""
        parts: list[bytes] = []
        left = size if size >= 0 else self._info.file_size
        while left > 0 and (data := self._more(left)):
            parts.append(data)
            left -= len(data)
        return b"".join(parts)

    def _more(self, most: int) -> bytes:
        data = b""
        while not data and not self._decoder.eof:
            if not self._input:
                self._stream.seek(self._at)  # others may read the archive, too
                self._input = self._stream.read(min(_STEP, self._end - self._at))
                self._at += len(self._input)
            ended = not self._input  # but the decoder may hold back output
            try:
                data = self._decoder.decompress(self._input, most)
            except self._error as error:
                raise zipfile.BadZipFile(f"{self._info.filename}: {error}") from None
            self._input = self._decoder.unconsumed_tail
            if ended and not data and not self._decoder.eof:
                raise EOFError(f"{self._info.filename} is cut short")
        self._crc = self._crc32(data, self._crc)
        self._size += len(data)
        if self._size > self._info.file_size:
            raise zipfile.BadZipFile(f"{self._info.filename} is longer than the archive says")
        if self._decoder.eof and self._size < self._info.file_size:
            raise zipfile.BadZipFile(f"{self._info.filename} is shorter than the archive says")
        if self._size == self._info.file_size and self._crc != self._info.CRC:
            raise zipfile.BadZipFile(f"bad CRC-32 of {self._info.filename}")
        return data
