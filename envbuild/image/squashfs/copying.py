"""Spans of one file copied into another by the kernel, where it can, without passing through us."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

Moved = Callable[[int], None]
# (source, out, where in source, where in out, bytes) → bytes copied, 0 at the source's end
_Way = Callable[[int, int, int, int, int], int]

# A call copies no more than this many bytes, so that progress is seen and Ctrl-C is heard.
_MOST = 64 << 20
_CHUNK = 4 << 20
# Two file systems, a kernel, a container's seccomp filter or a file system that cannot do it.
_UNABLE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


class Copier:
    """Copies from the file descriptor `source` to `out`; `moved` hears of bytes copied."""

    def __init__(self, source: int, out: int, moved: Moved) -> None:
        self._source, self._out, self._moved = source, out, moved
        # A Python that was built for an old glibc has no copy_file_range.
        first = [_in_kernel] if hasattr(os, "copy_file_range") else []
        self._ways: list[_Way] = [*first, _sent, _by_hand]

    def copy(self, start: int, target: int, size: int) -> None:
        """Copy `size` bytes from `start` to `target`. Raises EOFError where the source ends sooner, and OSError."""
        while size:
            count = self._some(start, target, min(size, _MOST))
            if not count:
                raise EOFError
            start, target, size = start + count, target + count, size - count
            self._moved(count)

    def _some(self, start: int, target: int, size: int) -> int:
        while len(self._ways) > 1:
            try:
                # Some file systems say 0 for what they cannot do.
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
