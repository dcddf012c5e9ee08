"""The locked wheels of a plan and those of own code on this host, checked against the plan's target.

Locks are checked when they are written, but a lock may have been edited or written elsewhere.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from envbuild.environment import Environment
from envbuild.errors import BuildError
from envbuild.layers.compose import WheelFile
from envbuild.layers.project import project_wheel
from envbuild.layers.trainer import NAME, Trainer
from envbuild.layers.wheel_facts import note_facts, wheel_facts
from envbuild.lock.format import LockedPackage
from envbuild.plan.plan import Plan
from envbuild.recipe.accelerators import (
    MAX_VERSION_FILE,
    VERSION_FILE,
    accelerator_fault,
    torch_builds,
    torch_libraries,
)
from envbuild.recipe.sources import BuildWheel
from envbuild.recipe.targets import ARCHES, Target


def locate(
    plan: Plan, trainer: Trainer, environment: Environment, offline: bool
) -> tuple[list[WheelFile], list[WheelFile]]:
    """Return the wheels of `plan` in order, and those of own code: the trainer's, and the project's if there is one.

    Raises BuildError for a missing or unsuitable one, RecipeError for a project with the name of another package.
    """
    found = fetch_wheels(plan.packages, environment, plan.indexes, plan.bound, offline=offline)
    wheels = [_wheel(p.name, p.version, path, environment) for p, path in zip(plan.packages, found, strict=True)]
    check_wheels(Target.parse(plan.target), wheels)
    return wheels, own_wheels(plan, trainer, environment, offline)


def known_wheels(plan: Plan, environment: Environment, offline: bool) -> list[WheelFile]:
    """Return the wheels of `plan` in order, for layers: those of which the facts are known are not fetched yet.

    The facts are in the store or in the team's cache. Raises BuildError for a missing or unsuitable wheel.
    """

    def find(one: LockedPackage) -> Path:
        return fetch_wheels([one], environment, plan.indexes, plan.bound, offline=offline)[0]

    store, known = environment.store, {}
    for one, facts in zip(plan.packages, wheel_facts([p.hashes for p in plan.packages], store), strict=True):
        if facts is not None:
            exact = replace(one, hashes=facts[:1])  # a lock may accept several files, and the facts are of one
            known[one.name] = WheelFile(one.name, one.version, partial(find, exact), *facts)
    missing = [one for one in plan.packages if one.name not in known]
    paths = fetch_wheels(missing, environment, plan.indexes, plan.bound, offline=offline)
    for one, path in zip(missing, paths, strict=True):
        wheel = _wheel(one.name, one.version, path, environment)
        torch = _read_torch(path) if one.name == "torch" else None
        known[one.name] = replace(wheel, file_name=path.name, torch=torch)
        note_facts(one.hashes, known[one.name], store)
    wheels = [known[one.name] for one in plan.packages]
    check_wheels(Target.parse(plan.target), wheels)
    return wheels


def own_wheels(plan: Plan, trainer: Trainer, environment: Environment, offline: bool) -> list[WheelFile]:
    """Return the wheels of own code, see `locate`."""
    own = environment.store.put("trainer", trainer.digest.partition(":")[2], trainer.file_name, trainer.wheel)
    last = [_wheel(NAME, trainer.version, own, environment)]
    if (project := project_wheel(plan, environment, offline=offline)) is not None:
        last.append(_wheel(*project, environment))
        check_wheels(Target.parse(plan.target), last)
    return last


def fetch_wheels(
    wheels: Sequence[LockedPackage | BuildWheel], environment: Environment, indexes: Sequence[str] = (),
    bound: Mapping[str, str] = {}, *, offline: bool,
) -> list[Path]:  # fmt: skip
    """Return the files of `wheels`, verified by hash. Raises BuildError if no source has one of them.

    Those in `bound` come from that index of the site.
    """
    from envbuild.store.fetch import WantedWheel, locate_wheels

    wanted = [WantedWheel(one.name, one.version, frozenset(one.hashes)) for one in wheels]
    found = locate_wheels(
        wanted, environment.store, environment.pip, environment.site, indexes,
        bound=bound, offline=offline, env=environment.variables, default_index=environment.default_index,
    )  # fmt: skip
    return [found[one] for one in wanted]


def _wheel(name: str, version: str, path: Path, environment: Environment) -> WheelFile:
    # A wheel in the store is in a folder named by its sha256; that of a find-links file is cached in the store.
    folder = path.parent.name
    of_store = path.parent.parent == environment.store.root / "wheels"
    known = of_store and re.fullmatch(r"[0-9a-f]{64}", folder)
    digest = folder if known else environment.store.file_digest(path)
    return WheelFile(name, version, path, digest, path.stat().st_size)


def check_wheels(target: Target, wheels: Iterable[WheelFile]) -> None:
    """Raise BuildError for a wheel for another processor than `target`'s, and a torch for another accelerator."""
    for wheel in wheels:
        name = wheel.file_name or wheel.path.name
        other = wheel_arch(name)
        if other is not None and other != target.arch:
            raise BuildError(
                f"{name} is for {other}, and {target.name} is for {target.arch}",
                "the lock names a wheel of another platform: make it anew with `envbuild lock`",
            )
        if wheel.name == "torch":
            fault = accelerator_fault(target.name, *(wheel.torch or _read_torch(wheel.path)), exact=True)
            if fault is not None:
                raise BuildError(
                    f"{name}: this torch {fault}",
                    f"correct torch's version in {target.table} and lock it again; "
                    "docs/reference/recipe.md tells which index has which build",
                )


def wheel_arch(name: str) -> str | None:
    """Return the processor in the platform tag (PEP 425) of the wheel file `name`; None for any or an unknown one."""
    platforms = name.removesuffix(".whl").rpartition("-")[2].split(".")
    found = {arch for arch in ARCHES for platform in platforms if platform.endswith(f"_{arch}")}
    return found.pop() if len(found) == 1 else None


def _read_torch(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the accelerators that the torch in a wheel is built for, and its accelerator libraries."""
    try:
        with zipfile.ZipFile(path) as archive:
            names, text = archive.NameToInfo, ""
            if VERSION_FILE in names:
                with archive.open(VERSION_FILE) as stream:
                    text = stream.read(MAX_VERSION_FILE).decode("utf-8", "replace")
            libraries = [n for n in sorted(torch_libraries()) if f"torch/lib/{n}" in names]
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:
        raise BuildError(f"{path} is not a wheel that can be read: {error}") from error
    return torch_builds(text), libraries
