"""Images on a node's own disk, and the pieces of which they consist."""

# ruff: noqa: UP006, UP007, UP032, UP035, UP045 - Python 3.6

import fcntl
import hashlib
import json
import os
import time
from typing import IO, Callable, Dict, Iterator, List, Optional, Tuple, Union

Piece = Tuple[int, bytes]
"""The size of a piece and its SHA-256."""

# A piece ends after these bytes, at one place in 64 kB of compressed data, and has so many bytes.
END, LEAST, MOST = b"\x5a\xc3", 1 << 20, 4 << 20
FRESH_S = 3600  # what was used so recently is not removed


class Lost(Exception):
    """Staging cannot go on: here, or at the parent."""


def split(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield the pieces of what `read(SIZE)` returns until it returns nothing."""
    data, more = b"", b"-"
    while more:
        more = read(MOST)
        data += more
        while len(data) >= MOST or (data and not more):
            found = data.find(END, LEAST, MOST)
            size = found + len(END) if found >= 0 else min(MOST, len(data))
            yield data[:size]
            data = data[size:]


def piece_of(data: bytes) -> Piece:
    """Return the size and the SHA-256 of a piece."""
    return len(data), hashlib.sha256(data).digest()


def seal(file: Union[str, int]) -> str:
    """Return what tells that a file is as it was. Raises OSError."""
    status = os.stat(file)
    return "{} {} {} {}".format(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def locked(file: IO[bytes]) -> bool:
    """Return whether nobody else has the file; then it is this process's."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class Folder:
    """The folder of images: KEY.image and, once it is whole, KEY.list; *.part is a copy that is being made.

    `keep` is the limit of their sizes in bytes.
    """

    def __init__(self, path: str, keep: int) -> None:
        self.path, self.keep = path, keep
        self.known: Dict[Piece, Tuple[str, int]] = {}

    def make(self) -> None:
        """Make the folder. Raises OSError, and Lost for a folder that others may write to."""
        path = self.path
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.lstat(path)
        if status.st_uid != os.getuid() or os.path.islink(path) or status.st_mode & 0o22:
            raise Lost("{} must be a folder of this user alone".format(path))

    def at(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.path, name)

    def write(self, name: str, text: str) -> None:
        """Write a small file at once. Raises OSError."""
        draft = self.at("{}.{}.new".format(name, os.getpid()))
        with open(draft, "w") as file:
            file.write(text)
        os.rename(draft, self.at(name))

    def link(self, name: str, target: str) -> None:
        """Let `name` lead to `target`. Raises OSError."""
        draft = self.at("{}.{}.new".format(name, os.getpid()))
        os.symlink(target, draft)
        os.rename(draft, self.at(name))

    def listed(self, key: str) -> Optional[List[Piece]]:
        """Return the pieces of an image, None if it is not here as it was written."""
        try:
            with open(self.at(key + ".list")) as file:
                sealed, pieces = json.load(file)
            if sealed == seal(self.at(key + ".image")):
                return [(size, bytes.fromhex(digest)) for size, digest in pieces]
        except (OSError, ValueError, TypeError):
            pass
        return None

    def learn(self) -> None:
        """Find out which pieces are here, also in copies that a killed job left. Raises OSError."""
        for name in sorted(os.listdir(self.path)):
            stem, _, kind = name.rpartition(".")
            pieces = (self.listed(stem) or []) if kind == "image" else []
            if kind == "part":
                with open(self.at(name), "rb") as file:
                    pieces = [piece_of(data) for data in split(file.read)] if locked(file) else []
            offset = 0
            for one in pieces:
                self.known[one] = name, offset
                offset += one[0]

    def piece(self, one: Piece) -> Optional[bytes]:
        """Return a piece from this disk, None if it is not here."""
        if one not in self.known:
            return None
        name, offset = self.known[one]
        try:
            with open(self.at(name), "rb") as file:
                data = os.pread(file.fileno(), one[0], offset)
        except OSError:
            return None
        return data if piece_of(data) == one else None

    def room(self, needed: int) -> None:
        """Remove images, the longest unused first, until the rest and `needed` bytes fit. Raises Lost, OSError."""
        images, total = [], needed
        for name in os.listdir(self.path):
            path, listed = self.at(name), self.at(name.rpartition(".")[0] + ".list")
            if os.path.islink(path) and not os.path.exists(path):
                os.unlink(path)  # of an earlier job, whose image is gone
            elif name.endswith((".image", ".part")):
                images.append((os.stat(listed if os.path.exists(listed) else path).st_mtime, path))
                total += os.stat(path).st_size
        there = os.statvfs(self.path)
        free = there.f_bavail * there.f_frsize
        for used, path in sorted(images):
            if (total > self.keep or free < needed) and time.time() - used > FRESH_S:
                with open(path, "rb") as file:
                    if locked(file):
                        os.unlink(path)
                        total -= os.fstat(file.fileno()).st_size
                        free += os.fstat(file.fileno()).st_size
        if free < needed:
            raise Lost("{} has no room for {} MB".format(self.path, needed >> 20))

    def tidy(self) -> None:
        """Remove what killed jobs left. Raises OSError."""
        for name in os.listdir(self.path):
            if name.endswith(".part"):
                with open(self.at(name), "rb") as file:
                    if locked(file):
                        os.unlink(self.at(name))
