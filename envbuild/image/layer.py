"""Layers of images: a writer of a tree as one compressed tar, and readers of compressed layers and packages.

Written tars are POSIX.1-2001 pax, as the OCI image specification, "Image Layer Filesystem Changeset", requires. They
have the same bytes each time: the gzip stream is a sequence of members (RFC 1952, section 2.2), each from 4 MiB of the
tar, which several threads compress in any number. libdeflate comes with its Python package, so the bytes do not depend
on the zlib of the Python build either.

For reading, the first bytes decide the format, not the media type. Sources: RFC 1952 (gzip; a file may have several
members), RFC 8878 (zstd; several frames, and skippable frames), the .xz file format 1.2 (several streams). A stream
that ends within a member or a frame is an error, never a short layer.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from envbuild.base.errors import BuildError
from envbuild.base.workers import Answer, Workers, beside_reader
from envbuild.image.entry import DIR, FILE, Entry, Readable, Tree, closing, read_fully
from envbuild.image.layout import Blobs, NewBlob
from envbuild.image.limits import Quota
from envbuild.image.model import OCI_LAYER_GZIP, Descriptor
from envbuild.image.tar import TYPE_FLAGS, Chunks, Items, tar_items

_GZIP = b"\x1f\x8b"
_XZ = b"\xfd7zXZ\0"
_ZSTD = b"\x28\xb5\x2f\xfd"
_READ = 1 << 20
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
    head = read_fully(stream, 4)
    kind = kind_of(head)
    chunks = _pieces(stream, head) if kind == "none" else _decoded(stream, kind, name, head)
    return io.BufferedReader(Chunks(chunks, stream), _READ)


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
        chunk = self._stream.read(missing if missing >= _MUCH else _READ)
        self._behind.submit(self._digest.update, chunk)
        self._chunk, self._at = chunk, min(missing, len(chunk))
        return rest + chunk[:missing]

    def finish(self) -> str:
        """Read to the end, and return the digest of the whole stream."""
        while self.read(_READ):
            pass
        self._behind.finish()
        return f"sha256:{self._digest.hexdigest()}"

    def close(self) -> None:
        """End the thread."""
        self._behind.close()


def checked_tar(stream: BinaryIO, name: str, diff_id: str, quota: Quota) -> Items:
    """Yield the members of a layer's tar with their content; it must have the digest `diff_id`. Raises BuildError."""
    with contextlib.closing(Hashed(stream)) as hashed:
        yield from tar_items(cast(BinaryIO, hashed), name, quota)
        if hashed.finish() != diff_id:
            raise BuildError(f"{name}: damaged, or not the layer of the image's configuration ({diff_id})")


def _pieces(stream: Readable, data: bytes) -> Iterator[bytes]:
    while data := data or stream.read(_READ):
        yield data
        data = b""


def _decoded(stream: Readable, kind: str, name: str, data: bytes) -> Iterator[bytes]:
    """Yield the decompressed content of `data` and what follows it in `stream`; one chunk of input is held."""
    new, failure = {"gzip": _gzip_decoder, "xz": _xz_decoder, "zstd": _zstd_decoder}[kind]()
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


def _gzip_decoder() -> tuple[Callable[[], Any], type[Exception]]:
    from isal import isal_zlib  # inflates twice as fast as zlib

    return partial(isal_zlib.decompressobj, wbits=31), cast(type[Exception], isal_zlib.error)


def _xz_decoder() -> tuple[Callable[[], Any], type[Exception]]:
    import lzma

    return partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_XZ_MEMORY), lzma.LZMAError


def _zstd_decoder() -> tuple[Callable[[], Any], type[Exception]]:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError


_BLOCK = 512
_PIECE = 1 << 18
_CHUNK = 4 << 20
_MOST_WORKERS = 8
# Level 1 is several times faster than level 6, and its output is at most a third larger. Higher levels make torch's
# libraries 8 % smaller.
_LEVEL = 1


@dataclass(frozen=True, slots=True)
class Layer:
    """A written layer: its compressed blob, and the digest and size (bytes) of its tar."""

    blob: Descriptor
    diff_id: str
    unpacked: int


def write_layer(tree: Tree, blobs: Blobs) -> Layer:
    """Write `tree` to a layer in `blobs`.

    Raises BuildError when a file's length differs from its entry, or when a path occurs twice: runtimes treat
    duplicates differently.
    """
    seen: set[str] = set()
    with blobs.new() as blob, closing(tree), contextlib.closing(_Writer(blob)) as writer:
        for entry, content in tree:
            if entry.path in seen:
                raise BuildError(f"/{entry.path} is in one layer twice")
            seen.add(entry.path)
            writer.write(header(entry))
            if entry.kind == FILE and content is not None:
                _copy(entry, content, writer.write)
            elif entry.kind == FILE and entry.size:
                raise BuildError(f"{entry.path}: a file without content")
        writer.write(bytes(2 * _BLOCK))
        diff_id = writer.finish()
        blob.place()
    return Layer(Descriptor(OCI_LAYER_GZIP, blob.digest, blob.size), diff_id, writer.unpacked)


def header(entry: Entry) -> bytes:
    """Return the tar header blocks of `entry`."""
    info = tarfile.TarInfo(entry.path + "/" if entry.kind == DIR else entry.path)
    info.type = TYPE_FLAGS[entry.kind]
    info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.uid, entry.gid, entry.mtime
    info.size = entry.size if entry.kind == FILE else 0
    info.linkname = entry.target
    info.devmajor, info.devminor = entry.device
    info.pax_headers = {
        f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape") for name, value in entry.xattrs
    }
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _copy(entry: Entry, content: Readable, write: Callable[[bytes], None]) -> None:
    left = entry.size
    while left and (data := content.read(min(left, _PIECE))):
        write(data)
        left -= len(data)
    if left or content.read(1):
        raise BuildError(f"{entry.path}: not {entry.size} bytes long as its archive says")
    write(bytes(-entry.size % _BLOCK))


def _gzip(data: bytes) -> bytearray:
    from deflate import gzip_compress

    return gzip_compress(data, _LEVEL)


class _Writer:
    """A writer that collects chunks, compresses them in a pool, and writes the results in order."""

    def __init__(self, out: NewBlob) -> None:
        # The single reader of the tree keeps no more threads busy, and each thread holds a chunk.
        workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        self.unpacked = 0
        self._out = out
        self._pool = Workers(workers)
        self._hasher = Workers(1)  # one thread, so that chunks are hashed in order
        self._buffer = bytearray()
        self._pending: deque[tuple[Answer[bytearray], Answer[None]]] = deque()
        self._most = workers + 1
        self._tar = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _CHUNK:
            self._submit(bytes(memoryview(self._buffer)[:_CHUNK]))
            del self._buffer[:_CHUNK]

    def finish(self) -> str:
        """Write the rest, and return the digest of the tar."""
        if self._buffer:
            self._submit(bytes(self._buffer))
        while self._pending:
            self._drain()
        return f"sha256:{self._tar.hexdigest()}"

    def close(self) -> None:
        self._pool.close()
        self._hasher.close()

    def _submit(self, chunk: bytes) -> None:
        self.unpacked += len(chunk)
        while len(self._pending) >= self._most:
            self._drain()
        hashed = self._hasher.submit(self._tar.update, chunk)
        self._pending.append((self._pool.submit(_gzip, chunk), hashed))

    def _drain(self) -> None:
        packed, hashed = self._pending.popleft()
        self._out.write(packed.result())
        hashed.result()


def with_parents(tree: Tree, mtime: int) -> Tree:
    """Yield `tree` with each path preceded by its missing parent directories, and each directory once."""
    seen = {""}
    with closing(tree):
        for entry, content in tree:
            for parent in _missing(entry.path, seen):
                yield Entry(parent, DIR, 0o755, mtime=mtime), None
            if entry.kind == DIR:
                if entry.path in seen:
                    continue
                seen.add(entry.path)
            yield entry, content


def _missing(path: str, seen: set[str]) -> Iterable[str]:
    parents = []
    parent = path.rpartition("/")[0]
    while parent not in seen:
        parents.append(parent)
        seen.add(parent)
        parent = parent.rpartition("/")[0]
    return reversed(parents)
