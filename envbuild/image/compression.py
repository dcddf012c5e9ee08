"""Decompression of layers and packages. The first bytes decide the format, not the media type.

Sources: RFC 1952 (gzip; a file may have several members), RFC 8878 (zstd; several frames, and skippable frames), the
.xz file format 1.2 (several streams). A stream that ends within a member or a frame is an error, never a short layer.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from envbuild.base.errors import BuildError
from envbuild.base.workers import beside_reader
from envbuild.image.entry import Readable
from envbuild.image.tar_stream import Chunks

_GZIP = b"\x1f\x8b"
_XZ = b"\xfd7zXZ\0"
_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20
_BEHIND = 8  # chunks
_MUCH = 1 << 17
# One byte of gzip decompresses to at most 1 KiB, one of xz to 7 KiB, four bytes of zstd to 128 KiB, and a zstd decoder
# cannot be told to stop. Small input chunks limit their output to 128 MiB for any input, at no measurable cost.
_XZ_MEMORY = 128 << 20  # `xz -9` needs 65 MiB; the format allows dictionaries of 4 GiB
_INPUT = {"gzip": 1 << 16, "xz": 1 << 14, "zstd": 1 << 12}


def kind_of(head: bytes) -> str:
    """Return `gzip`, `xz`, `zstd` or `none`, given at least the first four bytes of a layer."""
    if head.startswith(_GZIP):
        return "gzip"
    if head.startswith(_XZ[:4]):
        return "xz"
    # A zstd stream may begin with a skippable frame: magic number 0x184D2A50 to 0x184D2A5F, little-endian.
    if head.startswith(_ZSTD) or (head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
        return "zstd"
    return "none"


def open_layer(path: Path, name: str) -> BinaryIO:
    """Open a layer's blob to read its tar; the stream is seekable when the blob is stored uncompressed.

    Reading raises BuildError, naming `name`, when the blob is truncated or corrupt.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise BuildError(f"{name}: {path}: {error.strerror}") from error
    kind = kind_of(stream.read(4))
    stream.seek(0)
    return stream if kind == "none" else decompressed(stream, name)


def decompressed(stream: BinaryIO, name: str) -> BinaryIO:
    """Return a stream of the uncompressed content of `stream`, which need not be seekable; closing it closes `stream`.

    Reading raises BuildError, naming `name`, when the data is truncated or corrupt.
    """
    if isinstance(stream, io.BufferedReader) and not stream.seekable():
        head = stream.peek(4)[:4]
        if len(head) == 4 and kind_of(head) == "none":
            return stream  # as it is: each buffer more costs a copy
    head = b""
    while len(head) < 4 and (data := stream.read(4 - len(head))):
        head += data
    kind = kind_of(head)
    chunks = _pieces(stream, head) if kind == "none" else _decoded(stream, kind, name, head)
    return io.BufferedReader(Chunks(chunks, stream), _CHUNK)


class Hashed:
    """A stream that hashes what it reads, at most a few MiB behind; it cannot seek, so each byte is read once."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._behind = beside_reader(_BEHIND)
        self._chunk, self._at = b"", 0

    def seekable(self) -> bool:
        """Return False: the digest needs every byte in order."""
        return False

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes, fewer only at the end."""
        start, end = self._at, self._at + size
        if end <= len(self._chunk):
            self._at = end
            return self._chunk[start:end]
        rest = self._chunk[start:]
        missing = size - len(rest)
        # Much is read as it is wanted, without a copy; little is cut from a chunk.
        chunk = self._stream.read(missing if missing >= _MUCH else _CHUNK)
        self._behind.submit(self._digest.update, chunk)
        self._chunk, self._at = chunk, min(missing, len(chunk))
        return rest + chunk[:missing]

    def finish(self) -> str:
        """Read to the end, and return the digest of the whole stream."""
        while self.read(_CHUNK):
            pass
        self._behind.finish()
        return f"sha256:{self._digest.hexdigest()}"

    def close(self) -> None:
        """End the thread."""
        self._behind.close()


def _pieces(stream: Readable, data: bytes) -> Iterator[bytes]:
    while data := data or stream.read(_CHUNK):
        yield data
        data = b""


def _decoded(stream: Readable, kind: str, name: str, data: bytes) -> Iterator[bytes]:
    """Yield the decompressed content of `data` and what follows it in `stream`; one chunk of input is held."""
    new, failure = {"gzip": _gzip, "xz": _xz, "zstd": _zstd}[kind]()
    decoder: Any = None  # of one gzip member or one zstd frame
    while True:
        data = data or stream.read(_INPUT[kind])
        if decoder is None:
            if not data:
                return
            if kind != "zstd":
                data = data.lstrip(b"\0")  # tape writers and some tools pad the last member with zeros
                if not data:
                    continue
                magic = {"gzip": _GZIP, "xz": _XZ}[kind]
                if not data.startswith(magic[: len(data)]):  # the decoders wait for more input
                    raise BuildError(f"{name}: the {kind} data is corrupt: no {kind} header")
            decoder = new()
        try:
            output = decoder.decompress(data)
        except failure as error:
            raise BuildError(f"{name}: the {kind} data is corrupt: {error}") from None
        if decoder.eof:
            data, decoder = decoder.unused_data, None
        elif data or output:  # a zstd decoder can hold back output while it needs no input
            data = b""
        else:
            raise BuildError(f"{name}: the {kind} data is cut short")
        if output:
            yield output


def _gzip() -> tuple[Callable[[], Any], type[Exception]]:
    from isal import isal_zlib  # inflates twice as fast as zlib

    return partial(isal_zlib.decompressobj, wbits=31), cast(type[Exception], isal_zlib.error)


def _xz() -> tuple[Callable[[], Any], type[Exception]]:
    import lzma

    return partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_XZ_MEMORY), lzma.LZMAError


def _zstd() -> tuple[Callable[[], Any], type[Exception]]:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
