"""Writer of a tree as one compressed tar layer, with the same bytes each time and bounded memory.

Format: POSIX.1-2001 pax, as the OCI image specification, "Image Layer Filesystem Changeset", requires. The gzip stream
is a sequence of members (RFC 1952, section 2.2), each from 4 MiB of the tar. Several threads compress them, and the
bytes do not depend on the number of threads. libdeflate comes with its Python package, so the bytes do not depend on
the zlib of the Python build either.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from envbuild.base.errors import BuildError
from envbuild.base.workers import Answer, Workers
from envbuild.image.blobs import Blobs, NewBlob
from envbuild.image.entry import DIR, FILE, Entry, Readable, Tree, closing
from envbuild.image.model import OCI_LAYER_GZIP, Descriptor
from envbuild.image.tar_stream import TYPE_FLAGS

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
                raise BuildError(f"/{entry.path} comes twice in one layer")
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
