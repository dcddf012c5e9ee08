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
    """Return one error of the class `kind` with the messages and hints of all `errors`, each once.

    Messages that differ only in their first lines share the rest, as for several targets and one unreachable index.
    """
    hints = dict.fromkeys(error.hint for error in errors if error.hint)
    heads: dict[str, dict[str, None]] = {}
    for error in errors:
        head, line_end, rest = error.message.partition("\n")
        heads.setdefault(line_end + rest, {})[head] = None
    return kind("\n".join("\n".join(lines) + rest for rest, lines in heads.items()), "\n".join(hints) or None)
