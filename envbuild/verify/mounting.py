"""Mounts without external tools: system calls through the C library, and the ways to mount an image's squashfs.

Needs only the standard library. Sources: mount(2), prctl(2), loop(4), linux/loop.h, squashfuse(1).
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
from typing import Any

RDONLY, NOSUID, NODEV, _NOEXEC = 1, 2, 4, 8
_NOATIME, _NODIRATIME, _RELATIME = 1 << 10, 1 << 11, 1 << 21
_REMOUNT, BIND, MOVE, REC, SLAVE = 32, 4096, 8192, 16384, 1 << 19
DETACH = 2
NEWNS, NEWUSER = 0x00020000, 0x10000000
_PDEATHSIG, SET_DUMPABLE, SET_SUBREAPER = 1, 4, 36
_LOOP_SET_FD, _LOOP_CLR_FD, _LOOP_SET_STATUS64 = 0x4C00, 0x4C01, 0x4C04
_LOOP_CONFIGURE, _LOOP_GET_FREE = 0x4C0A, 0x4C82
_LO_READ_ONLY, _LO_AUTOCLEAR = 1, 4
_FUSE_WAIT_S = 15.0

_libc = ctypes.CDLL(None, use_errno=True)


class MountFailed(Exception):
    """An image that this host cannot mount in the way that was tried; the message gives the reason."""


def by_kernel(spec: dict[str, Any], place: str) -> None:
    """Mount the image through a loop device, which the kernel frees after the last use of the mount.

    Raises MountFailed when there is no loop device or the kernel refuses the mount.
    """
    try:
        loop, device = _loop(spec["image"], spec["offset"])
    except OSError as error:
        raise MountFailed(f"no loop device: {error.strerror}") from error
    try:
        mount(device, place, "squashfs", RDONLY | NOSUID | NODEV)
    except OSError as error:
        why = "" if error.errno != errno.EINVAL else f", squashfs with {spec['compressor']} perhaps"
        raise MountFailed(f"the kernel refuses it{why}: {error.strerror}") from error
    finally:
        os.close(loop)


def _loop(file: str, offset: int) -> tuple[int, str]:
    """Return an open read-only loop device on `file`, and its path.

    The kernel frees it on close unless it is mounted.
    """
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    image = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
            loop = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
            flags = _LO_READ_ONLY | _LO_AUTOCLEAR
            info = struct.pack("<5Q4I64s64s32s2Q", 0, 0, 0, offset, 0, 0, 0, 0, flags, b"", b"", b"", 0, 0)  # fmt: skip
            try:
                _configure(loop, image, info)
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # another process took the device first
                    raise
                continue
            return loop, device
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
    """Mount the image with squashfuse, which is killed when this process ends.

    Raises MountFailed when it mounts nothing.
    """
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
    raise MountFailed(said or "squashfuse mounted nothing")


def as_extracted(spec: dict[str, Any], place: str) -> None:
    """Make the unpacked image read-only, as a mounted one is."""
    mount(place, place, None, BIND)
    read_only(place)


def read_only(place: str) -> None:
    """Remount `place` read-only."""
    status = os.statvfs(place)
    flags = _REMOUNT | BIND | RDONLY
    # The remount must repeat the flags that an outer namespace locked, or the kernel refuses it.
    for has, flag in (
        (os.ST_NOSUID, NOSUID),
        (os.ST_NODEV, NODEV),
        (os.ST_NOEXEC, _NOEXEC),
        (os.ST_NOATIME, _NOATIME),
        (os.ST_NODIRATIME, _NODIRATIME),
        (os.ST_RELATIME, _RELATIME),
    ):
        flags |= flag if status.f_flag & has else 0
    mount(None, place, None, flags)


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
