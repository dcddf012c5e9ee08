"""Folders and files of the host at places of an image, which itself cannot be written.

Runs in the process that builds the namespace; needs nothing but Python's own library. Source: mount(2), proc(5).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from envbuild.mounts import read_mounts
from envbuild.verify import mounting
from envbuild.verify.mounting import BIND, NODEV, NOSUID, REC, mount

_MOST_LINKS = 40
# The host's own: nothing is made in them.
_OF_HOST = ("dev", "proc", "sys")

# What of the host is shown where, and whether it may not be written there.
Bind = tuple[str, str, bool]


class Unfit(Exception):
    """A bind that cannot be made; why."""


def show_binds(root: str, binds: Sequence[Bind], stash: str) -> None:
    """Show each of `binds` below `root`, the root of the image to be, in which all else is mounted already. `stash` is
    an empty folder of ours, outside of it. What lies above another goes first, whatever the order.

    Raises Unfit.
    """
    ordered = sorted(binds, key=lambda bind: os.path.normpath(bind[1]).count("/"))
    # All the places are made before the first of them is covered: none may come to be in a folder of the host.
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
            raise Unfit(f"{host} cannot be shown at {place}: {error.strerror}") from None


def _make(root: str, place: str, folder: bool, stash: str) -> None:
    """Make `place`, a folder or an empty file, where there is none."""
    above = root
    names = _resolved(root, place).strip("/").split("/")
    if names == [""]:
        raise Unfit("nothing can be shown at / instead of the image")
    for depth, name in enumerate(names, start=1):
        here = f"{above}/{name}"
        last = depth == len(names)
        if not os.path.lexists(here):
            if names[0] in _OF_HOST:
                raise Unfit(f"/{names[0]} is the host's own and has no {place}")
            if not os.access(above, os.W_OK) or os.statvfs(above).f_flag & os.ST_RDONLY:
                _open_up(above, f"{stash}.{depth}")
            if last and not folder:
                os.close(os.open(here, os.O_CREAT | os.O_WRONLY, 0o644))
            else:
                os.mkdir(here)
        elif os.path.isdir(here) != (folder or not last):
            kinds = ("a folder", "a file")
            wanted, found = kinds if folder or not last else kinds[::-1]
            raise Unfit(
                f"{place}: {wanted} is to be shown, and /{'/'.join(names[:depth])} of the image is {found}"
            )
        above = here


def _open_up(folder: str, stash: str) -> None:
    """Put a folder in memory in place of `folder`, with all of it inside."""
    os.mkdir(stash)
    mount(folder, stash, None, BIND | REC)
    mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, "mode=0755")
    for entry in os.scandir(stash):
        show(entry, f"{folder}/{entry.name}", REC)


def show(entry: os.DirEntry[str], place: str, flags: int = 0) -> None:
    """Let a file or folder of the image be seen at `place`, where nothing is."""
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
    """`place` with the links followed as they are inside of `root`."""
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
            raise Unfit(f"{place}: too many symbolic links in the image")
        target = os.readlink(here)
        if target.startswith("/"):
            done.clear()
        todo[:0] = target.split("/")
    return "/" + "/".join(done)


def mounts_below(place: str) -> list[str]:
    """The mount points at and below `place`."""
    below = place.rstrip("/") + "/"
    return [m.at for m in read_mounts() if m.at == place or m.at.startswith(below)]
