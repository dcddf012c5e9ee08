"""Images on a node's own disk, and their pieces."""

# ruff: noqa: UP006, UP007, UP032, UP035, UP045 - Python 3.6

import fcntl
import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from typing import IO, Callable, Dict, Iterator, List, Optional, Tuple, Union

Piece = Tuple[int, bytes]
"""The size of a piece and its SHA-256."""

# A piece ends after these bytes, at one place in 64 kB of compressed data, and has so many bytes.
END, LEAST, MOST = b"\x5a\xc3", 1 << 20, 4 << 20
TREE = ".tree"  # ends the name of an unpacked environment
FRESH_S = 3600  # what was used so recently is not removed


class Lost(Exception):
    """Failure of staging, on this node or on its parent."""


def split(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield the pieces of the data from `read(SIZE)`, until it returns no bytes."""
    data, more = b"", b"-"
    while more:
        more = read(MOST)
        data += more
        while len(data) >= MOST or (data and not more):
            position = data.find(END, LEAST, MOST)
            size = position + len(END) if position >= 0 else min(MOST, len(data))
            yield data[:size]
            data = data[size:]


def piece_of(data: bytes) -> Piece:
    """Return the size and the SHA-256 of a piece."""
    return len(data), hashlib.sha256(data).digest()


def seal(status: os.stat_result) -> str:
    """Return a text that differs after every change of a file: its size, times and inode."""
    return "{} {} {} {}".format(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def locked(file: Union[IO[bytes], int], way: int = fcntl.LOCK_EX) -> bool:
    """Lock the file or folder, with LOCK_SH for several processes; return whether no other process prevents it."""
    try:
        fcntl.flock(file, way | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def tree_seal(root: str) -> str:
    """Return a digest of the seals of all files below `root`, except bytecode. Raises OSError."""
    lines = []
    for folder, folders, files in os.walk(root):
        links = [folder_name for folder_name in folders if os.path.islink(os.path.join(folder, folder_name))]
        folders[:] = [folder_name for folder_name in folders if folder_name != "__pycache__"]
        for name in files + links:
            path = os.path.join(folder, name)
            lines.append("{} {}".format(path[len(root) :], seal(os.lstat(path))))
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()


def _renamed(folder: str, name: str) -> bool:
    """Rename the folder; return False if the name is taken. Raises OSError."""
    try:
        os.rename(folder, name)
    except OSError:
        if os.path.exists(name):
            return False
        raise
    return True


class Folder:
    """The folder of images on a node: KEY.image, with KEY.list when it is complete; *.part is an incomplete copy.

    The image of an environment is unpacked to NAME.tree, with NAME.seal; *.draft is a tree in creation or removal. A
    process locks a tree before it removes it; a job holds the lock of the tree in which it runs. `keep` is the maximum
    size of all images and trees in bytes.
    """

    def __init__(self, path: str, keep: int) -> None:
        self.path, self.keep = path, keep
        self.known: Dict[Piece, Tuple[str, int]] = {}

    def make(self) -> None:
        """Create the folder. Raises OSError, and Lost if other users may write to it."""
        path = self.path
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.lstat(path)
        if status.st_uid != os.getuid() or os.path.islink(path) or status.st_mode & 0o22:
            raise Lost("{} must be a folder of this user alone".format(path))

    def at(self, name: str) -> str:
        """Return the path of the file `name` in the folder."""
        return os.path.join(self.path, name)

    def write(self, name: str, text: str) -> None:
        """Write a small file with an atomic replace. Raises OSError."""
        draft = self.at("{}.{}.new".format(name, os.getpid()))
        with open(draft, "w") as file:
            file.write(text)
        os.rename(draft, self.at(name))

    def link(self, name: str, target: str) -> None:
        """Make the symbolic link `name` to `target`. Raises OSError."""
        draft = self.at("{}.{}.new".format(name, os.getpid()))
        os.symlink(target, draft)
        os.rename(draft, self.at(name))

    def listed(self, key: str) -> Optional[List[Piece]]:
        """Return the pieces of an image, None if the image is missing or was changed."""
        try:
            with open(self.at(key + ".list")) as file:
                sealed, pieces = json.load(file)
            if sealed == seal(os.stat(self.at(key + ".image"))):
                return [(size, bytes.fromhex(digest)) for size, digest in pieces]
        except (OSError, ValueError, TypeError):
            pass
        return None

    def learn(self) -> None:
        """Record the pieces on this disk, including those in copies of killed jobs. Raises OSError."""
        for name in sorted(os.listdir(self.path)):
            stem, _, kind = name.rpartition(".")
            pieces = (self.listed(stem) or []) if kind == "image" else []
            if kind == "part":
                with suppress(FileNotFoundError), open(self.at(name), "rb") as file:
                    pieces = [piece_of(data) for data in split(file.read)] if locked(file) else []
            offset = 0
            for piece in pieces:
                self.known[piece] = name, offset
                offset += piece[0]

    def piece(self, piece: Piece) -> Optional[bytes]:
        """Return the data of a piece from this disk, None if the disk lacks it."""
        if piece not in self.known:
            return None
        name, offset = self.known[piece]
        try:
            with open(self.at(name), "rb") as file:
                data = os.pread(file.fileno(), piece[0], offset)
        except OSError:
            return None
        return data if piece_of(data) == piece else None

    def room(self, needed: int) -> None:
        """Remove the least recently used images and trees, until `needed` more bytes fit.

        Raises Lost, OSError.
        """
        candidates, total = [], needed
        for name in os.listdir(self.path):
            path = self.at(name)
            with suppress(FileNotFoundError):  # here and elsewhere: another job on this node removed it
                if os.path.islink(path) and not os.path.exists(path):
                    os.unlink(path)  # of an earlier job, whose image is gone
                elif name.endswith((".image", ".part", TREE)):
                    candidates.append((self._used(name), name))
                    total += self._size(name)
        there = os.statvfs(self.path)
        free = there.f_bavail * there.f_frsize
        for _, name in sorted(candidates):
            if total > self.keep or free < needed:
                with suppress(FileNotFoundError):
                    size = self._remove(name)
                    total, free = total - size, free + size
        if free < needed:
            raise Lost("{} has no room for {} MB".format(self.path, needed >> 20))

    def _note(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        return self.at(stem + {"image": ".list", "tree": ".seal"}.get(kind, "." + kind))

    def _used(self, name: str) -> float:
        note = self._note(name)
        return os.stat(note if os.path.exists(note) else self.at(name)).st_mtime

    def _size(self, name: str) -> int:
        if not name.endswith(TREE):
            return os.stat(self.at(name)).st_size
        try:
            with open(self._note(name)) as file:
                return int(json.load(file)[2])
        except (OSError, ValueError, IndexError):
            return 0

    def _remove(self, name: str) -> int:
        """Remove an image or tree that no process has locked or used recently; return the freed bytes."""
        try:
            handle = os.open(self.at(name), os.O_RDONLY)
        except FileNotFoundError:
            return 0
        try:
            if not locked(handle) or time.time() - self._used(name) <= FRESH_S:
                return 0
            size = self._size(name)
            if name.endswith(TREE):
                os.unlink(self._note(name))
                draft = self.at(name.rpartition(".")[0] + ".draft")
                os.rename(self.at(name), draft)
                shutil.rmtree(draft)
            else:
                os.unlink(self.at(name))
            return size
        finally:
            os.close(handle)

    def tidy(self) -> None:
        """Remove the incomplete copies and trees of killed jobs. Raises OSError."""
        for name in os.listdir(self.path):
            if name.endswith((".part", ".draft")):
                with suppress(FileNotFoundError):
                    handle = os.open(self.at(name), os.O_RDONLY)
                    if locked(handle):
                        (os.unlink if name.endswith(".part") else shutil.rmtree)(self.at(name))
                    os.close(handle)

    def tree(self, key: str, write: Callable[[IO[bytes], str], None]) -> str:
        """Return the name of an image's tree, which is not removed while this process runs.

        If there is none, `write` unpacks the open image to an empty folder. Raises Lost, OSError.
        """
        for name in os.listdir(self.path):
            if name.startswith(key[:16]) and name.endswith(TREE):
                if self._held(name, key):
                    return name
                self._remove(name)  # it was changed
        if os.statvfs(self.path).f_flag & os.ST_NOEXEC:
            raise Lost("{} is mounted without exec: no library can be loaded from there".format(self.path))
        size = os.stat(self.at(key + ".image")).st_size
        self.room(size)
        self.tidy()
        draft = self.at("{}-{}.draft".format(key[:16], os.urandom(8).hex()))
        os.mkdir(draft + ".new", 0o700)
        locked(os.open(draft + ".new", os.O_RDONLY), fcntl.LOCK_SH)  # as long as this process runs
        os.rename(draft + ".new", draft)  # now that no other job can take it for a killed job's
        try:
            with open(self.at(key + ".image"), "rb") as image:
                write(image, draft)
            sealed = tree_seal(draft)
            stem, more = key[:16], 0  # the same on all nodes, but where a job may still run in a changed one
            while not _renamed(draft, self.at(stem + TREE)):
                more += 1
                stem = "{}-{}".format(key[:16], more)
            self.write(stem + ".seal", json.dumps([key, sealed, size]))
        except (OSError, Lost, ValueError, TypeError, IndexError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise Lost("it cannot be unpacked: {}".format(error)) from error
        return stem + TREE

    def _held(self, name: str, key: str) -> bool:
        """Lock a tree against its removal, and return whether it is unchanged since it was unpacked."""
        handle = -1
        try:
            with open(self._note(name)) as file:
                sealed = json.load(file)[:2]
            handle = os.open(self.at(name), os.O_RDONLY)
            if locked(handle, fcntl.LOCK_SH) and sealed == [key, tree_seal(self.at(name))]:
                os.utime(self._note(name))  # when it was used last
                return True
        except (OSError, ValueError):
            pass
        if handle >= 0:
            os.close(handle)
        return False
