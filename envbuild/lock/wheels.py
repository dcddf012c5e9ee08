"""The wheel lock of a target."""

from __future__ import annotations

from envbuild.compat.check import check_stack, impossible_pins
from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.lock.accelerator import check_accelerator
from envbuild.lock.format import Lock, changes, lock_file_name, read, render
from envbuild.lock.lifecycle import LockKind, Resolved, Upgrade
from envbuild.lock.resolve import resolve, without
from envbuild.lock.state import write_lock_file
from envbuild.progress import Log
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target


def wheel_lock(recipe: LoadedRecipe, target: Target) -> LockKind[Lock]:
    """Return the kind of lock that holds the target's wheels."""

    def resolved(
        environment: Environment, old: Lock | None, upgrade: Upgrade, offline: bool, log: Log
    ) -> Resolved[Lock]:
        # The recipe's own pins may already be known not to work; this saves the resolution.
        check_stack(recipe, target, None, None)
        keep = None if upgrade is None or old is None else without(old, upgrade)
        try:
            found = resolve(recipe, target, environment, keep=keep, offline=offline)
        except LockError as error:
            message = error.message + impossible_pins(recipe, target)
            raise LockError(message, error.hint) from error
        check_stack(recipe, target, _versions(found.lock), log)
        for note in found.notes:
            log(f"note: {note}")
        return Resolved(found.lock, f"{len(found.lock.packages)} packages", found.pylock)

    def judge(lock: Lock, source: str, log: Log) -> None:
        check_accelerator(target, lock.packages, source)
        check_stack(recipe, target, _versions(lock), log)

    return LockKind(
        recipe, target, part="wheels", name="wheels", title="lock", subject="the recipe",
        task=f"resolving {target.name}", file=lock_file_name(target.name),
        digest=recipe.resolution_digest(target), read=read, resolve=resolved, changes=changes,
        write=lambda path, lock: write_lock_file(path, render(lock)), judge=judge,
        warnings=lambda lock: lock.warnings,
    )  # fmt: skip


def _versions(lock: Lock) -> dict[str, str]:
    return {package.name: package.version for package in lock.packages}
