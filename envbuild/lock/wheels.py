"""The wheel lock of a target, and the wheel of NCCL that `[layers.nccl]` puts in the place of the one that torch pins.

torch's libtorch_cuda finds libnccl.so.2 by its DT_RPATH, in nvidia/nccl/lib beside torch. LD_LIBRARY_PATH
therefore does not select another NCCL, but another wheel of the same distribution does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from envbuild.compat.check import check_stack, impossible_pins
from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.lock.accelerator import check_accelerator
from envbuild.lock.format import Lock, changes, lock_file_name, read, render
from envbuild.lock.lifecycle import LockKind, Log, Resolved, Upgrade, write_lock_file
from envbuild.lock.resolve import resolve, without
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
            found = _resolve(recipe, target, environment, keep, offline)
        except LockError as error:
            raise LockError(error.message + impossible_pins(recipe, target), error.hint) from error
        check_stack(recipe, target, found.lock.versions, log)
        for note in found.notes:
            log(f"note: {note}")
        return found

    def judge(lock: Lock, source: str, log: Log) -> None:
        check_accelerator(target, lock.packages, source)
        check_stack(recipe, target, lock.versions, log)

    return LockKind(
        recipe, target, "wheels", lock_file_name(target.name), recipe.resolution_digest(target), read=read,
        resolve=resolved, changes=changes, write=lambda path, lock: write_lock_file(path, render(lock)), judge=judge,
        warnings=lambda lock: lock.warnings,
    )  # fmt: skip


def _resolve(
    recipe: LoadedRecipe, target: Target, environment: Environment, keep: Lock | None, offline: bool
) -> Resolved[Lock]:
    """Resolve `target` as `resolve` does. Also raises LockError when [layers.nccl] cannot replace torch's NCCL."""
    requirements = (*recipe.recipe.requirements, *recipe.recipe.targets[target.name].requirements)
    resolve_it = partial(resolve, recipe, target, environment, requirements, recipe.resolution_digest(target))
    override = nccl_override(recipe, target)
    if override is None:
        return resolve_it(keep=keep, offline=offline)
    # Only a resolution tells which NCCL torch pins, whatever torch's version and index.
    pinned = resolve_it(keep=keep and _without_nccl(keep, target), offline=offline).lock
    check_override(recipe, target, pinned)
    return resolve_it(overrides=[override], keep=_without_nccl(pinned, target), offline=offline)


def nccl_package(target: Target) -> str:
    """Return the distribution with NCCL for a CUDA target: `nvidia-nccl-cu12` (NVIDIA's names on PyPI)."""
    return f"{target.family.nccl_wheel}{target.accelerator[:4]}"


def nccl_override(recipe: LoadedRecipe, target: Target) -> str | None:
    """Return the pin that overrides torch's own in a resolution for `target`, or None if the recipe requests none."""
    version = recipe.nccl_wheel(target)
    return None if version is None else f"{nccl_package(target)}=={version}"


def check_override(recipe: LoadedRecipe, target: Target, pinned: Lock) -> None:
    """Raise LockError when [layers.nccl] cannot replace the NCCL in `pinned`, the resolution without an override.

    That is the case when torch takes no NCCL from PyPI, and when the override is older than torch's pin: torch
    may call functions that an older NCCL lacks.
    """
    from packaging.version import InvalidVersion, Version

    wanted = recipe.nccl_wheel(target)
    assert wanted is not None
    name, where = nccl_package(target), recipe.where("layers", "nccl")
    torch, own = pinned.versions.get("torch"), pinned.versions.get(name)
    if own is None:
        what = f"torch=={torch} brings no {name}" if torch else f"nothing here depends on {name}"
        raise LockError(
            f"{where}: NCCL {wanted} cannot replace anything for {target.name}: {what}",
            "NCCL is inside that wheel or the base image; choose a torch that pins it, or take [layers.nccl] out",
        )
    try:
        older = Version(wanted) < Version(own)
    except InvalidVersion:
        raise LockError(
            f"{where}: {wanted!r} is not a version of {name}", f"write it as PyPI does, for example {own}"
        ) from None
    if older:
        raise LockError(
            f"{where}: NCCL {wanted} is older than {own}, which torch=={torch} pins",
            f'version = "{own}" or newer; without [layers.nccl] it is {own}',
        )


def _without_nccl(lock: Lock, target: Target) -> Lock:
    """Return `lock` without NCCL, whose version the override decides."""
    return replace(lock, packages=tuple(p for p in lock.packages if p.name != nccl_package(target)))
