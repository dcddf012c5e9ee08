"""Lifecycle of a lock (check, create, update): one mechanism for wheels, conda packages and the bases of images."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Generic, NotRequired, Protocol, TypedDict, TypeVar

from envbuild.base.atomic import write_beside
from envbuild.base.errors import LockError
from envbuild.base.files import build_folder, read_small
from envbuild.base.progress import Log, step
from envbuild.environment import Environment
from envbuild.recipe.find import command_word, shipped_folder
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

# Names of packages that may change; None for all of them.
Upgrade = Collection[str] | None
# Name of a lock in lists → option of `envbuild lock` that makes it, and for messages: its name, the part of the recipe
# that it depends on, the work of making it.
_KINDS = {
    "wheels": ("wheels", "lock", "the recipe", "resolving"),
    "image": ("image", "image lock", "the recipe's base", "resolving the base of"),
    "builder": ("image", "lock of the builder", "what the layers need to be built", "resolving the builder of"),
    "conda": ("conda", "conda lock", "the recipe or what pip adds", "solving"),
}


class _OfRecipe(Protocol):
    @property
    def recipe(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def recipe_digest(self) -> str: ...


class _Dated(_OfRecipe, Protocol):
    @property
    def as_of(self) -> str: ...


L = TypeVar("L", bound=_OfRecipe)
T = TypeVar("T")


class LockUse(TypedDict):
    """Policy for a missing or stale lock in a build.

    With `locked`, such a lock is an error; otherwise it is resolved, from the store alone if `offline`. Without
    `write`, the new lock is not written to a file.
    """

    locked: bool
    offline: bool
    log: Log
    write: NotRequired[bool]


@dataclass(frozen=True, slots=True)
class LockState(Generic[L]):
    """Lock file of one target: its path, its contents, and the reason why it is not current (or None)."""

    path: Path
    lock: L | None
    fault: str | None


@dataclass(frozen=True, slots=True)
class Resolved(Generic[L]):
    """A new lock, its `summary` for messages, a wheel lock's resolution as PEP 751 text, and lines for the log.

    `limits` say which files were left out as too new. `before` is the replaced lock, `changes` are the differences, one
    line each; `update` adds both.
    """

    lock: L
    summary: str
    pylock: str = ""
    notes: Sequence[str] = ()
    limits: Sequence[str] = ()
    before: L | None = None
    changes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class LockKind(Generic[L]):
    """The lock of one kind for one target of a recipe.

    `name` is the kind's name in lists: wheels, image, builder or conda. `file` is the lock's name in the recipe's
    folder; a lock for another `digest` is stale.

    `read` returns the lock in a file, None without a file. `resolve` takes the environment, the old lock, the
    packages that may change, whether only the store may be used, and the log. `changes` describes the changes of
    an update, one line each. `write` replaces the file. `judge` raises LockError for a current lock that is known not
    to work; `warnings` returns the warnings of its resolution.
    """

    recipe: LoadedRecipe
    target: Target
    name: str
    file: str
    digest: str
    read: Callable[[Path], L | None]
    resolve: Callable[[Environment, L | None, Upgrade, bool, Log], Resolved[L]]
    changes: Callable[[L | None, L], list[str]]
    write: Callable[[Path, L], None]
    judge: Callable[[L, str, Log], None] = lambda _lock, _source, _log: None
    warnings: Callable[[L], Sequence[str]] = lambda _lock: ()

    @property
    def label(self) -> str:
        """Name of the lock; it includes the Python version if that is not the recipe's own."""
        return f"{self.name} for Python {self.recipe.variant}" if self.recipe.variant else self.name

    @property
    def part(self) -> str:
        """Option of `envbuild lock` that selects the lock: wheels, image or conda."""
        return _KINDS[self.name][0]

    def inspect(self) -> LockState[L]:
        """Return the state of the first current lock file, else of an existing file. Raises LockError if unreadable."""
        states = [self._state(folder / self.file) for folder in lock_folders(self.recipe, self.target)]
        return min(states, key=lambda state: (state.fault is not None, state.lock is None))

    def _state(self, path: Path) -> LockState[L]:
        _, title, subject, _ = _KINDS[self.name]
        try:
            lock = self.read(path)
        except LockError as error:
            if error.hint is None:  # the file could not even be opened
                raise
            command = f"mv {quote(str(path))} {quote(f'{path}.old')} && {self.command}"
            hint = f"restore it from version control, or make it anew: `{command}`"
            raise LockError(error.message, hint) from None
        if lock is None:
            return LockState(path, None, f"no {title} for this target yet")
        if lock.target != self.target.name or lock.recipe != self.recipe.recipe.name:
            return LockState(path, None, f"locks {lock.recipe} ({lock.target}) instead")
        stale = lock.recipe_digest != self.digest
        return LockState(path, lock, f"stale: {subject} changed since it was made" if stale else None)

    def fault(self) -> str | None:
        """Return why the lock is not current ("no image lock for this target yet"), None for a current lock."""
        try:
            return self.inspect().fault
        except LockError as error:
            return error.message

    @property
    def command(self) -> str:
        """Command that resolves and writes the lock."""
        return f"envbuild lock {command_word(self.recipe)} --target {self.target.name} --{self.part}"


def ensure(
    kind: LockKind[L], environment: Environment, *, locked: bool, offline: bool, log: Log, write: bool = True
) -> L:
    """Return the current lock; resolve a missing or stale one.

    Without `write` no file is written. Raises LockError when the lock is missing or stale and `locked` is set (or
    `offline`, for the base of an image), when it cannot be resolved, or when it is known not to work.
    """
    state = kind.inspect()
    if state.fault is None and state.lock is not None:
        kind.judge(state.lock, str(state.path), log)
        for warning in kind.warnings(state.lock):
            log(f"warning: {kind.target.name}: {warning}")
        return state.lock
    if locked or (offline and kind.part == "image"):  # the store does not have what a base is resolved from
        why = "" if locked else " and --offline forbids to resolve it"
        indexes = kind.recipe.recipe.targets[kind.target.name].indexes if kind.part == "wheels" else ()
        where = f", where {' and '.join(indexes)} can be reached," if indexes else ""
        hint = f"make it with `{kind.command}`{where} and commit it"
        raise LockError(f"{state.path}: {state.fault}{why}", hint)
    log(f"{state.path}: {state.fault}; {_KINDS[kind.name][3]} {kind.target.name} …")
    return update(kind, environment, upgrade=(), offline=offline, log=log, write=write).lock


def update(
    kind: LockKind[L], environment: Environment, *, upgrade: Upgrade, offline: bool, log: Log, write: bool = True
) -> Resolved[L]:
    """Resolve the lock again as `resolve_again`, and replace its file atomically. Raises LockError."""
    new = resolve_again(kind, environment, upgrade=upgrade, offline=offline, log=log)
    keep_lock(kind, new, log, write=write)
    return new


def resolve_again(
    kind: LockKind[L], environment: Environment, *, upgrade: Upgrade, offline: bool, log: Log
) -> Resolved[L]:
    """Resolve the lock again and return it; only the packages in `upgrade` may change, or all packages if it is None.

    Each change is reported through `log`, one line each, except the hundreds of a new base. Raises LockError when the
    recipe cannot be resolved, or when the result is known not to work.
    """
    old = kind.inspect().lock
    with step(f"{_KINDS[kind.name][3]} {kind.target.name}", printed=True):
        new = kind.resolve(environment, old, upgrade, offline, log)
    for warning in kind.warnings(new.lock):
        log(f"warning: {kind.target.name}: {warning}")
    differences = kind.changes(old, new.lock)
    for line in differences if old or kind.part != "image" else ():
        log(f"  {line}")
    return replace(new, before=old, changes=differences)


def keep_lock(kind: LockKind[L], new: Resolved[L], log: Log, *, write: bool = True) -> Path:
    """Write a lock from `resolve_again`, if `write` is true, and return its path. Raises LockError."""
    path = lock_folders(kind.recipe, kind.target)[-1] / kind.file
    if not write:
        log(f"{path}: not written (dry run), {len(new.changes)} would change")
        return path
    kind.write(path, new.lock)
    log(f"{path}: {new.summary}, {len(new.changes)} changed")
    return path


def kept_time(old: _Dated | None, digest: str, upgrade: Upgrade) -> str:
    """Return the time from which spans of `exclude_newer` count back: that of a current lock of which nothing may move.

    Any other resolution begins anew: "".
    """
    is_same = old is not None and old.recipe_digest == digest and upgrade is not None and not upgrade
    return old.as_of if old and is_same else ""


def read_lock_file(path: Path, parse: Callable[[str, str], T]) -> T | None:
    """Return `parse` applied to the text and name of `path`, None without a file. Raises LockError if unreadable."""
    try:
        text = read_small(path).decode().replace("\r\n", "\n")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{path}: cannot be read: {error}") from error
    return parse(text, str(path))


def write_lock_file(path: Path, text: str) -> None:
    """Replace the lock in `path` atomically. Raises LockError when it cannot be written."""
    try:
        write_beside(path, text)
    except OSError as error:
        raise LockError(
            f"{path}: cannot be written: {error.strerror}",
            "copy the recipe's folder to one you may write (./recipes/NAME), which is found first",
        ) from error


def package_changes(
    before: Mapping[str, T], after: Mapping[str, T], version: Callable[[T], str], other: Callable[[T, T], str]
) -> list[str]:
    """Return the changes of an update, one line per package, sorted by name.

    `version` describes a package; `other` describes another difference, as the end of the line, or returns "".
    """
    lines: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            lines.append(f"+ {name} {version(after[name])}")
        elif name not in after:
            lines.append(f"- {name} {version(before[name])}")
        elif version(before[name]) != version(after[name]):
            lines.append(f"~ {name} {version(before[name])} -> {version(after[name])}")
        elif end := other(before[name], after[name]):
            lines.append(f"~ {name} {version(after[name])}{end}")
    return lines


def lock_folders(recipe: LoadedRecipe, target: Target) -> list[Path]:
    """Return the folders to search for locks: the recipe's; for a read-only recipe also its own under build/."""
    # Recipes inside an installed wheel belong to the installer, even if the file system permits writes.
    installed = shipped_folder().resolve()  # lib64 may be a link to lib
    bundled = installed.parent.name == "_bundled" and installed in recipe.path.resolve().parents
    if (os.access(recipe.folder, os.W_OK) or not recipe.folder.exists()) and not bundled:
        return [recipe.folder]
    return [recipe.folder, build_folder() / recipe.recipe.name / target.name]
