"""Atomic replace of a file or folder, and clean-up after a killed run.

A reader of a file sees its old content or its new content, never a part of either. A new folder is built beside its
final path as `.NAME.envbuild-XXXX`. renameat2(2) with RENAME_EXCHANGE exchanges it with the old one, so that the path
always holds the old folder or the new one. On file systems without it (NFS), two renames replace the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from envbuild.base.errors import BuildError, EnvbuildError
from envbuild.base.files import absolute_path, open_known, open_regular
from envbuild.base.progress import Log
from envbuild.base.system_errors import file_error, note_writing, system_hint

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

    The lock is exclusive, or `shared` with other shared locks. `on_wait` is called when another process holds the lock.
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
    reported = False
    while True:
        # The first attempt does not block, so that `on_wait` can run; with `pause`, no attempt does.
        waits = reported and pause is None
        try:
            fcntl.flock(handle, kind | (0 if waits else fcntl.LOCK_NB))
            return True
        except BlockingIOError:
            if on_wait and not reported:
                on_wait()
            reported = True
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


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)
# The end of a name of `staging`; a file is read in pieces, which may cut one after 17 bytes.
_STAGING, _MOST_CUT, _PIECE = re.compile(rb"\.envbuild-[0-9a-f]{8}"), 17, 1 << 20


@contextlib.contextmanager
def exclusive(place: Path, log: Log) -> Iterator[None]:
    """Hold the lock for building at `place`; a second builder prints a message and waits.

    The lock is on the parent folder. On a file system without locks, the replace itself is still atomic.
    """
    message = f"another envbuild is building in {place.parent}; waiting for it …"
    with contextlib.ExitStack() as held:
        with writing(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(folder_lock(place.parent, lambda: log(message)))
        recover(place)
        yield


def recover(place: Path) -> None:
    """Remove leftovers of a killed run beside `place`; restore the old folder after an interrupted replace."""
    for leftover in place.parent.glob(f".{glob.escape(place.name)}.envbuild-*"):
        if leftover.name.endswith("-old") and not place.exists():
            leftover.rename(place)
        else:
            remove(leftover)


def staging(place: Path) -> Path:
    """Return a new name beside `place` for the folder that `staged` creates, so that a Ctrl-C leaves no folder behind.

    The path is absolute and without ".." for any `place`, because installers write it into scripts.
    """
    place = absolute_path(place)
    return place.with_name(f".{place.name}.envbuild-{secrets.token_hex(4)}")


def names_staging(path: Path) -> bool:
    """Return whether a file, or a symbolic link, contains the name of a folder of `staging`. Raises OSError."""
    if path.is_symlink():
        return _STAGING.search(os.fsencode(os.readlink(path))) is not None
    with open_regular(path) as stream:
        text = b""
        while data := stream.read(_PIECE):
            text = text[-_MOST_CUT:] + data
            if _STAGING.search(text):
                return True
    return False


@contextlib.contextmanager
def staged(place: Path) -> Iterator[Path]:
    """Create an empty folder beside `place`, private to the user, and remove it at the end. Raises BuildError."""
    folder = staging(place)
    try:
        with writing(place.parent):
            folder.mkdir(mode=0o700)
        yield folder
    finally:
        remove(folder)


def replace(staged: Path, place: Path) -> None:
    """Move the folder or file `staged` to `place`, atomically if possible; remove the old one. Raises BuildError."""
    with writing(place.parent):
        if not staged.is_dir():
            os.replace(staged, place)
            return
        staged.chmod(0o755)
        if not place.exists():
            staged.rename(place)
            return
        if not _exchange(staged, place):
            # Two renames if the file system cannot exchange (NFS); `recover` undoes an interruption between them.
            old = staged.with_name(f"{staged.name}-old")
            place.rename(old)
            staged.rename(place)
            staged = old
    remove(staged)


def remove(folder: Path) -> None:
    """Remove a folder or file as far as possible; the next run removes the rest."""
    if folder.is_dir() and not folder.is_symlink():
        remove_tree(folder)
    else:
        # A read-only file system reports an error even for a missing file.
        with contextlib.suppress(OSError):
            folder.unlink()


def remove_tree(folder: Path) -> None:
    """Remove a folder and its contents, including read-only folders, of any depth. Errors are ignored.

    No link is followed, not even if another user replaces a folder by a link during the removal.
    """
    with contextlib.suppress(OSError, RecursionError):
        for _, names, _, above in os.fwalk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    os.close(_opened(name, above))
    with contextlib.suppress(RecursionError):  # as os.fwalk, it calls itself for each level
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        with contextlib.suppress(OSError):
            top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _remove_deep(top)
                os.rmdir(folder)
            finally:
                os.close(top)


def _opened(name: str, above: int) -> int:
    """Return a descriptor of the folder `name` in the folder `above`, made writable for its owner. Raises OSError."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)  # fchmod(2) does not take it
    except OSError:
        os.close(handle)
        raise
    return handle


def _remove_deep(top: int) -> None:
    """Remove the contents of the folder `top` as far as possible: each folder in it is emptied into `top` first."""
    stays: set[str] = set()
    while names := set(os.listdir(top)) - stays:
        for name in names:
            stays.add(name)
            with contextlib.suppress(OSError):
                try:
                    os.unlink(name, dir_fd=top)
                except IsADirectoryError:
                    inner = _opened(name, top)
                    try:
                        for below in os.listdir(f"/proc/self/fd/{inner}"):
                            with contextlib.suppress(OSError):  # a file; a folder moves only if it can be written to
                                os.close(_opened(below, inner))
                            with contextlib.suppress(OSError):
                                os.rename(below, f".{secrets.token_hex(16)}", src_dir_fd=inner, dst_dir_fd=top)
                    finally:
                        os.close(inner)
                    os.rmdir(name, dir_fd=top)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add `path`, the file being written, to an OSError of the block: errors of write(2) and fsync(2) lack it."""
    try:
        yield
    except OSError as error:
        note_writing(error, path)
        raise


def sync(handle: int) -> None:
    """Write a file to its disk with fsync(2), if its file system supports this: FUSE, some NFS and /dev/null do not."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o644, prefix: str = ".new-") -> Iterator[Path]:
    """Yield a new file beside `path` for the block to write; it replaces `path` atomically if the block succeeds.

    `mode` is the file's permissions, `prefix` the beginning of its name until then. Raises OSError.
    """
    with naming(path), new_file(path.parent, prefix) as (handle, temporary):
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)  # until it is complete: `write_beside` removes files without a lock
        yield temporary
        os.chmod(temporary, mode)
        os.replace(temporary, path)


@contextlib.contextmanager
def new_file(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """Yield the descriptor and the path of a new file in `folder`, private to the user; remove it if it is still there.

    Unlike with tempfile, the name is known before the file exists: a Ctrl-C leaves no file. Raises OSError.
    """
    path, handle = folder / f"{prefix}{secrets.token_hex(8)}", -1
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        yield handle, path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        if handle >= 0:
            os.close(handle)


def write_atomically(path: Path, text: str, mode: int = 0o644, prefix: str = ".new-", *, durable: bool = True) -> None:
    """Write `text` to `path` with an atomic replace; missing parent folders are created. Raises OSError.

    If not `durable`, a crash of the host may leave an empty file: for files that can be written again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode, prefix) as temporary, temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        if durable:
            sync(stream.fileno())


def write_beside(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` to `path`, in a folder of the user, as `write_atomically`; remove leftovers of killed runs.

    In the store, `Store.clean_stale` removes leftovers. Raises OSError.
    """
    write_atomically(path, text, mode, _clean_beside(path))


def replacing_beside(path: Path, mode: int = 0o644) -> contextlib.AbstractContextManager[Path]:
    """Replace `path`, in a folder of the user, as `replacing`; remove leftovers of killed runs. Raises OSError."""
    return replacing(path, mode, _clean_beside(path))


def _clean_beside(path: Path) -> str:
    """Remove the temporary files of killed runs for `path`; return the prefix of their names."""
    prefix = f".{path.name}.envbuild-"
    for left in path.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), left.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    return prefix


@contextlib.contextmanager
def writing(where: Path, failure: type[EnvbuildError] = BuildError) -> Iterator[None]:
    """Turn an OSError while writing to `where` into a `failure` with a hint."""
    try:
        yield
    except OSError as error:
        raise failure(file_error(error, where), write_hint(error.errno)) from error


def write_hint(number: int | None) -> str:
    """Return the hint for a write that failed with errno `number`."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free disk space, or choose another path with --out (ENVBUILD_STORE for the store)"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "choose a path that you may write with --out (ENVBUILD_STORE for the store)"
    return system_hint(number)


def _exchange(first: Path, other: Path) -> bool:
    """Exchange two paths atomically; return False if kernel, C library or file system cannot."""
    rename = getattr(_libc, "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
