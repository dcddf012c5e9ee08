"""Errors for users: each class has an exit code, each instance can have a hint."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import TypeVar


class EnvbuildError(Exception):
    """Base of all errors that are shown as one message and never as a traceback.

    `message` says what is wrong; `hint`, if given, says what to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(EnvbuildError):
    """A command line that cannot be carried out."""

    exit_code = 2


class RecipeError(EnvbuildError):
    """A recipe or site file with mistakes."""

    exit_code = 2


class LockError(EnvbuildError):
    """A lock that is missing, stale, unsatisfiable or wrong for its target."""

    exit_code = 3


class BuildError(EnvbuildError):
    """An artifact that could not be built."""

    exit_code = 4


class VerificationError(EnvbuildError):
    """An artifact that was built but fails its verification."""

    exit_code = 5


class HostError(EnvbuildError):
    """A tool, interpreter, architecture or permission that this host lacks."""

    exit_code = 6


E = TypeVar("E", bound=EnvbuildError)


def joined(kind: type[E], errors: Sequence[EnvbuildError]) -> E:
    """Return one error of the class `kind` with the messages and hints of all `errors`, each once."""
    hints = dict.fromkeys(error.hint for error in errors if error.hint)
    return kind("\n".join(dict.fromkeys(error.message for error in errors)), "\n".join(hints) or None)


_FULL = "free disk space, inodes or quota there, or choose another folder: ENVBUILD_STORE for the store, TMPDIR, --out"
_REFUSED = "choose a folder that you may read and write: ENVBUILD_STORE for the store, TMPDIR, --out"
_BROKEN = "check the disk or file system (dmesg), then remove the file: envbuild makes it again"
# Answers of the operating system that a user can mend, and how. Others are faults of envbuild.
_SYSTEM: dict[int, tuple[type[EnvbuildError], str]] = {
    errno.ENOSPC: (BuildError, _FULL),
    errno.EDQUOT: (BuildError, _FULL),
    errno.EFBIG: (BuildError, _FULL),
    errno.EACCES: (HostError, _REFUSED),
    errno.EPERM: (HostError, _REFUSED),
    errno.EROFS: (HostError, _REFUSED),
    errno.EIO: (BuildError, _BROKEN),
    errno.EINTR: (BuildError, "run it again: a network file system interrupted the call"),
    errno.ESTALE: (BuildError, _BROKEN),
    errno.ENAMETOOLONG: (UsageError, "choose a shorter path"),
    errno.ELOOP: (UsageError, "correct the link, which leads to itself"),
    errno.EMFILE: (HostError, "allow more open files: ulimit -n"),
    errno.ENFILE: (HostError, "close other programs: the system has no more open files"),
    errno.ENOMEM: (HostError, "free memory, or ask the batch system for more"),
}
# Characters of a path in a message.
_LONGEST = 300


def system_error(error: OSError | UnicodeEncodeError) -> EnvbuildError | None:
    """Return the error to show for an answer of the operating system that a user can mend, None for any other."""
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
    if error.errno == errno.ENOENT and error.filename is None and not _has_current_folder():
        return UsageError("the current folder does not exist any more", "change into another folder")
    if error.errno not in _SYSTEM:
        return None
    kind, hint = _SYSTEM[error.errno]
    paths = [os.fsdecode(path) for path in (error.filename, error.filename2) if isinstance(path, (str, bytes))]
    shown = [path if len(path) <= _LONGEST else f"{path[:_LONGEST]}… ({len(path)} characters)" for path in paths]
    return kind(f"{' -> '.join(shown) or 'a file cannot be read or written'}: {error.strerror}", hint)


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
