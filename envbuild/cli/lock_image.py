"""The image part of `envbuild lock`: the base of a target's images, and the builder image of their source layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envbuild.cli.common import log
from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.lock.image_manage import inspect_image_lock, update_image_lock
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.lock.image import ImageLock
    from envbuild.lock.state import LockState


def lock_base(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    upgrade: bool,
    offline: bool,
    write: bool,
) -> None:
    """Update the lock of the base of the target's images if it is missing, stale or to be upgraded."""
    if _due(inspect_image_lock(loaded, target), upgrade=upgrade, offline=offline):
        update_image_lock(loaded, target, environment, log=log, write=write)


def lock_builder(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    upgrade: bool,
    offline: bool,
    write: bool,
) -> None:
    """Update the lock of the builder image, like `lock_base`, if the recipe has source layers."""
    from envbuild.lock.build_base import inspect_build_lock, update_build_lock
    from envbuild.locks import builder_sources

    sources = builder_sources(loaded, target)
    if not sources:
        return
    if _due(inspect_build_lock(loaded, target, sources), upgrade=upgrade, offline=offline):
        update_build_lock(loaded, target, sources, environment, log=log, write=write)


def _due(state: LockState[ImageLock], *, upgrade: bool, offline: bool) -> bool:
    """Return whether the lock of `state` must be made. Raises LockError if it must but --offline forbids it."""
    if offline and state.fault is not None:
        raise LockError(
            f"{state.path}: {state.fault}, and --offline forbids to resolve it",
            "leave --offline out, or lock the rest alone: --wheels, --conda",
        )
    if offline and upgrade:
        log(f"{state.path}: left as it is (--offline)")
    return (state.fault is not None or upgrade) and not offline
