"""The plan of an artifact from its recipe; missing or stale locks are updated first."""

from __future__ import annotations

from typing import Unpack

from envbuild.environment import Environment
from envbuild.layers.requested import RequestedLayers, bind_to_lock, for_host
from envbuild.layers.trainer import Trainer, load_trainer
from envbuild.lock.conda import CondaLock
from envbuild.lock.format import Lock
from envbuild.lock.lifecycle import ensure
from envbuild.lock.state import LockUse
from envbuild.lock.wheels import wheel_lock
from envbuild.plan.plan import ImageInputs, Plan, make_plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target


def prepare(
    loaded: LoadedRecipe, target: Target, environment: Environment, *,
    artifact: str, compile_bytecode: bool = False, image: ImageInputs | None = None, conda: bool = False,
    layers: RequestedLayers | None = None, **use: Unpack[LockUse],
) -> tuple[Plan, Trainer]:  # fmt: skip
    """Return the plan of `artifact` and its trainer; a missing or stale lock is updated first.

    `conda` says that the artifact consists of the recipe's conda packages. `layers` are its source layers, None for
    those that this host builds.
    """
    layers = layers or for_host(loaded, target, environment)
    lock: Lock | CondaLock
    if conda:
        from envbuild.lock.conda_kind import conda_lock

        lock = ensure(conda_lock(loaded, target), environment, **use)
    else:
        lock = ensure(wheel_lock(loaded, target), environment, **use)
    layers = bind_to_lock(layers, lock)
    trainer = load_trainer()
    plan = make_plan(
        loaded, lock, target, artifact=artifact, trainer_version=trainer.version, trainer_digest=trainer.digest,
        compile_bytecode=compile_bytecode, image=image, sources=layers.sources, host_layers=layers.hosts,
    )  # fmt: skip
    return plan, trainer
