"""Large members of a zip archive, inflated by isal: zipfile uses zlib, which takes twice as long.

Source: APPNOTE.TXT 6.3.10, sections 4.3.7 (local file header) and 4.4.5 (methods).
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import IO, BinaryIO, cast

_HEADER = struct.Struct("<4s22xHH")
_MAGIC = b"PK\3\4"
_ENCRYPTED = 1
# For smaller members, the setup costs more than it saves.
_LARGE = 1 << 16
_CHUNK = 1 << 18


def open_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """Open a member like `archive.open(info)`, with faster reading of large members; read one member at a time.

    Raises zipfile's exceptions for a damaged member, here and in reading.
    """
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
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _more(self, most: int) -> bytes:
        data = b""
        while not data and not self._decoder.eof:
            if not self._input:
                self._stream.seek(self._at)  # others may read the archive, too
                self._input = self._stream.read(min(_CHUNK, self._end - self._at))
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
