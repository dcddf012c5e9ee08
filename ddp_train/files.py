"""Atomic replacement of files: readers see the old or the new file, never a partial one."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import time
from pathlib import Path

from .errors import TrainError, os_reason

# envbuild cannot know whether a process on another host still runs: its files are kept this long (seconds).
_FOREIGN_S = 24 * 3600


def _prefix(path: Path) -> str:
    return f".{path.name}.tmp."


def temporary_name(path: Path) -> Path:
    """Return the temporary file of this process that will replace `path`."""
    return path.with_name(f"{_prefix(path)}{platform.node()}.{os.getpid()}")


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of killed runs beside `path`, but not those of active runs.

    Two jobs that write the same file are a mistake, but both must run far enough to report it.
    """
    for entry in path.parent.iterdir():
        if entry.name.startswith(_prefix(path)):
            with contextlib.suppress(OSError):
                if _is_left(entry, entry.name[len(_prefix(path)) :]):
                    entry.unlink()


def _is_left(entry: Path, owner: str) -> bool:
    host, _, pid = (owner[: -len(".link")] if owner.endswith(".link") else owner).rpartition(".")
    if host not in ("", platform.node()) or not pid.isdigit():
        return entry.stat().st_mtime < time.time() - _FOREIGN_S
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return int(pid) == os.getpid()


def write_temporary(path: Path, payload: bytes) -> Path:
    """Write `payload` to a new file beside `path`, and sync it to disk if its file system can. Raises OSError."""
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as stream:
            stream.write(payload)
            stream.flush()
            _sync(stream.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return temporary


def _sync(handle: int) -> None:
    """Sync a file to disk; FUSE and some of NFS cannot, which is no reason to lose a snapshot. Raises OSError."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def sync_folder(folder: Path) -> None:
    """Sync renames in `folder` to disk, if its file system supports this."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_writable(path: Path, title: str) -> None:
    """Raise TrainError unless `path` can be replaced by a file written beside it.

    Called before training, so that hours of training are not lost.
    """
    problem = None
    try:  # also of the questions, for a folder that may not be searched, or a name that is too long
        if path.is_dir():
            problem = "is a folder"
        elif path.exists() and not path.is_file():
            # A rename onto /dev/null would replace the device.
            problem = "is not a regular file"
        elif not path.parent.is_dir():
            problem = f"the folder {path.parent} does not exist"
        else:
            write_temporary(path, b"").unlink()
    except OSError as error:
        problem = os_reason(error)
    if problem is not None:
        raise TrainError(f"cannot write {title} {path}: {problem}")


def replace_file(path: Path, payload: bytes, title: str) -> None:
    """Replace `path` by a file with `payload`, atomically. Raises TrainError."""
    try:
        write_temporary(path, payload).replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise TrainError(f"cannot write {title} {path}: {os_reason(error)}") from None
