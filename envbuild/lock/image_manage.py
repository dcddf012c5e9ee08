"""Where image locks lie, whether they are current, and how they are renewed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.files import write_atomically
from envbuild.lock.base_debian import resolve_debian
from envbuild.lock.base_oci import resolve_digest
from envbuild.lock.image import (
    ImageLock,
    OciLock,
    image_changes,
    image_lock_name,
    read_image,
    render_image,
)
from envbuild.lock.manage import lock_folders
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ImageLockState:
    """The image lock of one target: where it is, what it holds, and why it is not current (or None)."""

    path: Path
    lock: ImageLock | None
    fault: str | None


def inspect_image_lock(recipe: LoadedRecipe, target: Target) -> ImageLockState:
    """Read the target's image lock without changing anything. Raises LockError when it is not readable."""
    states = [_judge(recipe, target, folder) for folder in lock_folders(recipe, target)]
    current = [state for state in states if state.fault is None]
    existing = [state for state in states if state.lock is not None]
    return (current or existing or states)[0]


def ensure_image_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    locked: bool,
    offline: bool,
    say: Say,
) -> ImageLock:
    """The current image lock of `target`; a missing or stale one is made, and said, unless `locked`.

    Raises LockError when `locked` and there is none, or when it cannot be made.
    """
    state = inspect_image_lock(recipe, target)
    if state.fault is None and state.lock is not None:
        return state.lock
    if locked or offline:
        why = "" if locked else " and --offline forbids to resolve it"
        raise LockError(
            f"{state.path}: {state.fault}{why}",
            f"make it with `envbuild lock {recipe.recipe.name} --target {target.name}` and commit it",
        )
    say(f"{state.path}: {state.fault}; resolving the base of {target.name} …")
    return update_image_lock(recipe, target, environment, say=say)


def update_image_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    say: Say,
    write: bool = True,
) -> ImageLock:
    """Resolve the base anew and write the lock; what changed is said line by line."""
    old = inspect_image_lock(recipe, target).lock
    image = recipe.recipe.image
    if image.base == "debian":
        base = resolve_debian(recipe.recipe, target, environment)
        new = ImageLock(recipe.recipe.name, target.name, recipe.image_digest(target), base)
        what = f"{len(base.packages)} Debian packages of {base.suite}"
    else:
        digest = resolve_digest(image.base, target, environment, recipe.folder)
        oci = OciLock(image.base, digest)
        new = ImageLock(recipe.recipe.name, target.name, recipe.image_digest(target), oci)
        what = f"{image.base} is {digest}"
    path = lock_folders(recipe, target)[-1] / image_lock_name(target.name)
    differences = image_changes(old, new)
    for line in differences if old else ():
        say(f"  {line}")
    if not write:
        say(f"{path}: not written (dry run), {len(differences)} would change")
        return new
    try:
        write_atomically(path, render_image(new))
    except OSError as error:
        raise LockError(
            f"{path}: cannot be written: {error.strerror}",
            "copy the recipe's folder to one you may write (./recipes/NAME), which is found first",
        ) from error
    say(f"{path}: {what}, {len(differences)} changed")
    return new


def _judge(recipe: LoadedRecipe, target: Target, folder: Path) -> ImageLockState:
    path = folder / image_lock_name(target.name)
    lock = read_image(path)
    if lock is None:
        return ImageLockState(path, None, "no image lock for this target yet")
    if lock.target != target.name or lock.recipe != recipe.recipe.name:
        return ImageLockState(path, None, f"locks {lock.recipe} ({lock.target}) instead")
    if lock.recipe_digest != recipe.image_digest(target):
        return ImageLockState(path, lock, "stale: the recipe's base changed since it was made")
    return ImageLockState(path, lock, None)
