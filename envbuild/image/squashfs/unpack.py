"""Unpacker of squashfs images, for hosts that cannot mount them."""

from __future__ import annotations

import contextlib
import os
import stat
from functools import partial
from pathlib import Path

from envbuild.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.squashfs.model import SOCKET
from envbuild.image.squashfs.read import SquashfsImage

_NODES = {CHAR: stat.S_IFCHR, BLOCK: stat.S_IFBLK, FIFO: stat.S_IFIFO, SOCKET: stat.S_IFSOCK}


def unpack(image: SquashfsImage, into: Path, *, owners: bool) -> None:
    """Unpack `image` into the folder `into`, which must be empty or missing.

    `owners` keeps users and groups, and setuid and setgid bits, which requires root. Devices and extended attributes
    that this process may not create are left out. Raises BuildError; the caller then removes the partial result.

    No path can lead out of the folder: it starts empty, each path occurs once, and its parent is a directory that this
    function has created.
    """
    try:
        into.mkdir(parents=True, exist_ok=True)
        if any(into.iterdir()):
            raise BuildError(f"{into} is not empty", "unpack into a new folder")
        _unpack(image, into, owners)
    except OSError as error:
        raise BuildError(f"{error.filename or into}: cannot be unpacked: {error.strerror}") from error


def _unpack(image: SquashfsImage, into: Path, owners: bool) -> None:
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
            _finish(path, entry, owners)
        elif _made(path, entry):
            _finish(path, entry, owners)
        else:
            left_out.add(entry.path)

    def write(entry: Entry, handle: int) -> None:
        path = f"{root}/{entry.path}"
        _write(image, path, handle, entry.size)
        _finish(path, entry, owners)

    image.each_file(files, write)
    for entry in links:
        if entry.target not in left_out:
            os.link(f"{root}/{entry.target}", f"{root}/{entry.path}", follow_symlinks=False)
    # Last, because their modes may forbid writing, and writing changes their times.
    for entry in reversed(folders):
        _finish(f"{root}/{entry.path}", entry, owners)


def _write(image: SquashfsImage, path: str, handle: int, size: int) -> None:
    with open(path, "xb", buffering=0, opener=partial(os.open, mode=0o600)) as out:  # it follows no link
        sparse = False
        for data, length in image.blocks(handle):
            if data is None:
                out.seek(length, os.SEEK_CUR)
                sparse = True
                continue
            rest = memoryview(data)
            while rest:
                rest = rest[out.write(rest) :]
        if sparse:
            out.truncate(size)


def _made(path: str, entry: Entry) -> bool:
    """Create a device, fifo or socket; return False when this process may not create the device."""
    try:
        os.mknod(path, 0o600 | _NODES[entry.kind], os.makedev(*entry.device))
    except PermissionError:
        if entry.kind in (FIFO, SOCKET):
            raise
        return False
    return True


def _finish(path: str, entry: Entry, owners: bool) -> None:
    """Set owner, attributes, mode and times, in an order in which none undoes another."""
    if owners:
        os.chown(path, entry.uid, entry.gid, follow_symlinks=False)
    for name, value in entry.xattrs:
        with contextlib.suppress(OSError):
            os.setxattr(path, name, value, follow_symlinks=False)
    if entry.kind != SYMLINK:
        # Without its owner, a setuid file would run as the user who unpacks it.
        os.chmod(path, entry.mode if owners else entry.mode & 0o1777)
    os.utime(path, (entry.mtime, entry.mtime), follow_symlinks=False)
