"""A tar archive's stream, and what its headers say of one member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from envbuild.errors import BuildError

Pieces = tuple[tuple[int, int], ...]  # (offset in the file, length), both in bytes
_SKIP = 1 << 20


@dataclass(slots=True)
class Member:
    """One member as its headers describe it; names are as they stand there, in surrogate-escaped UTF-8.

    `size` is what a reader of the file sees, in bytes; `stored` bytes lie in the archive at `offset`.
    They differ for sparse files, of which `pieces` tells where the stored bytes belong.
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


class PositionedStream:
    """A stream with its position: seeks where it can, else reads and discards."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self.where = where
        self._stream = stream
        self.position = 0
        self._end: int | None = None
        if stream.seekable():
            self._end = stream.seek(0, 2)
            stream.seek(0)

    def read(self, size: int) -> bytes:
        """`size` bytes, or less at the end."""
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
        """Pass over what lies before `position`. Raises BuildError when the stream ends sooner."""
        if self._end is not None:
            if position > self._end:
                raise self.cut()
            self._stream.seek(position)
            self.position = position
        while self.position < position:
            self.exactly(min(position - self.position, _SKIP))

    def finish(self) -> None:
        """Read on to the end where there is no seeking: a checksum of the compressed data stands there."""
        while self._end is None and self.read(_SKIP):
            pass

    def cut(self) -> BuildError:
        return BuildError(f"{self.where}: the tar archive is cut short")
