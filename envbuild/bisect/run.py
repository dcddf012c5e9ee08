"""Bisection of two locks of a recipe: mixed environments are built, judged by a metric, and removed again."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.base.atomic import remove
from envbuild.base.errors import BuildError, UsageError, VerificationError
from envbuild.base.progress import Log
from envbuild.base.terminal import clean
from envbuild.bisect.judge import STEP_TIME, Judge
from envbuild.bisect.search import (
    Culprits,
    Difference,
    Group,
    Mix,
    MixState,
    bound,
    differences,
    grouped,
    mixed,
    search,
)
from envbuild.build.folder import make_environment
from envbuild.build.prepare import prepare
from envbuild.contract.kinds import VENV
from envbuild.environment import Environment
from envbuild.layers.trainer import Trainer
from envbuild.layers.wheel import required_by
from envbuild.layers.wheels import fetch_wheels
from envbuild.lock.format import Lock
from envbuild.plan.plan import Plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target

# Measurements of each environment, at most.
_ROUNDS = {STEP_TIME: 40}


@dataclass(frozen=True, slots=True)
class Bisection:
    """Two locks of `loaded` for `target`, of which `good` is good by the `metric` and `bad` is not.

    The metric is STEP_TIME, PASS (the verification), or a command for a shell. Each environment is measured at most
    `rounds` times, None for the default of the metric.
    """

    loaded: LoadedRecipe
    target: Target
    good: Lock
    bad: Lock
    metric: str
    rounds: int | None = None
    offline: bool = False

    @property
    def most(self) -> int:
        """The measurements of an environment, at most."""
        return self.rounds or _ROUNDS.get(self.metric, 1)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of one test: the packages that were those of the bad lock, the state, and the measurements."""

    moved: tuple[str, ...]
    state: MixState
    evidence: Mapping[str, Any]
    seconds: float

    @property
    def text(self) -> str:
        """The state and its evidence, on one line."""
        told = {key: value for key, value in self.evidence.items() if not isinstance(value, list)}
        shown = ", ".join(f"{key} {str(value).strip().splitlines()[-1]}" for key, value in told.items() if value != "")
        return clean(f"{self.state.value} ({shown})" if shown else self.state.value)


@dataclass(frozen=True, slots=True)
class Bisected:
    """The result of a bisection."""

    wanted: Bisection
    groups: Sequence[Group]
    found: Culprits
    tests: Sequence[Judgement]
    packages: int

    def culprits(self) -> list[list[Difference]]:
        """Return the packages that make an environment bad together; those of one list could not be told apart."""
        return [[one for index in sorted(mix) for one in self.groups[index].members] for mix in self.found.groups]

    def of(self, mix: Mix) -> Judgement | None:
        """Return the test of a mix, None if it was not needed."""
        moved = names_of(self.groups, mix)
        return next((one for one in self.tests if one.moved == moved), None)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""

        def row(one: Judgement | None) -> dict[str, Any] | None:
            return (
                None
                if one is None
                else {
                    "moved": one.moved,
                    "state": one.state.value,
                    "evidence": one.evidence,
                    "seconds": round(one.seconds, 3),
                }
            )

        named = [
            [{"name": one.name, "good": one.versions[0], "bad": one.versions[1]} for one in group]
            for group in self.culprits()
        ]
        return {
            "recipe": self.wanted.loaded.recipe.name,
            "target": self.wanted.target.name,
            "metric": self.wanted.metric,
            "packages": self.packages,
            "groups": len(self.groups),
            "builds": len(self.tests),
            "bound": bound(self.packages),
            "reproduced": self.found.reproduced,
            "why": self.found.why,
            "culprits": named,
            "alone": self.found.alone,
            "good": row(self.of(self.found.good)) if self.found.reproduced else None,
            "bad": row(self.of(self.found.bad)) if self.found.reproduced else None,
            "tests": [row(one) for one in self.tests],
        }


def names_of(groups: Sequence[Group], mix: Mix) -> tuple[str, ...]:
    """Return the names of the packages in the groups of `mix`, sorted."""
    return tuple(sorted(one.name for index in mix for one in groups[index].members))


def bisect(wanted: Bisection, environment: Environment, log: Log) -> Bisected:
    """Find the packages by which the environment of the bad lock is bad.

    Raises UsageError for equal locks and for a command that cannot be run, BuildError if one of the locks cannot be
    built.
    """
    differing = differences(wanted.good, wanted.bad)
    if not differing:
        raise UsageError("the locks have the same packages", "compare an older lock, from version control")
    with environment.store.working("bisect") as folder:
        judge = Judge(wanted.metric, wanted.most, environment, log)
        lab = _Lab(wanted, environment, folder, log, differing, judge)
        plan, _ = lab.plan(wanted.good)
        direct = wanted.loaded.requirements(wanted.target, conda=False)
        metadata = _metadata(differing, plan, environment, wanted.offline)
        lab.groups.extend(grouped(differing, metadata, direct, plan.python))
        log(f"{len(differing)} packages differ, in {len(lab.groups)} groups; at most {lab.bound} builds for one group")
        found = search([one.needs for one in lab.groups], len(differing), lab.test)
    return Bisected(wanted, lab.groups, found, lab.tests, len(differing))


def _metadata(
    differing: Sequence[Difference], plan: Plan, environment: Environment, offline: bool
) -> dict[tuple[str, str], list[str]]:
    """Return the requirements of the wheels that differ, by name and version. Raises BuildError."""
    wheels = [two for one in differing for two in (one.good, one.bad) if isinstance(two, LockedPackage)]
    found = {}
    for wheel, path in zip(
        wheels, fetch_wheels(wheels, environment, plan.indexes, plan.bound, offline=offline), strict=True
    ):
        found[wheel.name, wheel.version] = _required_by(path)
    return found


def _required_by(wheel: Path) -> list[str]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(
                one for one in archive.namelist() if one.endswith(".dist-info/METADATA") and one.count("/") == 1
            )
            return required_by(archive, name.partition("/")[0])
    except (OSError, zipfile.BadZipFile, RuntimeError, StopIteration) as error:
        raise BuildError(f"{wheel} is not a wheel that can be read: {error}") from error


@dataclass(slots=True)
class _Lab:
    """The builder and judge of mixed environments in `folder`."""

    wanted: Bisection
    environment: Environment
    folder: Path
    log: Log
    differing: Sequence[Difference]
    judge: Judge
    groups: list[Group] = field(default_factory=list)
    tests: list[Judgement] = field(default_factory=list)

    @property
    def bound(self) -> int:
        return bound(len(self.differing))

    def plan(self, lock: Lock) -> tuple[Plan, Trainer]:
        """Return the plan of a venv of `lock`, whatever the recipe says now, and its trainer."""
        return prepare(
            self.wanted.loaded,
            self.wanted.target,
            self.environment,
            artifact=VENV.name,
            lock=lock,
            locked=True,
            offline=self.wanted.offline,
            log=self.log,
        )

    def test(self, mix: Mix) -> MixState:
        """Build the environment with the groups of `mix` as in the bad lock, and judge it. Raises BuildError."""
        started, moved = time.monotonic(), names_of(self.groups, mix)
        whole = len(mix) in (0, len(self.groups))
        # A build locks the folder around it, and this run holds a lock on `folder` itself.
        path = self.folder / str(len(self.tests)) / "venv"
        lock = mixed(self.wanted.good, self.differing, moved)
        named = {0: "the good lock", len(self.groups): "the bad lock"}.get(
            len(mix), f"{len(moved)} of {len(self.differing)} packages of the bad lock"
        )
        self.log(f"build {len(self.tests) + 1}: {named} …")
        try:
            plan, trainer = self.plan(lock)
            make_environment(VENV, plan, trainer, self.environment, path, offline=self.wanted.offline, verify=False)
            state, evidence = self.judge.of(path, plan)
        except (BuildError, VerificationError) as error:
            if whole:
                raise
            state, evidence = MixState.UNTESTABLE, {"error": error.message}
        finally:
            if not self.judge.keeps(path):
                remove(path)
        self.tests.append(Judgement(moved, state, evidence, time.monotonic() - started))
        self.log(f"build {len(self.tests)}: {self.tests[-1].text}")
        return state


def find_lock(place: Path, target: str) -> Path:
    """Return the lock file that `place` is or, if it is a folder, holds for `target`. Raises UsageError."""
    from envbuild.lock.format import lock_file_name

    path = place / lock_file_name(target) if place.is_dir() else place
    if not os.path.isfile(path):
        raise UsageError(f"{path} is not a lock file", "give a file TARGET.requirements.txt, or the folder with it")
    return path
