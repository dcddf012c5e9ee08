"""Locks between processes: flock(2) on a file or folder, which the kernel releases when the process ends.

On a file system without flock nothing is locked and the work continues, because all writes are atomic replaces.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from envbuild.base.files import open_known

_PAUSE_S = 0.05


@contextlib.contextmanager
def file_lock(
    path: Path,
    on_wait: Callable[[], None] | None = None,
    *,
    pause: Callable[[float], None] | None = None,
    remove: bool = False,
) -> Iterator[bool]:
    """Hold an exclusive lock on the file `path`, and yield whether its file system supports locks.

    A missing file is created. `on_wait` is called when another process holds the lock. With `pause`, the lock is
    polled: `pause` is called with the seconds to wait between two attempts, and may raise. `remove` deletes the file at
    the end. Raises OSError when the file cannot be opened.
    """
    while True:
        handle = open_known(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            held = _hold(handle, on_wait, pause)
            if not _still(path, handle):
                continue  # the previous holder moved or removed it: others may lock a new file
            try:
                yield held
            finally:
                if remove:
                    path.unlink(missing_ok=True)  # before the lock is released
            return
        finally:
            os.close(handle)


@contextlib.contextmanager
def folder_lock(
    folder: Path, on_wait: Callable[[], None] | None = None, *, wait: bool = True, shared: bool = False
) -> Iterator[bool]:
    """Hold a lock on `folder`, and yield whether its file system supports locks; leaves no file behind.

    The lock is exclusive, or `shared` with others that are. `on_wait` is called when another process holds the lock.
    Raises OSError when the folder cannot be opened, BlockingIOError when another process holds the lock and `wait` is
    false.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _hold(handle, on_wait, None if wait else _refuse, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    finally:
        os.close(handle)


def lock_failure(folder: Path) -> OSError | None:
    """Return why flock cannot lock `folder`, None if it can."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        return error
    finally:
        os.close(handle)
    return None


def _hold(
    handle: int, on_wait: Callable[[], None] | None, pause: Callable[[float], None] | None, kind: int = fcntl.LOCK_EX
) -> bool:
    told = False
    while True:
        # The first attempt does not block, so that `on_wait` can run; with `pause`, no attempt does.
        waits = told and pause is None
        try:
            fcntl.flock(handle, kind | (0 if waits else fcntl.LOCK_NB))
            return True
        except BlockingIOError:
            if on_wait and not told:
                on_wait()
            told = True
            if pause:
                pause(_PAUSE_S)
        except OSError:
            return False


def _refuse(_: float) -> None:
    raise BlockingIOError("another process holds the folder")


def _still(path: Path, handle: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(handle))
    return False
