"""One path of a filesystem tree, as layers, packages and merged images describe it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

FILE, DIR, SYMLINK, HARDLINK = "file", "dir", "symlink", "hardlink"
CHAR, BLOCK, FIFO = "char", "block", "fifo"


class Readable(Protocol):
    """The content of a file, read once from its start to its end."""

    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A path with its metadata.

    `path` is relative to the root, without "." or ".." parts and without a slash at either end; the root
    itself is "". `mode` holds permission bits with setuid, setgid and sticky (0o7777). `size` is in bytes.
    `target` is a symbolic link's text as it is, or for a hard link the path it names, in the form of
    `path`. `mtime` is in seconds since 1970.
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


# What fills a layer: entries in order, parents first, with the content of each file. The content is read
# before the next item is asked for, so that archives can be streamed.
Tree = Iterable[tuple[Entry, Readable | None]]


@contextlib.contextmanager
def closing(tree: Tree) -> Iterator[Tree]:
    """`tree`, closed at the end of the block, not when it is collected: it may hold archives and processes.

    Whoever walks a tree within a generator needs this: an exception there leaves the tree half read, and the
    exception's traceback keeps it, its threads and its processes alive until Python ends, which waits for them.
    """
    try:
        yield tree
    finally:
        close = getattr(tree, "close", None)
        if close is not None:
            close()
