"""Wheel locks: check whether they are current, and update them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from envbuild.compat.check import check_stack, impossible_pins
from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.lock.accelerator import check_accelerator
from envbuild.lock.format import Lock, changes, lock_file_name, read, render
from envbuild.lock.resolve import Resolution, resolve, without
from envbuild.lock.state import (
    LockState,
    how_to_make,
    inspect_lock_file,
    lock_folders,
    write_lock_file,
)
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

Log = Callable[[str], None]


def inspect_lock(recipe: LoadedRecipe, target: Target) -> LockState[Lock]:
    """Read the target's lock without changing anything. Raises LockError when it is not readable."""
    name, digest = lock_file_name(target.name), recipe.resolution_digest(target)
    return inspect_lock_file(
        recipe, target, name, read, digest, part="wheels", what="lock", subject="the recipe"
    )


def ensure_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    locked: bool,
    offline: bool,
    log: Log,
    write: bool = True,
) -> Lock:
    """Return the current lock of `target`; resolve a missing or stale one.

    Each resolution is reported through `log`. Without `write` no file is written. Raises LockError when `locked`
    and the lock is missing or stale, when it cannot be resolved, or when its packages are known not to work with
    the recipe's layers or with each other.
    """
    state = inspect_lock(recipe, target)
    if state.fault is None and state.lock is not None:
        check_lock(recipe, target, state.lock, str(state.path), log)
        say_warnings(state.lock, log)
        return state.lock
    if locked:
        raise LockError(f"{state.path}: {state.fault}", how_to_make(recipe, target, "wheels"))
    log(f"{state.path}: {state.fault}; resolving {target.name} …")
    return update_lock(
        recipe, target, environment, upgrade=(), offline=offline, log=log, write=write
    ).lock


def check_lock(recipe: LoadedRecipe, target: Target, lock: Lock, source: str, log: Log) -> None:
    """Raise LockError when `lock` has a torch for another accelerator, or a combination known not to work.

    `source` is the file that `lock` was read from.
    """
    check_accelerator(target, lock.packages, source)
    check_stack(recipe, target, _versions(lock), log)


def update_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    upgrade: Collection[str] | None,
    offline: bool,
    log: Log,
    write: bool = True,
) -> Resolution:
    """Resolve again and write the lock. With `upgrade` None every package may change, otherwise only the named ones.

    The file is replaced atomically. Each change is reported through `log`, one line each. Raises LockError when
    no packages satisfy the recipe, or when the result is known not to work.
    """
    # The recipe's own pins may already be known not to work; this saves the resolution.
    check_stack(recipe, target, None, None)
    old = inspect_lock(recipe, target).lock
    keep = None if upgrade is None or old is None else without(old, upgrade)
    try:
        resolution = resolve(recipe, target, environment, keep=keep, offline=offline)
    except LockError as error:
        raise LockError(error.message + impossible_pins(recipe, target), error.hint) from error
    check_stack(recipe, target, _versions(resolution.lock), log)
    for note in resolution.notes:
        log(f"note: {note}")
    say_warnings(resolution.lock, log)
    path = lock_folders(recipe, target)[-1] / lock_file_name(target.name)
    differences = changes(old, resolution.lock)
    for line in differences:
        log(f"  {line}")
    if not write:
        log(f"{path}: not written (dry run), {len(differences)} packages would change")
        return resolution
    write_lock_file(path, render(resolution.lock))
    log(f"{path}: {len(resolution.lock.packages)} packages, {len(differences)} changed")
    return resolution


def say_warnings(lock: Lock, log: Log) -> None:
    """Report each warning of the resolution of `lock` through `log`, one line each."""
    for warning in lock.warnings:
        log(f"warning: {lock.target}: {warning}")


def _versions(lock: Lock) -> dict[str, str]:
    return {package.name: package.version for package in lock.packages}
