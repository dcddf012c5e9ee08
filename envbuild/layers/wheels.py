"""Locations of the locked wheels of a plan, and of the trainer's wheel, on this host."""

from __future__ import annotations

import re
from pathlib import Path

from envbuild.environment import Environment
from envbuild.layers.accelerator import check_wheels
from envbuild.layers.compose import WheelFile
from envbuild.layers.trainer import NAME, Trainer
from envbuild.plan.plan import Plan
from envbuild.recipe.targets import Target


def locate(plan: Plan, trainer: Trainer, environment: Environment, offline: bool) -> tuple[list[WheelFile], WheelFile]:
    """Return the wheels of `plan` in order, and the trainer's wheel.

    Raises BuildError for a wheel that no source has, and for one that does not match the plan's target.
    """
    from envbuild.store.fetch import WantedWheel, locate_wheels

    wanted = [WantedWheel(p.name, p.version, frozenset(p.hashes)) for p in plan.packages]
    found = locate_wheels(
        wanted, environment.store, environment.pip, environment.site, plan.indexes,
        offline=offline, env=environment.variables, default_index=environment.default_index,
    )  # fmt: skip
    wheels = [_wheel(w.name, w.version, found[w], environment) for w in wanted]
    check_wheels(Target.parse(plan.target), wheels)
    own = environment.store.put("trainer", trainer.digest.partition(":")[2], trainer.file_name, trainer.wheel)
    return wheels, _wheel(NAME, trainer.version, own, environment)


def _wheel(name: str, version: str, path: Path, environment: Environment) -> WheelFile:
    # A wheel in the store is in a folder named by its sha256; that of a find-links file is cached in the store.
    folder = path.parent.name
    of_store = path.parent.parent == environment.store.root / "wheels"
    known = of_store and re.fullmatch(r"[0-9a-f]{64}", folder)
    digest = folder if known else environment.store.file_digest(path)
    return WheelFile(name, version, path, digest, path.stat().st_size)
