"""Bind mounts of the host's folders and files in an image, which itself is read-only.

Runs in the process that builds the namespace and needs only the standard library. Source: mount(2), proc(5).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from envbuild.mounts import read_mounts
from envbuild.verify import mounting
from envbuild.verify.mounting import BIND, NODEV, NOSUID, REC, mount

_MOST_LINKS = 40
# These are bind mounts of the host's own folders: mount points must not be created in them.
_OF_HOST = ("dev", "proc", "sys")

# (path on the host, path in the image, read-only)
Bind = tuple[str, str, bool]


class BindFailed(Exception):
    """A bind mount that cannot be made; the message gives the reason."""


def show_binds(root: str, binds: Sequence[Bind], stash: str) -> None:
    """Bind-mount each of `binds` below `root`, the future root of the image, in which all else is already mounted.

    Parents are mounted before their children, whatever the order of `binds`. `stash` is an empty scratch folder
    outside of `root`. Raises Unfit when a mount fails.
    """
    ordered = sorted(binds, key=lambda bind: os.path.normpath(bind[1]).count("/"))
    # Create all mount points before the first mount, so that none is created in a folder of the host.
    for number, (host, place, _) in enumerate(ordered):
        _make(root, place, os.path.isdir(host), f"{stash}/{number}")
    for host, place, readonly in ordered:
        here = root + _resolved(root, place)
        try:
            mount(host, here, None, BIND | REC)
            if readonly:
                for point in mounts_below(here):
                    mounting.read_only(point)
        except OSError as error:
            raise BindFailed(f"{host} cannot be shown at {place}: {error.strerror}") from None


def _make(root: str, place: str, folder: bool, stash: str) -> None:
    """Create the mount point `place`, a folder or an empty file, unless it exists.

    Raises Unfit when it cannot be created or the image has the other kind of file there.
    """
    above = root
    names = _resolved(root, place).strip("/").split("/")
    if names == [""]:
        raise BindFailed("nothing can be shown at / instead of the image")
    for depth, name in enumerate(names, start=1):
        here = f"{above}/{name}"
        last = depth == len(names)
        if not os.path.lexists(here):
            if names[0] in _OF_HOST:
                raise BindFailed(f"/{names[0]} is the host's own and has no {place}")
            if not os.access(above, os.W_OK) or os.statvfs(above).f_flag & os.ST_RDONLY:
                _open_up(above, f"{stash}.{depth}")
            if last and not folder:
                os.close(os.open(here, os.O_CREAT | os.O_WRONLY, 0o644))
            else:
                os.mkdir(here)
        elif os.path.isdir(here) != (folder or not last):
            kinds = ("a folder", "a file")
            wanted, found = kinds if folder or not last else kinds[::-1]
            raise BindFailed(
                f"{place}: {wanted} is to be shown, and /{'/'.join(names[:depth])} of the image is {found}"
            )
        above = here


def _open_up(folder: str, stash: str) -> None:
    """Mount a tmpfs over `folder`, so that it becomes writable, and show the old content in it."""
    os.mkdir(stash)
    mount(folder, stash, None, BIND | REC)
    mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, "mode=0755")
    for entry in os.scandir(stash):
        show(entry, f"{folder}/{entry.name}", REC)


def show(entry: os.DirEntry[str], place: str, flags: int = 0) -> None:
    """Show a file or folder of the image at `place`, which does not exist yet; other kinds of files are skipped."""
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), place)
        return
    if entry.is_dir():
        os.mkdir(place)
    elif entry.is_file():
        os.close(os.open(place, os.O_CREAT))
    else:
        return
    mount(entry.path, place, None, BIND | flags)


def _resolved(root: str, place: str) -> str:
    """Return `place` with symbolic links resolved relative to `root`. Raises Unfit when there are too many."""
    done: list[str] = []
    todo = place.split("/")
    links = 0
    while todo:
        name = todo.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            del done[-1:]
            continue
        here = "/".join((root, *done, name))
        if not os.path.islink(here):
            done.append(name)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise BindFailed(f"{place}: too many symbolic links in the image")
        target = os.readlink(here)
        if target.startswith("/"):
            done.clear()
        todo[:0] = target.split("/")
    return "/" + "/".join(done)


def mounts_below(place: str) -> list[str]:
    """Return the mount points at and below `place`."""
    below = place.rstrip("/") + "/"
    return [m.at for m in read_mounts() if m.at == place or m.at.startswith(below)]
