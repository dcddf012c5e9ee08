"""Common parts of all locks: their folders, whether they are current, and how they are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Generic, NotRequired, Protocol, TypedDict, TypeVar

from envbuild.atomic import write_atomically
from envbuild.errors import LockError
from envbuild.recipe.find import command_word, shipped_folder
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target


class _OfRecipe(Protocol):
    @property
    def recipe(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def recipe_digest(self) -> str: ...


L = TypeVar("L", bound=_OfRecipe)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LockState(Generic[L]):
    """Lock file of one target: its path, its contents, and the reason why it is not current (or None)."""

    path: Path
    lock: L | None
    fault: str | None


class LockUse(TypedDict):
    """Handling of a missing or stale lock in a build.

    With `locked` it is an error; otherwise the lock is created, from the store alone if `offline`, and reported
    through `log`; without `write` it is created in memory only.
    """

    locked: bool
    offline: bool
    log: Callable[[str], None]
    write: NotRequired[bool]


def inspect_lock_file(
    recipe: LoadedRecipe,
    target: Target,
    name: str,
    read: Callable[[Path], L | None],
    digest: str,
    *,
    part: str,
    what: str,
    subject: str,
) -> LockState[L]:
    """Return the state of the best of the files `name`: one for `digest`, else one that exists.

    For messages: `part` is the option of `envbuild lock` that creates the lock, `what` the lock's name, and
    `subject` the part of the recipe that it depends on. Raises LockError when a file is not readable.
    """

    def judge(path: Path) -> LockState[L]:
        try:
            lock = read(path)
        except LockError as error:
            if error.hint is None:  # the file could not even be opened
                raise
            command = f"mv {quote(str(path))} {quote(f'{path}.old')} && {_command(recipe, target, part)}"
            hint = f"restore it from version control, or make it anew: `{command}`"
            raise LockError(error.message, hint) from None
        if lock is None:
            return LockState(path, None, f"no {what} for this target yet")
        if lock.target != target.name or lock.recipe != recipe.recipe.name:
            return LockState(path, None, f"locks {lock.recipe} ({lock.target}) instead")
        if lock.recipe_digest != digest:
            return LockState(path, lock, f"stale: {subject} changed since it was made")
        return LockState(path, lock, None)

    states = [judge(folder / name) for folder in lock_folders(recipe, target)]
    current = [state for state in states if state.fault is None]
    existing = [state for state in states if state.lock is not None]
    return (current or existing or states)[0]


def read_lock_file(path: Path, parse: Callable[[str, str], T]) -> T | None:
    """Return `parse` applied to the text and the name of `path`, or None when the file does not exist.

    Raises LockError when the file is not readable.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{path}: cannot be read: {error}") from error
    return parse(text, str(path))


def package_changes(
    before: Mapping[str, T], after: Mapping[str, T], version: Callable[[T], str], other: Callable[[T, T], str]
) -> list[str]:
    """Return the changes of an update, one line per package, sorted by name.

    `version` describes a package; if a package's version is unchanged, `other` describes the remaining
    difference, or returns "" when there is none.
    """
    lines: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            lines.append(f"+ {name} {version(after[name])}")
        elif name not in after:
            lines.append(f"- {name} {version(before[name])}")
        elif version(before[name]) != version(after[name]):
            lines.append(f"~ {name} {version(before[name])} -> {version(after[name])}")
        elif said := other(before[name], after[name]):
            lines.append(f"~ {name} {version(after[name])} ({said})")
    return lines


def write_lock_file(path: Path, text: str) -> None:
    """Replace the lock in `path` atomically. Raises LockError when it cannot be written."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise LockError(
            f"{path}: cannot be written: {error.strerror}",
            "copy the recipe's folder to one you may write (./recipes/NAME), which is found first",
        ) from error


def how_to_make(recipe: LoadedRecipe, target: Target, part: str) -> str:
    """Return the hint for a missing or stale lock that may not be created.

    `part` is the option of `envbuild lock` that creates it: wheels, image or conda.
    """
    indexes = recipe.recipe.targets[target.name].indexes if part == "wheels" else ()
    where = f", where {' and '.join(indexes)} can be reached," if indexes else ""
    return f"make it with `{_command(recipe, target, part)}`{where} and commit it"


def _command(recipe: LoadedRecipe, target: Target, part: str) -> str:
    return f"envbuild lock {command_word(recipe)} --target {target.name} --{part}"


def lock_folders(recipe: LoadedRecipe, target: Target) -> list[Path]:
    """Return the folders to search for locks: the recipe's; for a read-only recipe also its own under build/."""
    beside = Path("build") / recipe.recipe.name / target.name
    return [recipe.folder] if _writable(recipe) else [recipe.folder, beside]


def _writable(recipe: LoadedRecipe) -> bool:
    # Recipes inside an installed wheel belong to the installer, even if the file system permits writes.
    installed = shipped_folder().resolve()  # lib64 may be a link to lib
    if installed.parent.name == "_bundled" and installed in recipe.path.resolve().parents:
        return False
    return os.access(recipe.folder, os.W_OK)
