"""The builder's lock in `envbuild lock`: what source-built layers of images are built in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envbuild.cli.common import say
from envbuild.environment import Environment
from envbuild.lock.image_manage import inspect_image_lock
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.lock.image import ImageLock
    from envbuild.lock.state import LockState


def lock_builder(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    wanted: bool,
    upgrade: bool,
    offline: bool,
    write: bool,
) -> None:
    """Renew the builder's lock of a recipe with source-built layers where its images are locked, or are to be."""
    from envbuild.lock.build_base import inspect_build_lock, update_build_lock
    from envbuild.make_layers import declared

    sources = declared(loaded, target).sources
    if not sources or not (wanted or _has_images(loaded, target)):
        return
    state = inspect_build_lock(loaded, target, sources)
    if has_to_renew(state, upgrade=upgrade, offline=offline):
        update_build_lock(loaded, target, sources, environment, say=say, write=write)


def builder_faults(loaded: LoadedRecipe, target: Target) -> list[str]:
    """Why the builder's lock is not current, where there has to be one."""
    from envbuild.lock.build_base import inspect_build_lock
    from envbuild.make_layers import declared

    sources = declared(loaded, target).sources
    if not sources:
        return []
    state = inspect_build_lock(loaded, target, sources)
    if state.fault is None or (state.lock is None and not _has_images(loaded, target)):
        return []
    return [f"{state.path}: {state.fault}"]


def _has_images(loaded: LoadedRecipe, target: Target) -> bool:
    return names_an_image(loaded) or inspect_image_lock(loaded, target).lock is not None


def names_an_image(loaded: LoadedRecipe) -> bool:
    """Whether the recipe says anything of images."""
    return "image" in loaded.document.data


def has_to_renew(state: LockState[ImageLock], *, upgrade: bool, offline: bool) -> bool:
    """Whether the lock of `state` is to be made anew; that --offline forbids it is said."""
    if state.fault is None and not upgrade:
        return False
    if offline:
        say(f"{state.path}: left as it is (--offline)")
    return not offline
