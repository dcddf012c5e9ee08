"""Copies of byte ranges from file to file, in the kernel if possible instead of through this process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from envbuild.progress import OnProgress

# (source, out, offset in source, offset in out, bytes) → bytes copied, 0 at the source's end
_Way = Callable[[int, int, int, int, int], int]

# Maximum bytes per call, so that progress is reported and Ctrl-C is handled in time.
_MOST = 64 << 20
_CHUNK = 4 << 20
# Errors for two file systems, an old kernel, a container's seccomp filter, or a file system without support.
_UNABLE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


class Copier:
    """A copier from the file descriptor `source` to `out`; `on_progress` is called with the number of copied bytes."""

    def __init__(self, source: int, out: int, on_progress: OnProgress) -> None:
        self._source, self._out, self._on_progress = source, out, on_progress
        # A Python that was built for an old glibc has no copy_file_range.
        first = [_in_kernel] if hasattr(os, "copy_file_range") else []
        self._ways: list[_Way] = [*first, _sent, _by_hand]

    def copy(self, start: int, target: int, size: int) -> None:
        """Copy `size` bytes from offset `start` to offset `target`.

        Raises EOFError when the source ends earlier, and OSError.
        """
        while size:
            count = self._some(start, target, min(size, _MOST))
            if not count:
                raise EOFError
            start, target, size = start + count, target + count, size - count
            self._on_progress(count)

    def _some(self, start: int, target: int, size: int) -> int:
        while len(self._ways) > 1:
            try:
                # Some file systems return 0 when they do not support the call.
                if count := self._ways[0](self._source, self._out, start, target, size):
                    return count
            except OSError as error:
                if error.errno not in _UNABLE:
                    raise
            del self._ways[0]
        return self._ways[0](self._source, self._out, start, target, size)


def _in_kernel(source: int, out: int, start: int, target: int, size: int) -> int:
    return os.copy_file_range(source, out, size, start, target)


def _sent(source: int, out: int, start: int, target: int, size: int) -> int:
    os.lseek(out, target, os.SEEK_SET)
    return os.sendfile(out, source, start, size)


def _by_hand(source: int, out: int, start: int, target: int, size: int) -> int:
    rest = memoryview(os.pread(source, min(size, _CHUNK), start))
    count = len(rest)
    while rest:
        written = os.pwrite(out, rest, target)
        rest, target = rest[written:], target + written
    return count
