"""Errors that a user sees: each class carries its exit code, each instance says what to change."""

from __future__ import annotations


class EnvbuildError(Exception):
    """Base of every error shown to a user as one message, never as a traceback.

    `message` says what is wrong; `hint`, when given, says what to change.
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
    """An artifact that could not be made."""

    exit_code = 4


class VerificationError(EnvbuildError):
    """An artifact that was made and does not pass its checks."""

    exit_code = 5


class HostError(EnvbuildError):
    """A tool, an interpreter, an architecture or a permission that this host lacks."""

    exit_code = 6
