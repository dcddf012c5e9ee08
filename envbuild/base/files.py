"""Access to shipped files, small and regular files, JSON, and copies or hard links of files in the store."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import envbuild

_MOST = 16 << 20
# Errors of a file that does not exist. Any other says nothing of it, and must not be taken for a missing one.
MISSING = (FileNotFoundError, NotADirectoryError)
# Bytes copied per call, so that progress is reported and Ctrl-C is handled in time.
_MOST_COPIED, _COPIED_BY_HAND = 16 << 20, 4 << 20
# Errors for two file systems, an old kernel, a container's seccomp filter, or a file system without support.
_UNABLE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)
_LONGEST_NAME = 255  # bytes: NAME_MAX of Linux's file systems


def shipped(name: str) -> Path:
    """Return the file or folder `name` that ships with envbuild: inside an installed wheel, or at a checkout's top."""
    package = Path(envbuild.__file__).parent
    bundled = package / "_bundled" / name
    return bundled if bundled.exists() else package.parent / name


def project_folder() -> Path:
    """Return the nearest folder (current or above) with a recipe in its `recipes` folder, else the current folder.

    Builds write into its `build` folder. The search ends below a folder that everyone may write to, because others
    could have put recipes there.
    """
    here = Path()
    while next(here.glob("recipes/*/recipe.toml"), None) is None:
        above = here / ".."
        try:
            if above.stat().st_mode & stat.S_IWOTH or above.samefile(here):
                return Path()
        except OSError:
            return Path()
        here = above
    return here


def build_folder() -> Path:
    """Return the default folder of artifacts, used without --out, in which they are at build/RECIPE/TARGET."""
    return project_folder() / "build"


def read_small(path: Path) -> bytes:
    """Return the content of a file of at most 16 MiB. Raises OSError, also for a larger file, such as a device."""
    with path.open("rb") as stream:
        data = stream.read(_MOST + 1)
    if len(data) > _MOST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return data


def is_file_name(text: object) -> bool:
    """Return whether the untrusted `text` is a file name that cannot lead outside of its folder."""
    if not isinstance(text, str) or text in ("", ".", "..") or "/" in text or "\0" in text:
        return False
    try:
        return len(text.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON may have it
        return False


def link_or_copy(source: Path, place: Path) -> None:
    """Create `place` as a hard link to the immutable file `source`, else as a copy; an existing `place` is kept."""
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), place)
    except OSError:  # another file system, one without links, or another user's file
        shutil.copy(source, place)  # with its mode, as a link has it: patchelf is run


def open_known(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open or create a file with a predictable name for writing. Raises OSError.

    In a shared folder, another user may have created a link of this name, which would redirect the write: it is
    removed.
    """
    while True:
        try:
            return os.open(path, flags | os.O_NOFOLLOW, mode)
        except OSError as error:
            if error.errno != errno.ELOOP or not os.path.islink(path):
                raise
            os.unlink(path)


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file without a buffer. Raises OSError for anything else; a named pipe would block."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return os.fdopen(handle, "rb", buffering=0)


def read_regular(path: str | Path) -> bytes:
    """Return the content of a regular file. Raises OSError."""
    with open_regular(path) as stream:
        return stream.read()


def sha256_of(path: str | Path) -> str:
    """Return the sha256 (hexadecimal) of a file. Raises OSError."""
    import hashlib  # only commands that compare or write files need it

    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Return the JSON document `text`. Raises ValueError, also if it is nested too deeply."""
    import json  # only commands that read artifacts and locks need it

    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def walk_stats(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path below `root`, stat) for all entries except folders; links are not followed. Raises OSError."""
    start = len(os.fspath(root)) + 1
    folders = [os.fspath(root)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry.path[start:], entry.stat(follow_symlinks=False)


def absolute_path(path: Path) -> Path:
    """Return `path` as an absolute path without "..", resolved like by the kernel. Raises OSError.

    ".." after a symbolic link leads to the parent of the link's target; other links are kept, because other hosts may
    know a folder only by the link. Tools compare and join paths as text, which requires paths without "..".
    """
    whole = path.absolute()
    result = Path(whole.anchor)
    for part in whole.parts[1:]:
        if part != "..":
            result /= part
        else:
            result = (Path(os.path.realpath(result)) if result.is_symlink() else result).parent
    return result


def named_path(path: Path) -> Path:
    """Return `path`, made absolute if it has ".." or no name (as "."): files beside an artifact need its name."""
    return absolute_path(path) if ".." in path.parts or not path.name else path


def copy_span(source: int, out: int, start: int, target: int, size: int, on_progress: Callable[[int], object]) -> None:
    """Copy `size` bytes at offset `start` of the file descriptor `source` to offset `target` of `out`.

    `on_progress` is called with the number of copied bytes. Raises EOFError when the source ends earlier, and OSError.
    """
    while size:
        count = _in_kernel(source, out, start, target, size) or _by_hand(source, out, start, target, size)
        if not count:
            raise EOFError
        start, target, size = start + count, target + count, size - count
        on_progress(count)


def _in_kernel(source: int, out: int, start: int, target: int, size: int) -> int:
    """Copy some bytes; return 0 if the kernel, the file systems or Python's C library (an old glibc) cannot."""
    if not hasattr(os, "copy_file_range"):
        return 0
    try:
        return os.copy_file_range(source, out, min(size, _MOST_COPIED), start, target)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
        return 0


def _by_hand(source: int, out: int, start: int, target: int, size: int) -> int:
    rest = memoryview(os.pread(source, min(size, _COPIED_BY_HAND), start))
    count = len(rest)
    while rest:
        written = os.pwrite(out, rest, target)
        rest, target = rest[written:], target + written
    return count


def home_folder(env: Mapping[str, str]) -> Path:
    """Return $HOME, else the home folder of the user database. Raises RuntimeError when there is none."""
    return Path(env["HOME"]) if env.get("HOME") else Path.home()
