"""Check and reservation of disk space before a file is written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
from pathlib import Path
from typing import BinaryIO

from envbuild.base.errors import BuildError
from envbuild.base.text import human_size

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HINT = "free disk space, write elsewhere with --out, or set ENVBUILD_STORE to a folder on another file system"


def check_disk_space(folder: Path, size: int) -> None:
    """Check that a new file of `size` bytes fits into the existing folder `folder`.

    Raises BuildError when the file system has too little space or no inode left for this user. Quotas are not checked.
    """
    try:
        about = os.statvfs(folder)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}") from error
    # File systems that do not know these numbers, such as some network file systems, report a total of 0.
    if about.f_blocks and about.f_bavail * about.f_frsize < size:
        raise _no_disk_space(folder, size)
    if about.f_files and not about.f_favail:
        raise BuildError(f"{folder}: no inode is left on its file system for a new file", _HINT)


def reserve(stream: BinaryIO, size: int) -> None:
    """Reserve `size` bytes of disk space, from the stream's position on; this detects quotas too.

    The file's length does not change: `stream.truncate()` releases unused space. Does nothing if the file
    system cannot reserve space. Raises BuildError when there is too little space.
    """
    if size <= 0:
        return
    start, handle, place = stream.tell(), stream.fileno(), Path(str(stream.name))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and start + size > limit:  # set by `ulimit -f`
        raise _no_disk_space(place, size)
    # Call fallocate(2) itself: without support for it, glibc's posix_fallocate writes zeros instead.
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is None:
        return
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    while function(handle, _KEEP_SIZE, start, size) != 0:
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in _FULL:
            raise _no_disk_space(place, size)
        return  # the write itself will report the error, if there is one


def _no_disk_space(place: Path, size: int) -> BuildError:
    message = f"{place}: not enough disk space for {human_size(size)}"
    with contextlib.suppress(OSError):
        about = os.statvfs(place)
        free = about.f_bavail * about.f_frsize
        if about.f_blocks:
            message += f"; {human_size(free)} are free"
        if about.f_blocks and free >= size:
            message += ", so a quota or a limit on file sizes prevents it"
    return BuildError(message, _HINT)
