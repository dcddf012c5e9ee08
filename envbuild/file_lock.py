"""Locks between processes: flock(2) on a file or a folder, which ends with the process that holds it.

Where a file system has no flock, nothing is locked and the work goes on: what is written is replaced atomically.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_PAUSE_S = 0.05


@contextlib.contextmanager
def file_lock(
    path: Path,
    on_wait: Callable[[], None] | None = None,
    *,
    pause: Callable[[float], None] | None = None,
    remove: bool = False,
) -> Iterator[bool]:
    """Hold the file `path`, which is made where it is not there, and say whether its file system has locks.

    `on_wait` is called when another process holds it. With `pause`, which waits so many seconds and may raise, the
    lock is tried again and again. `remove` removes the file at the end. Raises OSError when it cannot be opened.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            held = _hold(handle, on_wait, pause)
            if not _still(path, handle):
                continue  # the process that held it moved or removed it: others may hold a new one
            try:
                yield held
            finally:
                if remove:
                    path.unlink(missing_ok=True)  # while it is held
            return
        finally:
            os.close(handle)


@contextlib.contextmanager
def folder_lock(
    folder: Path, on_wait: Callable[[], None] | None = None, *, wait: bool = True
) -> Iterator[bool]:
    """Hold `folder`, and say whether its file system has locks; no file is left behind.

    `on_wait` is called when another process holds it. Raises OSError when it cannot be opened, and BlockingIOError
    when it is held elsewhere and `wait` is false.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _hold(handle, on_wait, None if wait else _refuse)
    finally:
        os.close(handle)


def _hold(
    handle: int, on_wait: Callable[[], None] | None, pause: Callable[[float], None] | None
) -> bool:
    told = False
    while True:
        # Until the caller knows that it waits, and between its pauses, the lock is tried without waiting.
        waits = told and pause is None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            if on_wait and not told:
                on_wait()
            told = True
            if pause:
                pause(_PAUSE_S)
        except OSError:
            return False
        else:
            return True


def _refuse(_: float) -> None:
    raise BlockingIOError("another process holds the folder")


def _still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
