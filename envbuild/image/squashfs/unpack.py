"""Files with a squashfs, bare or in a SIF: opening them, and unpacking for hosts that cannot mount them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from envbuild.base.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.limits import ImageLimits
from envbuild.image.sif import is_sif, read_sif
from envbuild.image.squashfs.model import SOCKET
from envbuild.image.squashfs.read import SquashfsImage

_CAPABILITIES = "security.capability"
_NODES = {CHAR: stat.S_IFCHR, BLOCK: stat.S_IFBLK, FIFO: stat.S_IFIFO, SOCKET: stat.S_IFSOCK}


@contextlib.contextmanager
def read_squashfs(path: Path, limits: ImageLimits | None = None) -> Iterator[SquashfsImage]:
    """Open the squashfs in the file `path`, which may be a SIF, until the block ends. Raises OSError and BuildError."""
    with path.open("rb") as stream:
        start = read_sif(stream, str(path)).partition.offset if is_sif(stream.read(64)) else 0
        yield SquashfsImage(stream, start, str(path), limits)


def unpack(image: SquashfsImage, into: Path) -> None:
    """Unpack `image` into the folder `into`, which must be empty or missing, as the user who runs this.

    Owners, setuid and setgid bits and capabilities are not kept. Devices and extended attributes that this process may
    not create are left out. Raises BuildError; the caller then removes the partial result.

    No path can lead out of the folder: it starts empty, each path occurs once, and its parent is a directory that this
    function has created.
    """
    try:
        into.mkdir(parents=True, exist_ok=True)
        if any(into.iterdir()):
            raise BuildError(f"{into} is not empty", "unpack into a new folder")
        _unpack(image, into)
    except OSError as error:
        raise BuildError(f"{error.filename or into}: cannot be unpacked: {error.strerror}") from error


def _unpack(image: SquashfsImage, into: Path) -> None:
    root = os.fspath(into.absolute())
    folders: list[Entry] = []
    links: list[Entry] = []
    files: list[tuple[Entry, int]] = []
    left_out: set[str] = set()
    for entry, handle in image.entries():
        path = f"{root}/{entry.path}"
        if entry.kind == DIR:
            if entry.path:
                os.mkdir(path, 0o700)
            folders.append(entry)
        elif entry.kind == FILE:
            files.append((entry, handle))
        elif entry.kind == HARDLINK:
            links.append(entry)
        elif entry.kind == SYMLINK:
            os.symlink(entry.target, path)
            _finish(path, entry)
        elif _made(path, entry):
            _finish(path, entry)
        else:
            left_out.add(entry.path)

    def write(entry: Entry, handle: int) -> None:
        path = f"{root}/{entry.path}"
        with open(path, "xb", opener=partial(os.open, mode=0o600)) as out:  # it follows no link
            for data, length in image.blocks(handle):
                if data is None:
                    out.seek(length, os.SEEK_CUR)
                else:
                    out.write(data)
            out.truncate(entry.size)
        _finish(path, entry)

    image.each_file(files, write)
    for entry in links:
        if entry.target not in left_out:
            os.link(f"{root}/{entry.target}", f"{root}/{entry.path}", follow_symlinks=False)
    # Last, because their modes may forbid writing, and writing changes their times.
    for entry in reversed(folders):
        _finish(f"{root}/{entry.path}", entry)


def _made(path: str, entry: Entry) -> bool:
    """Create a device, fifo or socket; return False when this process may not create the device."""
    try:
        os.mknod(path, 0o600 | _NODES[entry.kind], os.makedev(*entry.device))
    except PermissionError:
        if entry.kind in (FIFO, SOCKET):
            raise
        return False
    return True


def _finish(path: str, entry: Entry) -> None:
    """Set attributes, mode and times, in an order in which none undoes another."""
    for name, value in entry.xattrs:
        if name != _CAPABILITIES:  # as a setuid bit, they would hold on this host
            with contextlib.suppress(OSError):
                os.setxattr(path, name, value, follow_symlinks=False)
    if entry.kind != SYMLINK:
        # Without its owner, a setuid file would run as the user who unpacks it.
        os.chmod(path, entry.mode & 0o1777)
    os.utime(path, (entry.mtime, entry.mtime), follow_symlinks=False)
