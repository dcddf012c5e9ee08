"""Errors of the operating system, as messages for users: action, file, reason, and what to do."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

from envbuild.base.errors import BuildError, EnvbuildError, HostError, UsageError

_FULL = "free disk space, inodes or quota there, or choose another folder: ENVBUILD_STORE for the store, TMPDIR, --out"
_REFUSED = "choose a folder that you may read and write: ENVBUILD_STORE for the store, TMPDIR, --out"
_BROKEN = "check its disk or file system (dmesg), then run it again; envbuild makes removed files of its store again"
_LOST = "the file system lost its server or disk: check its mount (dmesg) or ask its administrator, then run it again"
_UNABLE = "this file system cannot do that: choose another folder: ENVBUILD_STORE for the store, TMPDIR, --out"
# Answers of the operating system, and what a user can do. Others are shown, too, if a file is known.
_SYSTEM: dict[int, tuple[type[EnvbuildError], str]] = {
    errno.ENOSPC: (BuildError, _FULL),
    errno.EDQUOT: (BuildError, _FULL),
    errno.EFBIG: (BuildError, _FULL),
    errno.EACCES: (HostError, _REFUSED),
    errno.EPERM: (HostError, _REFUSED),
    errno.EROFS: (HostError, _REFUSED),
    errno.EIO: (BuildError, _BROKEN),
    errno.EUCLEAN: (BuildError, "the file system is damaged: ask its administrator to check it (fsck)"),
    errno.EBADMSG: (BuildError, "the file system is damaged: ask its administrator to check it (fsck)"),
    errno.EINTR: (BuildError, "run it again: a network file system interrupted the call"),
    errno.EAGAIN: (BuildError, "run it again: a network file system was busy"),
    errno.EBUSY: (BuildError, "end the program or mount that uses it (lsof, findmnt), then run it again"),
    errno.ETXTBSY: (BuildError, "end the program that runs it or writes it (lsof), then run it again"),
    # Lustre after an eviction, NFS without its server, FUSE without its process, a disk that was removed.
    errno.ESTALE: (BuildError, _LOST),
    errno.ESHUTDOWN: (BuildError, _LOST),
    errno.ENOTCONN: (BuildError, _LOST),
    errno.ECONNABORTED: (BuildError, _LOST),
    errno.ECONNRESET: (BuildError, _LOST),
    errno.ECONNREFUSED: (BuildError, _LOST),
    errno.ETIMEDOUT: (BuildError, _LOST),
    errno.EHOSTDOWN: (BuildError, _LOST),
    errno.EHOSTUNREACH: (BuildError, _LOST),
    errno.EREMOTEIO: (BuildError, _LOST),
    errno.ENODEV: (BuildError, _LOST),
    errno.ENXIO: (BuildError, _LOST),
    errno.EPIPE: (BuildError, "a program or server ended while envbuild wrote to it; run it again"),
    errno.ENOTSUP: (BuildError, _UNABLE),
    errno.ENOSYS: (BuildError, _UNABLE),
    errno.ENOLCK: (BuildError, _UNABLE),
    errno.EXDEV: (BuildError, _UNABLE),
    errno.EMLINK: (BuildError, _UNABLE),
    errno.ENAMETOOLONG: (UsageError, "choose a shorter path"),
    errno.ELOOP: (UsageError, "correct the link, which leads to itself"),
    errno.EMFILE: (HostError, "allow more open files: ulimit -n"),
    errno.ENFILE: (HostError, "close other programs: the system has no more open files"),
    errno.ENOMEM: (HostError, "free memory, or ask the batch system for more"),
}
_OTHER = "check that file and its file system, then run it again"
# Errors of writes alone.
_OF_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Characters of a path in a message.
_LONGEST = 300
_WRITING = "while writing "


def system_error(error: OSError | UnicodeEncodeError) -> EnvbuildError | None:
    """Return the message for an error of the operating system, None for an error that does not help a user.

    The latter name no file and do not come from a file system.
    """
    if isinstance(error, UnicodeEncodeError):
        if error.encoding != sys.getfilesystemencoding():
            return None
        return HostError(
            f"the locale's encoding, {error.encoding}, has no character {error.object[error.start]!a}, which a path "
            f"contains: {error.object!a}",
            "set a UTF-8 locale, for example LC_ALL=C.UTF-8",
        )
    if str(error.strerror).startswith("No usable temporary directory"):  # of Python's tempfile, for any reason
        return HostError(f"no folder for temporary files can be written: {error.strerror}", _FULL)
    if error.errno is None:
        return BuildError(file_error(error), _OTHER) if _not_copied(error) else None
    if error.errno == errno.ENOENT and error.filename is None and not _has_current_folder():
        return UsageError("the current folder does not exist any more", "change into another folder")
    if error.errno not in _SYSTEM and not _file_of(error)[1]:
        return None
    kind, hint = _SYSTEM.get(error.errno, (BuildError, _OTHER))
    return kind(file_error(error), hint)


def system_hint(number: int | None) -> str:
    """Return the hint for errno `number` of a file operation."""
    return _SYSTEM.get(number or 0, (BuildError, _OTHER))[1]


def file_error(error: OSError, where: str | os.PathLike[str] | None = None) -> str:
    """Return action, file and reason of an error: "cannot write /store/x: No space left on device".

    `where` is the file or folder being written; the message names the error's own file if it is known.
    """
    if lost := _not_copied(error):
        more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
        return "cannot copy {} to {}: {}".format(*lost[0]) + more
    verb, path = _file_of(error)
    if where is not None:
        verb, path = verb or "write", path or os.fspath(where)
    return f"cannot {verb or 'read or write'} {path or 'a file'}: {error.strerror or error}"


def note_writing(error: OSError, path: str | os.PathLike[str]) -> None:
    """Add a note to `error` that names `path`, the file being written, for `file_error` and crash reports."""
    error.add_note(f"{_WRITING}{os.fspath(path)}")


def _not_copied(error: OSError) -> list[tuple[str, str, str]]:
    """Return (source, destination, reason) of each file of a tree that shutil could not copy; [] for other errors."""
    # shutil is not imported for this: it takes a tenth of the start.
    if type(error).__module__ == "shutil" and error.args and isinstance(error.args[0], list):
        return [(str(source), str(place), str(reason)) for source, place, reason in error.args[0]]
    return []


def _file_of(error: OSError) -> tuple[str, str]:
    """Return the action ("read", "write" or "copy") and the file of `error`; "" if unknown.

    Errors of open(2) and rename(2) name the file but not the action; errors of read(2), write(2) and fsync(2) name
    neither. Both are known in the innermost frame with an open file.
    """
    noted = [note.removeprefix(_WRITING) for note in getattr(error, "__notes__", ()) if note.startswith(_WRITING)]
    paths = [os.fsdecode(path) for path in (error.filename, error.filename2) if isinstance(path, (str, bytes))]
    reads, writes = _open_files(error)
    if error.errno in _OF_WRITES:
        reads = []
    if not paths and reads and writes:
        return "copy", f"{_shortened(reads[0])} to {_shortened(writes[0])}"
    verb = "write" if error.errno in _OF_WRITES or writes else "read" if reads else "write" if noted else ""
    paths_shown = paths or writes or reads or noted[:1]
    if verb == "write" and any(os.path.dirname(noted[0]) == os.path.dirname(path) for path in paths_shown if noted):
        paths_shown = noted[:1]  # instead of the file that is to replace it
    return verb, " -> ".join(map(_shortened, paths_shown))


def _open_files(error: OSError) -> tuple[list[str], list[str]]:
    """Return the files that the innermost frame with open files has open or opens: (to read, to write)."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    reads: list[str] = []
    writes: list[str] = []
    for frame in reversed(frames):
        values = dict(frame.f_locals)
        if isinstance(error.filename, str):  # of the open function of pathlib, gzip or tarfile
            mode = values.get("mode")
            if frame.f_code.co_name == "open" and isinstance(mode, str):
                (reads if _is_reading(mode) else writes).append(error.filename)
        elif error.filename is None:
            for stream in values.values():
                if isinstance(stream, io.IOBase) and (name := _name_of(stream)):
                    (reads if _is_reading(str(getattr(stream, "mode", ""))) else writes).append(name)
        if reads or writes:
            break
    return reads, writes


def _is_reading(mode: str) -> bool:
    return mode.startswith("r") and "+" not in mode


def _name_of(stream: io.IOBase) -> str:
    """Return the path of a file, which may be closed by now, "" for another stream."""
    with contextlib.suppress(ValueError, AttributeError, OSError, TypeError):  # TypeError: a descriptor
        name = os.fsdecode(getattr(stream, "name", ""))
        return "" if name.startswith("<") else name  # "<stdout>"
    return ""


def _shortened(path: str) -> str:
    return path if len(path) <= _LONGEST else f"{path[:_LONGEST]}… ({len(path)} characters)"


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
