"""Contents of files as streams: joined, hashed, and with errors that name the damaged archive."""

from __future__ import annotations

import contextlib
import hashlib
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO

from envbuild.errors import BuildError
from envbuild.image.entry import Readable

try:  # like zipfile itself: a Python may lack it
    from lzma import LZMAError
except ImportError:  # pragma: no cover
    LZMAError = zipfile.BadZipFile  # type: ignore[misc,assignment]

_STEP = 1 << 18
# The exceptions for archives that are damaged, encrypted or of unknown methods.
_DAMAGE = (zipfile.BadZipFile, zlib.error, LZMAError, EOFError, RuntimeError, ValueError, struct.error, OSError)


@contextlib.contextmanager
def reading(name: str, kind: str) -> Iterator[None]:
    """Turn an error in the archive `name`, which should be a `kind` ("wheel", "conda package"), into a BuildError."""
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
    """Bytes, followed by the rest of a content."""

    def __init__(self, head: bytes, rest: Readable) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int = -1, /) -> bytes:
        count = len(self._head) if size < 0 else size
        data, self._head = self._head[:count], self._head[count:]
        if size < 0 or len(data) < size:
            data += self._rest.read(size if size < 0 else size - len(data))
        return data


class HashedContent:
    """A content that is hashed while it is read; `size` is the number of bytes so far."""

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
