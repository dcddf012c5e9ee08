"""The image part of `envbuild lock`: the base of a target's images, and the builder of their source-built layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envbuild.cli.common import say
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
    """Make the lock of the base of the target's images, or renew it where it is stale or to be upgraded."""
    if _due(inspect_image_lock(loaded, target), upgrade=upgrade, offline=offline):
        update_image_lock(loaded, target, environment, say=say, write=write)


def lock_builder(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    upgrade: bool,
    offline: bool,
    write: bool,
) -> None:
    """The same for the image in which source-built layers are compiled, where the recipe has any."""
    from envbuild.lock.build_base import inspect_build_lock, update_build_lock
    from envbuild.locks import builder_sources

    sources = builder_sources(loaded, target)
    if not sources:
        return
    if _due(inspect_build_lock(loaded, target, sources), upgrade=upgrade, offline=offline):
        update_build_lock(loaded, target, sources, environment, say=say, write=write)


def _due(state: LockState[ImageLock], *, upgrade: bool, offline: bool) -> bool:
    """Whether the lock of `state` is to be made. Raises LockError where it has to be and --offline forbids it."""
    if offline and state.fault is not None:
        raise LockError(
            f"{state.path}: {state.fault}, and --offline forbids to resolve it",
            "leave --offline out, or lock the rest alone: --wheels, --conda",
        )
    if offline and upgrade:
        say(f"{state.path}: left as it is (--offline)")
    return (state.fault is not None or upgrade) and not offline
