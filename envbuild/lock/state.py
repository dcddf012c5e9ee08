"""What locks of every kind share: where they lie, whether they are current, how they are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Generic, NotRequired, Protocol, TypedDict, TypeVar

from envbuild.errors import LockError
from envbuild.files import write_atomically
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
    """A lock file of one target: where it is, what it holds, and why it is not current (or None)."""

    path: Path
    lock: L | None
    fault: str | None


class LockUse(TypedDict):
    """How a build comes by a lock that is missing or stale: it is refused if `locked`, else made, `offline` from the
    store, and said; without `write` in memory alone."""

    locked: bool
    offline: bool
    say: Callable[[str], None]
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
    """The best of the files `name` that may be there: one for `digest`, else one that exists.

    `part` is what of `envbuild lock` makes it, `what` the lock's name and `subject` what of the recipe it hangs on, all
    for messages. Raises LockError when a file is not readable.
    """

    def judge(path: Path) -> LockState[L]:
        try:
            lock = read(path)
        except LockError as error:
            if error.hint is None:  # the file may not be opened at all
                raise
            command = (
                f"mv {quote(str(path))} {quote(f'{path}.old')} && {_command(recipe, target, part)}"
            )
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
    """What `parse` makes of the text of `path` and its name, None when there is no such file.

    Raises LockError when it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{path}: cannot be read: {error}") from error
    return parse(text, str(path))


def package_changes(
    before: Mapping[str, T],
    after: Mapping[str, T],
    version: Callable[[T], str],
    other: Callable[[T, T], str],
) -> list[str]:
    """What an update changed, one line a package, in the order of names.

    `version` is what is said of a package; of one whose version stays, `other` says in what it differs, or "".
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
    """Replace the lock in `path` by a rename. Raises LockError when it cannot be written."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise LockError(
            f"{path}: cannot be written: {error.strerror}",
            "copy the recipe's folder to one you may write (./recipes/NAME), which is found first",
        ) from error


def how_to_make(recipe: LoadedRecipe, target: Target, part: str) -> str:
    """The hint for a lock that is missing or stale where none may be made. `part` is the option of `envbuild lock`
    that makes it: wheels, image or conda."""
    indexes = recipe.recipe.targets[target.name].indexes if part == "wheels" else ()
    where = f", where {' and '.join(indexes)} can be reached," if indexes else ""
    return f"make it with `{_command(recipe, target, part)}`{where} and commit it"


def _command(recipe: LoadedRecipe, target: Target, part: str) -> str:
    return f"envbuild lock {command_word(recipe)} --target {target.name} --{part}"


def lock_folders(recipe: LoadedRecipe, target: Target) -> list[Path]:
    """Beside the recipe first; a recipe that may not be written has its own locks under build/."""
    beside = Path("build") / recipe.recipe.name / target.name
    return [recipe.folder] if _writable(recipe) else [recipe.folder, beside]


def _writable(recipe: LoadedRecipe) -> bool:
    # Recipes inside an installed wheel belong to the installer, even where the file system allows more.
    installed = shipped_folder().resolve()  # lib64 may be a link to lib
    if installed.parent.name == "_bundled" and installed in recipe.path.resolve().parents:
        return False
    return os.access(recipe.folder, os.W_OK)
