"""Mounts without external tools: an image's squashfs, and bind mounts of the host's files in that read-only image.

Needs only the standard library. Sources: mount(2), prctl(2), proc(5), loop(4), linux/loop.h, squashfuse(1).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from envbuild.base.host import read_mounts

RDONLY, NOSUID, NODEV = 1, 2, 4
# Flags of statvfs(3), and of mount(2).
_LOCKED = (
    (os.ST_NOSUID, NOSUID),
    (os.ST_NODEV, NODEV),
    (os.ST_NOEXEC, 8),
    (os.ST_NOATIME, 1 << 10),
    (os.ST_NODIRATIME, 1 << 11),
    (os.ST_RELATIME, 1 << 21),
)
_REMOUNT, BIND, MOVE, REC, SLAVE = 32, 4096, 8192, 16384, 1 << 19
DETACH = 2
NEWNS, NEWUSER = 0x00020000, 0x10000000
_PDEATHSIG, SET_DUMPABLE, SET_SUBREAPER = 1, 4, 36
_LOOP_SET_FD, _LOOP_CLR_FD, _LOOP_SET_STATUS64 = 0x4C00, 0x4C01, 0x4C04
_LOOP_CONFIGURE, _LOOP_GET_FREE = 0x4C0A, 0x4C82
_FUSE_WAIT_S = 15.0
_MOST_LINKS = 40
# These are bind mounts of the host's own folders: mount points must not be created in them.
_OF_HOST = ("dev", "proc", "sys")

_libc = ctypes.CDLL(None, use_errno=True)
# (path on the host, path in the image, read-only)
Bind = tuple[str, str, bool]


class StepFailed(Exception):
    """A step that this host cannot do, "image" or "bind", and the reason."""


def by_kernel(spec: dict[str, Any], place: str) -> None:
    """Mount the image through a loop device, which the kernel frees after the last use. Raises StepFailed."""
    try:
        loop, device = _loop(spec["image"], spec["offset"])
    except OSError as error:
        raise StepFailed("image", f"no loop device: {error.strerror}") from error
    try:
        mount(device, place, "squashfs", RDONLY | NOSUID | NODEV)
    except OSError as error:
        why = "" if error.errno != errno.EINVAL else f", squashfs with {spec['compressor']} perhaps"
        raise StepFailed("image", f"the kernel refuses it{why}: {error.strerror}") from error
    finally:
        os.close(loop)


def _loop(file: str, offset: int) -> tuple[int, str]:
    """Return an open read-only loop device on `file`, which the kernel frees on close unless mounted, and its path."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    image = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    flags = 1 | 4  # LO_FLAGS_READ_ONLY, LO_FLAGS_AUTOCLEAR
    info = struct.pack("<5Q4I64s64s32s2Q", 0, 0, 0, offset, 0, 0, 0, 0, flags, b"", b"", b"", 0, 0)
    try:
        while True:
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
            loop = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _configure(loop, image, info)
                return loop, device
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # another process took the device first
                    raise
    finally:
        os.close(image)
        os.close(control)


def _configure(loop: int, image: int, info: bytes) -> None:
    try:
        fcntl.ioctl(loop, _LOOP_CONFIGURE, struct.pack("<II", image, 0) + info + bytes(64))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTTY):
            raise
        fcntl.ioctl(loop, _LOOP_SET_FD, image)  # kernels before Linux 5.8
        try:
            fcntl.ioctl(loop, _LOOP_SET_STATUS64, info)
        except OSError:
            fcntl.ioctl(loop, _LOOP_CLR_FD)
            raise


def by_fuse(spec: dict[str, Any], place: str) -> None:
    """Mount the image with squashfuse, which is killed when this process ends. Raises StepFailed."""
    before = os.stat(place).st_dev
    options = f"ro,offset={spec['offset']}" if spec["offset"] else "ro"
    keeper = os.getpid()
    with open(f"{spec['folder']}/squashfuse.log", "w+b") as log:
        child = subprocess.Popen(
            [spec["tool"], "-f", "-o", options, spec["image"], place],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: die_with(keeper, signal.SIGKILL),
        )
        deadline = time.monotonic() + _FUSE_WAIT_S
        while child.poll() is None and time.monotonic() < deadline:
            if os.stat(place).st_dev != before:
                return
            time.sleep(0.005)
        child.kill()
        child.wait()
        log.seek(0)
        said = log.read(4096).decode(errors="replace").strip()
    raise StepFailed("image", said or "squashfuse mounted nothing")


def as_extracted(spec: dict[str, Any], place: str) -> None:
    """Make the unpacked image read-only, as a mounted one is."""
    mount(place, place, None, BIND)
    read_only(place)


def read_only(place: str) -> None:
    """Remount `place` read-only."""
    status = os.statvfs(place).f_flag
    # The remount must repeat the flags that an outer namespace locked, or the kernel refuses it.
    locked = sum(flag for has, flag in _LOCKED if status & has)
    mount(None, place, None, _REMOUNT | BIND | RDONLY | locked)


def mount(source: str | None, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2). Raises OSError whose message names source and mount point."""
    texts = [None if text is None else os.fsencode(text) for text in (source, place, kind, options)]
    try:
        call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])
    except OSError as error:
        what = f"mount {source or kind or 'again'} at {place}"
        raise OSError(error.errno, f"{what}: {os.strerror(error.errno or 0)}") from None


def die_with(parent: int, sig: signal.Signals) -> None:
    """Let the kernel send this process `sig` when process `parent` ends; exit if it has ended already (prctl(2))."""
    call("prctl", _PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library that returns 0 on success. Raises OSError when it does not."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def show_binds(root: str, binds: Sequence[Bind], stash: str) -> None:
    """Bind-mount each of `binds`, parents first, below `root`, in which all else is already mounted.

    `stash` is an empty scratch folder outside of `root`. Raises StepFailed.
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
                    read_only(point)
        except OSError as error:
            raise StepFailed("bind", f"{host} cannot be shown at {place}: {error.strerror}") from None


def _make(root: str, place: str, folder: bool, stash: str) -> None:
    """Create the mount point `place`, a folder or an empty file, unless it exists."""
    above = root
    names = _resolved(root, place).strip("/").split("/")
    if names == [""]:
        raise StepFailed("bind", "nothing can be shown at / instead of the image")
    for depth, name in enumerate(names, start=1):
        here, wants_folder = f"{above}/{name}", folder or depth < len(names)
        if not os.path.lexists(here):
            if names[0] in _OF_HOST:
                raise StepFailed("bind", f"/{names[0]} is the host's own and has no {place}")
            if not os.access(above, os.W_OK) or os.statvfs(above).f_flag & os.ST_RDONLY:
                _open_up(above, f"{stash}.{depth}")
            if wants_folder:
                os.mkdir(here)
            else:
                os.close(os.open(here, os.O_CREAT | os.O_WRONLY, 0o644))
        elif os.path.isdir(here) != wants_folder:
            wanted, found = ("a folder", "a file") if wants_folder else ("a file", "a folder")
            raise StepFailed(
                "bind", f"{place}: {wanted} is to be shown, and /{'/'.join(names[:depth])} of the image is {found}"
            )
        above = here


def _open_up(folder: str, stash: str) -> None:
    """Mount a tmpfs over `folder`, so that it becomes writable, and show the old content in it."""
    os.mkdir(stash)
    mount(folder, stash, None, BIND | REC)
    mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, "mode=0755")
    show_all(stash, folder, flags=REC)


def show_all(folder: str, place: str, *, leave: Sequence[str] = (), flags: int = 0) -> None:
    """Show each file and folder in `folder`, except those to `leave`, in the writable folder `place`."""
    for entry in os.scandir(folder):
        here = f"{place}/{entry.name}"
        if entry.name in leave:
            continue
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), here)
        elif entry.is_dir():
            os.mkdir(here)
            mount(entry.path, here, None, BIND | flags)
        elif entry.is_file():
            show_file(entry.path, here)


def show_file(source: str, place: str) -> None:
    """Show the file `source` at `place`, which is created if it does not exist."""
    if not os.path.exists(place):
        os.close(os.open(place, os.O_CREAT))
    mount(os.path.realpath(source), place, None, BIND)


def _resolved(root: str, place: str) -> str:
    """Return `place` with symbolic links resolved relative to `root`."""
    done: list[str] = []
    todo = place.split("/")
    links = 0
    while todo:
        name = todo.pop(0)
        here = "/".join((root, *done, name))
        if name in ("", "."):
            continue
        if name == "..":
            del done[-1:]
        elif not os.path.islink(here):
            done.append(name)
        else:
            links += 1
            if links > _MOST_LINKS:
                raise StepFailed("bind", f"{place}: too many symbolic links in the image")
            target = os.readlink(here)
            if target.startswith("/"):
                done.clear()
            todo[:0] = target.split("/")
    return "/" + "/".join(done)


def mounts_below(place: str) -> list[str]:
    """Return the mount points at and below `place`."""
    below = place.rstrip("/") + "/"
    return [m.at for m in read_mounts() if m.at == place or m.at.startswith(below)]
