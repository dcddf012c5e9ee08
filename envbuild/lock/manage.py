"""Where locks lie, whether they are current, and how they are renewed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.files import write_atomically
from envbuild.lock.accelerator import check_accelerator
from envbuild.lock.format import Lock, changes, lock_file_name, read, render
from envbuild.lock.resolve import Resolution, resolve, without
from envbuild.recipe.find import shipped_folder
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LockState:
    """The lock file of one target: where it is, what it holds, and why it is not current (or None)."""

    path: Path
    lock: Lock | None
    fault: str | None


def inspect_lock(recipe: LoadedRecipe, target: Target) -> LockState:
    """Read the target's lock without changing anything. Raises LockError when it is not readable."""
    states = [_judge(recipe, target, folder) for folder in lock_folders(recipe, target)]
    current = [state for state in states if state.fault is None]
    existing = [state for state in states if state.lock is not None]
    return (current or existing or states)[0]


def ensure_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    locked: bool,
    offline: bool,
    say: Say,
) -> Lock:
    """The current lock of `target`; a missing or stale one is made, and said, unless `locked`.

    Raises LockError when `locked` and there is none, or when it cannot be made.
    """
    state = inspect_lock(recipe, target)
    if state.fault is None and state.lock is not None:
        check_accelerator(target, state.lock.packages, str(state.path))
        return state.lock
    if locked:
        raise LockError(
            f"{state.path}: {state.fault}",
            f"make it with `envbuild lock {recipe.recipe.name} --target {target.name}` and commit it",
        )
    say(f"{state.path}: {state.fault}; resolving {target.name} …")
    return update_lock(recipe, target, environment, upgrade=(), offline=offline, say=say).lock


def update_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    upgrade: Collection[str] | None,
    offline: bool,
    say: Say,
    write: bool = True,
) -> Resolution:
    """Resolve anew and write the lock. `upgrade`: None moves every package, names move only those.

    The new file replaces the old one by a rename; what changed is said line by line.
    """
    old = inspect_lock(recipe, target).lock
    keep = None if upgrade is None or old is None else without(old, upgrade)
    resolution = resolve(recipe, target, environment, keep=keep, offline=offline)
    for note in resolution.notes:
        say(f"note: {note}")
    path = _writable_folder(recipe, target) / lock_file_name(target.name)
    differences = changes(old, resolution.lock)
    for line in differences:
        say(f"  {line}")
    if not write:
        say(f"{path}: not written (dry run), {len(differences)} packages would change")
        return resolution
    try:
        write_atomically(path, render(resolution.lock))
    except OSError as error:
        raise LockError(
            f"{path}: cannot be written: {error.strerror}",
            "copy the recipe's folder to one you may write (./recipes/NAME), which is found first",
        ) from error
    say(f"{path}: {len(resolution.lock.packages)} packages, {len(differences)} changed")
    return resolution


def _judge(recipe: LoadedRecipe, target: Target, folder: Path) -> LockState:
    path = folder / lock_file_name(target.name)
    lock = read(path)
    if lock is None:
        return LockState(path, None, "no lock for this target yet")
    if lock.target != target.name or lock.recipe != recipe.recipe.name:
        return LockState(path, None, f"locks {lock.recipe} ({lock.target}) instead")
    if lock.recipe_digest != recipe.resolution_digest(target):
        return LockState(path, lock, "stale: the recipe changed since it was made")
    return LockState(path, lock, None)


def lock_folders(recipe: LoadedRecipe, target: Target) -> list[Path]:
    """Beside the recipe first; a recipe that may not be written has its own locks under build/."""
    beside = Path("build") / recipe.recipe.name / target.name
    return [recipe.folder] if _writable(recipe) else [recipe.folder, beside]


def _writable_folder(recipe: LoadedRecipe, target: Target) -> Path:
    return lock_folders(recipe, target)[-1]


def _writable(recipe: LoadedRecipe) -> bool:
    # Recipes inside an installed wheel belong to the installer, even where the file system allows more.
    installed = shipped_folder()
    if installed.parent.name == "_bundled" and installed in recipe.path.parents:
        return False
    return os.access(recipe.folder, os.W_OK)
