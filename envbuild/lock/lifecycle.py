"""Check, make and renew a lock: one mechanism for wheels, conda packages and the bases of images."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.lock.state import L, LockState, how_to_make, inspect_lock_file, lock_folders
from envbuild.progress import Log
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

# Names of packages that may change; None for all of them.
Upgrade = Collection[str] | None


@dataclass(frozen=True, slots=True)
class Resolved(Generic[L]):
    """A new lock. `summary` describes it in messages; `pylock` is a wheel lock's resolution as PEP 751 text."""

    lock: L
    summary: str
    pylock: str = ""


@dataclass(frozen=True, slots=True)
class LockKind(Generic[L]):
    """The lock of one kind for one target of a recipe.

    `part` is the option of `envbuild lock` that makes it, `name` its name in lists of locks. For messages, `title` is
    its name, `subject` the part of the recipe that it depends on, `task` the work of making it. `file` is its name
    in the recipe's folder, and a lock for another `digest` is stale.

    `read` returns the lock in a file, None without one. `resolve` is called with the environment, the old lock, the
    packages that may change, whether it may use only the store, and the log. `changes` describes the changes of
    an update, one line each; those of a first lock are reported if `reports_first`. `write` replaces the file.
    `judge` raises LockError for a current lock that is known not to work; `warnings` are those of its resolution.
    """

    recipe: LoadedRecipe
    target: Target
    part: str
    name: str
    title: str
    subject: str
    task: str
    file: str
    digest: str
    read: Callable[[Path], L | None]
    resolve: Callable[[Environment, L | None, Upgrade, bool, Log], Resolved[L]]
    changes: Callable[[L | None, L], list[str]]
    write: Callable[[Path, L], None]
    judge: Callable[[L, str, Log], None] = field(default=lambda _lock, _source, _log: None)
    warnings: Callable[[L], Sequence[str]] = field(default=lambda _lock: ())
    resolves_offline: bool = True
    reports_first: bool = True

    def inspect(self) -> LockState[L]:
        """Read the lock without changing anything. Raises LockError when it is not readable."""
        return inspect_lock_file(
            self.recipe, self.target, self.file, self.read, self.digest,
            part=self.part, what=self.title, subject=self.subject,
        )  # fmt: skip

    def fault(self) -> str | None:
        """Return why the lock is not current ("no image lock for this target yet"), None if it is."""
        try:
            return self.inspect().fault
        except LockError as error:
            return error.message

    def log_warnings(self, lock: L, log: Log) -> None:
        """Report the warnings of the resolution of `lock`, one line each."""
        for warning in self.warnings(lock):
            log(f"warning: {lock.target}: {warning}")


def ensure(
    kind: LockKind[L], environment: Environment, *, locked: bool, offline: bool, log: Log, write: bool = True
) -> L:
    """Return the current lock; resolve a missing or stale one.

    Each resolution is reported through `log`. Without `write` no file is written. Raises LockError when the lock is
    missing or stale and `locked` is set (or `offline`, for a lock that cannot be resolved from the store), when it
    cannot be resolved, or when it is known not to work.
    """
    state = kind.inspect()
    if state.fault is None and state.lock is not None:
        kind.judge(state.lock, str(state.path), log)
        kind.log_warnings(state.lock, log)
        return state.lock
    if locked or (offline and not kind.resolves_offline):
        why = "" if locked else " and --offline forbids to resolve it"
        hint = how_to_make(kind.recipe, kind.target, kind.part)
        raise LockError(f"{state.path}: {state.fault}{why}", hint)
    log(f"{state.path}: {state.fault}; {kind.task} …")
    return update(kind, environment, upgrade=(), offline=offline, log=log, write=write).lock


def update(
    kind: LockKind[L], environment: Environment, *, upgrade: Upgrade, offline: bool, log: Log, write: bool = True
) -> Resolved[L]:
    """Resolve again and write the lock; of its packages only those in `upgrade` may change, all of them for None.

    The file is replaced atomically. Each change is reported through `log`, one line each. Raises LockError when the
    recipe cannot be resolved, or when the result is known not to work.
    """
    old = kind.inspect().lock
    new = kind.resolve(environment, old, upgrade, offline, log)
    kind.log_warnings(new.lock, log)
    path = lock_folders(kind.recipe, kind.target)[-1] / kind.file
    differences = kind.changes(old, new.lock)
    for line in differences if old or kind.reports_first else ():
        log(f"  {line}")
    if not write:
        log(f"{path}: not written (dry run), {len(differences)} would change")
        return new
    kind.write(path, new.lock)
    log(f"{path}: {new.summary}, {len(differences)} changed")
    return new
