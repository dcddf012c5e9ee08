"""The stream of a tar archive, and the metadata of one member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from envbuild.errors import BuildError

Pieces = tuple[tuple[int, int], ...]  # (offset in the file, length), both in bytes
_SKIP = 1 << 20


@dataclass(slots=True)
class Member:
    """The metadata of a tar member; names are unchanged, in surrogate-escaped UTF-8.

    `size` is the file's logical size in bytes; `stored` is the number of its bytes in the archive, at `offset`. They
    differ for sparse files, for which `pieces` maps the stored bytes to offsets in the file.
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
            self.exactly(min(position - self.position, _SKIP))

    def finish(self) -> None:
        """Read an unseekable stream to the end, so that the checksum of compressed data is verified."""
        while self._end is None and self.read(_SKIP):
            pass

    def cut(self) -> BuildError:
        return BuildError(f"{self.where}: the tar archive is cut short")
