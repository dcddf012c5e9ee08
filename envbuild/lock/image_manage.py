"""Image locks: whether they are current, and how they are renewed."""

from __future__ import annotations

from collections.abc import Callable

from envbuild.environment import Environment
from envbuild.errors import LockError
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
from envbuild.lock.state import (
    LockState,
    how_to_make,
    inspect_lock_file,
    lock_folders,
    write_lock_file,
)
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

Say = Callable[[str], None]


def inspect_image_lock(recipe: LoadedRecipe, target: Target) -> LockState[ImageLock]:
    """Read the target's image lock without changing anything. Raises LockError when it is not readable."""
    name, digest = image_lock_name(target.name), recipe.image_digest(target)
    return inspect_lock_file(
        recipe, target, name, read_image, digest, what="image lock", subject="the recipe's base"
    )


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
            how_to_make(recipe, target),
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
    write_lock_file(path, render_image(new))
    say(f"{path}: {what}, {len(differences)} changed")
    return new
