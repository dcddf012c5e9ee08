"""Errors for users: each class has an exit code, each instance can have a hint."""

from __future__ import annotations

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
