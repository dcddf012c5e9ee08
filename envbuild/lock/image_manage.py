"""Image locks: check whether they are current, and update them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from envbuild.debian.lock import DebianLock
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
from envbuild.recipe.model import Recipe
from envbuild.recipe.targets import Target

Log = Callable[[str], None]


def inspect_image_lock(recipe: LoadedRecipe, target: Target) -> LockState[ImageLock]:
    """Read the target's image lock without changing anything. Raises LockError when it is not readable."""
    name, digest = image_lock_name(target.name), recipe.image_digest(target)
    return inspect_lock_file(
        recipe, target, name, read_image, digest,
        part="image", what="image lock", subject="the recipe's base",
    )  # fmt: skip


def ensure_image_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    locked: bool,
    offline: bool,
    log: Log,
    write: bool = True,
) -> ImageLock:
    """Return the current image lock of `target`; resolve a missing or stale one.

    Each resolution is reported through `log`. Without `write` no file is written. Raises LockError when `locked`
    or `offline` and the lock is missing or stale, or when it cannot be resolved.
    """
    state = inspect_image_lock(recipe, target)
    current = current_lock(state, recipe, target, locked=locked, offline=offline)
    if current is not None:
        return current
    log(f"{state.path}: {state.fault}; resolving the base of {target.name} …")
    return update_image_lock(recipe, target, environment, log=log, write=write)


def current_lock(
    state: LockState[ImageLock],
    recipe: LoadedRecipe,
    target: Target,
    *,
    locked: bool,
    offline: bool,
) -> ImageLock | None:
    """Return the lock of `state` if it is current, or None if it must be resolved.

    Raises LockError when `locked` or `offline` forbids to resolve it.
    """
    if state.fault is None and state.lock is not None:
        return state.lock
    if locked or offline:
        why = "" if locked else " and --offline forbids to resolve it"
        raise LockError(f"{state.path}: {state.fault}{why}", how_to_make(recipe, target, "image"))
    return None


def update_image_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    log: Log,
    write: bool = True,
) -> ImageLock:
    """Resolve the base again and write the lock. Each change is reported through `log`, one line each."""
    loaded, digest = recipe.recipe, recipe.image_digest(target)
    old = inspect_image_lock(recipe, target).lock
    base, what = resolve_base(loaded, loaded.image.base, recipe.folder, target, environment)
    new = ImageLock(loaded.name, target.name, digest, base)
    path = lock_folders(recipe, target)[-1] / image_lock_name(target.name)
    put_image_lock(path, old, new, what, log=log, write=write)
    return new


def resolve_base(
    recipe: Recipe, reference: str, folder: Path, target: Target, environment: Environment
) -> tuple[DebianLock | OciLock, str]:
    """Return the lock of the base `reference`, and a one-line description of it. Raises LockError.

    `reference` is "debian", for the recipe's Debian packages, or names an existing image; paths are relative to
    `folder`.
    """
    if reference == "debian":
        debian = resolve_debian(recipe, target, environment)
        return debian, f"{len(debian.packages)} Debian packages of {debian.suite}"
    digest = resolve_digest(reference, target, environment, folder)
    return OciLock(reference, digest), f"{reference} is {digest}"


def put_image_lock(
    path: Path, old: ImageLock | None, new: ImageLock, what: str, *, log: Log, write: bool
) -> None:
    """Report each change through `log`, one line each, and write `new` to `path` unless `write` is false.

    `what` is a one-line description of `new`.
    """
    differences = image_changes(old, new)
    for line in differences if old else ():
        log(f"  {line}")
    if not write:
        log(f"{path}: not written (dry run), {len(differences)} would change")
        return
    write_lock_file(path, render_image(new))
    log(f"{path}: {what}, {len(differences)} changed")
