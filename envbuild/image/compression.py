"""Decompression of layers. The first bytes decide the format, not the media type.

Sources: RFC 1952 (gzip; a file may have several members), RFC 8878 (zstd; several frames, and skippable frames). A
stream that ends within a member or a frame is an error, never a short layer.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from envbuild.errors import BuildError
from envbuild.image.entry import Readable
from envbuild.workers import Answer, Workers

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20
_BEHIND = 8  # chunks
# Four bytes of zstd decompress to at most 128 KiB, and the decoder cannot be told to stop. Small input chunks limit its
# output to 128 MiB for any input, at no measurable cost.
_ZSTD_CHUNK = 4096


def kind_of(head: bytes) -> str:
    """Return `gzip`, `zstd` or `none`, given at least the first four bytes of a layer."""
    if head.startswith(_GZIP):
        return "gzip"
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
    return stream if kind == "none" else cast(BinaryIO, _Decompressed(stream, kind, name))


def decompressed(stream: BinaryIO, name: str) -> BinaryIO:
    """Return a stream of the uncompressed content of `stream`, which need not be seekable; closing it closes `stream`.

    Reading raises BuildError, naming `name`, when the data is truncated or corrupt.
    """
    head = b""
    while len(head) < 4 and (data := stream.read(4 - len(head))):
        head += data
    return cast(BinaryIO, _Decompressed(stream, kind_of(head), name, head))


class Hashed:
    """A stream that computes a digest of all its bytes. It cannot seek, so each byte is read exactly once.

    A thread computes the digest, a few MiB behind the reader at most; `close` ends it.
    """

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._thread = Workers(1)
        self._pieces: list[bytes] = []
        self._held = 0
        self._pending: deque[Answer[None]] = deque()

    def seekable(self) -> bool:
        """Return False: the digest needs every byte in order."""
        return False

    def read(self, size: int = -1, /) -> bytes:
        """See `Readable`."""
        data = self._stream.read(size)
        self._pieces.append(data)
        self._held += len(data)
        if self._held >= _CHUNK:
            self._hand_over()
        return data

    def finish(self) -> str:
        """Read to the end, and return the digest of the whole stream."""
        while self.read(_CHUNK):
            pass
        self._hand_over()
        while self._pending:
            self._pending.popleft().result()
        return f"sha256:{self._digest.hexdigest()}"

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _hand_over(self) -> None:
        while len(self._pending) >= _BEHIND:
            self._pending.popleft().result()
        data = b"".join(self._pieces)
        self._pieces, self._held = [], 0
        self._pending.append(self._thread.submit(self._digest.update, data))


class _Decoder(Protocol):
    """A decoder of one gzip member or one zstd frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...


class _Decompressed(io.RawIOBase):
    """A forward-only stream of decompressed data. It holds one chunk of input and its output."""

    def __init__(self, stream: Readable, kind: str, name: str, head: bytes = b"") -> None:
        self._stream, self._kind, self._name = stream, kind, name
        self._input = head
        self._ready = b""
        self._used = 0
        self._decoder: _Decoder | None = None
        self._step: Callable[[bytes], bytes] = {"none": self._copy, "gzip": self._gunzip, "zstd": self._unzstd}[kind]

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed and isinstance(self._stream, io.IOBase):
            self._stream.close()
        super().close()

    def read(self, size: int = -1, /) -> bytes:
        """Return `size` bytes, fewer only at the end; everything when `size` is negative."""
        left = len(self._ready) - self._used
        if 0 <= size <= left:
            start, self._used = self._used, self._used + size
            return self._ready[start : self._used]
        parts = [self._ready[self._used :]]
        self._ready, self._used = b"", 0
        while size < 0 or left < size:
            data = self._more()
            if not data:
                break
            parts.append(data)
            left += len(data)
        if 0 <= size < left:
            last = parts[-1]
            self._ready, self._used = last, len(last) - (left - size)
            parts[-1] = last[: self._used]
        return b"".join(parts) if len(parts) > 1 else parts[0]

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _more(self) -> bytes:
        """Return the next uncompressed bytes, b"" at the end."""
        while True:
            # A zstd decoder can hold back output while it needs no input; a gzip decoder leaves its input unconsumed
            # instead.
            if not self._input:
                self._input = self._stream.read(_CHUNK if self._kind != "zstd" else _ZSTD_CHUNK)
                if not self._input:
                    if self._decoder is not None and (output := self._step(b"")):
                        return output  # held back by the decoder
                    if self._decoder is not None:
                        raise BuildError(f"{self._name}: the {self._kind} data is cut short")
                    return b""
            data, self._input = self._input, b""
            output = self._step(data)
            if output:
                return output

    def _copy(self, data: bytes) -> bytes:
        return data

    def _gunzip(self, data: bytes) -> bytes:
        from isal import isal_zlib

        if self._decoder is None:
            # Tape writers and some tools pad the last member with zeros.
            data = data.lstrip(b"\0")
            if not data:
                return b""
            if not data.startswith(_GZIP[: len(data)]):  # isal waits for more input
                raise BuildError(f"{self._name}: the gzip data is corrupt: no gzip header")
            # isal inflates twice as fast as zlib.
            self._decoder = isal_zlib.decompressobj(wbits=31)
        decoder = cast("zlib._Decompress", self._decoder)
        try:
            output = decoder.decompress(data, _CHUNK)
        except (cast(type[Exception], isal_zlib.error), zlib.error) as error:
            raise BuildError(f"{self._name}: the gzip data is corrupt: {error}") from None
        if decoder.eof:
            self._input, self._decoder = decoder.unused_data, None
        else:
            self._input = decoder.unconsumed_tail
        return output

    def _unzstd(self, data: bytes) -> bytes:
        import zstandard

        if self._decoder is None:
            self._decoder = zstandard.ZstdDecompressor().decompressobj()
        decoder = cast("zstandard.ZstdDecompressionObj", self._decoder)
        try:
            output = decoder.decompress(data)
        except zstandard.ZstdError as error:
            raise BuildError(f"{self._name}: the zstd data is corrupt: {error}") from None
        if decoder.eof:
            self._input, self._decoder = decoder.unused_data, None
        return output
