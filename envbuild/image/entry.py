"""A path in a file system tree: the common form for layers, packages and merged images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

FILE, DIR, SYMLINK, HARDLINK = "file", "dir", "symlink", "hardlink"
CHAR, BLOCK, FIFO = "char", "block", "fifo"


class Readable(Protocol):
    """The content of a file, read once from start to end."""

    def read(self, size: int = -1, /) -> bytes: ...


def read_fully(content: Readable, size: int) -> bytes:
    """Return `size` bytes of `content`, fewer only at its end: a single read may return less than is available."""
    pieces = [content.read(size)]
    left = size - len(pieces[0])
    while left > 0 and (piece := content.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class Entry:
    """A path with its metadata.

    `path` is relative to the root, without "." or ".." parts and without a slash at either end; the root is "". `mode`
    holds permission bits with setuid, setgid and sticky (0o7777). `size` is in bytes. `target` is the text of a
    symbolic link, unchanged, or the path that a hard link names, in the form of `path`. `mtime` is in seconds since
    1970.
    """

    path: str
    kind: str = FILE
    mode: int = 0o644
    size: int = 0
    target: str = ""
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    device: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[str, bytes], ...] = ()


# The content of a layer: entries in order, parents first, each file with its content. The consumer reads the content
# before it asks for the next item, so that archives can be streamed.
Tree = Iterable[tuple[Entry, Readable | None]]


@contextlib.contextmanager
def closing(tree: Tree) -> Iterator[Tree]:
    """Close `tree` at the end of the block rather than when it is garbage-collected.

    A tree may hold archives and processes. A generator that iterates over a tree needs this. An exception leaves the
    tree half read, and the exception's traceback keeps its threads and processes alive until Python exits, which waits
    for them.
    """
    try:
        yield tree
    finally:
        if close := getattr(tree, "close", None):
            close()


def path_parts(name: str) -> list[str]:
    """Return the parts of a path below the root; ".." at the root has no effect."""
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return parts
