"""Wheel lock of a target: read, check and resolve it."""

from __future__ import annotations

from envbuild.base.errors import LockError
from envbuild.base.progress import Log
from envbuild.environment import Environment
from envbuild.lock.format import Lock, changes, lock_file_name, read, render
from envbuild.lock.judge import check_accelerator, check_devices, check_stack, impossible_pins
from envbuild.lock.lifecycle import LockKind, Resolved, Upgrade, kept_time, lock_folders, write_lock_file
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target


def wheel_lock(recipe: LoadedRecipe, target: Target) -> LockKind[Lock]:
    """Return the LockKind of the target's wheels."""

    def resolved(
        environment: Environment, old: Lock | None, upgrade: Upgrade, offline: bool, log: Log
    ) -> Resolved[Lock]:
        # Imported here: a build whose lock is current starts without the resolver and the sources of archives.
        from envbuild.lock.resolve import resolve_recipe, without

        # The recipe's own pins may already be known not to work; this saves the resolution.
        check_stack(recipe, target, None, None)
        as_of = kept_time(old, recipe.resolution_digest(target), upgrade)
        if old is None and recipe.variant:  # versions do not differ between Pythons without need
            old = next(
                filter(None, (read(folder / lock_file_name(target.name)) for folder in lock_folders(recipe, target))),
                None,
            )
            as_of = old.as_of if old and upgrade is not None else ""
        keep = None if upgrade is None or old is None else without(old, upgrade)
        try:
            resolution = resolve_recipe(recipe, target, environment, keep, offline, as_of)
        except LockError as error:
            raise LockError(error.message + impossible_pins(recipe, target), error.hint) from error
        check_devices(recipe, target, resolution.lock.packages)
        check_stack(recipe, target, resolution.lock.versions, log)
        for note in (*resolution.limits, *resolution.notes):
            log(note)
        return resolution

    def judge(lock: Lock, source: str, log: Log) -> None:
        check_accelerator(target, lock.packages, source)
        check_devices(recipe, target, lock.packages)
        check_stack(recipe, target, lock.versions, log)

    return LockKind(
        recipe,
        target,
        "wheels",
        lock_file_name(target.name, recipe.variant),
        recipe.resolution_digest(target),
        read=read,
        resolve=resolved,
        changes=changes,
        write=lambda path, lock: write_lock_file(path, render(lock)),
        judge=judge,
        warnings=lambda lock: lock.warnings,
    )
