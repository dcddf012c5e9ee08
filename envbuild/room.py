"""Room for what is about to be written: found out before, not when the disk is full."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path
from typing import BinaryIO

from envbuild.errors import BuildError
from envbuild.progress import human_size

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WAY_OUT = "make room, write elsewhere with --out, or set ENVBUILD_STORE to a folder with room"


def check_room(folder: Path, size: int) -> None:
    """Make sure that a new file of `size` bytes fits into `folder`, which exists.

    Raises BuildError when the file system has less room, or no inode left, for us. Quotas are not seen.
    """
    try:
        about = os.statvfs(folder)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}") from error
    # File systems that know no such number, as some over a network, say 0 of 0.
    free = about.f_bavail * about.f_frsize
    if about.f_blocks and free < size:
        raise no_room(folder, size, free)
    if about.f_files and not about.f_favail:
        raise BuildError(f"{folder}: no inode is left on its file system for a new file", _WAY_OUT)


def reserve(stream: BinaryIO, size: int) -> None:
    """Have the file system set `size` bytes aside, from the stream's position on; this finds quotas too.

    The file does not become longer: what is not used in the end is given back by `stream.truncate()`.
    Where the file system cannot set room aside nothing happens. Raises BuildError when there is less.
    """
    if size <= 0:
        return
    start, handle, place = stream.tell(), stream.fileno(), Path(str(stream.name))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and start + size > limit:  # as `ulimit -f` sets it
        raise no_room(place, size, None)
    # fallocate(2) itself: where it cannot be done, glibc's posix_fallocate writes zeros instead.
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is None:
        return
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    while function(handle, _KEEP_SIZE, start, size) != 0:
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in _FULL:
            raise no_room(place, size, None)
        return  # the write itself will tell what is wrong, if anything is


def no_room(place: Path, size: int, free: int | None) -> BuildError:
    """The error for `size` bytes that do not fit at `place`, where `free` bytes are (None: not known)."""
    there = _free(place) if free is None else free
    has = "" if there is None else f"; {human_size(there)} are free"
    if there is not None and there >= size:
        has += ", so a quota or a limit of file sizes is in the way"
    return BuildError(f"{place}: no room for {human_size(size)}{has}", _WAY_OUT)


def _free(place: Path) -> int | None:
    try:
        about = os.statvfs(place)
    except OSError:
        return None
    return about.f_bavail * about.f_frsize if about.f_blocks else None
