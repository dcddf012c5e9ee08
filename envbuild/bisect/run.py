"""Bisection of two locks of a recipe: mixed environments are built, judged by a metric, and removed again.

A metric is the verification, the step time of a training, or a command of the user. The step time is compared with the
bad lock's. Both are measured in turn, so that a machine that becomes slower slows both. Each pair gives the logarithm
of the ratio of their times. A sequential probability ratio test (Wald 1945) decides between two hypotheses: the ratio
is 1, or it is the `gap`. The contribution of each pair is bounded, so that no outlier decides, and the spread is
estimated from medians.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from envbuild.base import process
from envbuild.base.atomic import remove
from envbuild.base.errors import BuildError, UsageError, VerificationError
from envbuild.base.progress import Log, clean
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
from envbuild.build.commit import open_subject
from envbuild.build.folder import make_environment
from envbuild.build.prepare import prepare
from envbuild.build.venv import launch_environment
from envbuild.contract.kinds import VENV
from envbuild.contract.receipt import FAIL
from envbuild.contract.verification import VerifySettings
from envbuild.environment import Environment
from envbuild.layers.wheel import Trainer, required_by
from envbuild.layers.wheels import fetch_wheels
from envbuild.lock.format import Lock
from envbuild.plan import Plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.verify.model import Subject
from envbuild.verify.run import measure_step, verify

# The smallest slow-down to look for, and the probability of a wrong decision if the noise is normal.
LEAST = 0.10
_ERROR = 1e-5
_BOUND = math.log((1 - _ERROR) / _ERROR)
# The largest contribution of a pair: at least six pairs decide.
_MOST_WEIGHT = _BOUND / 5.5
# The least spread of a pair that is believed, of 5 % noise in each measurement: few values may look alike by chance.
_LEAST_SPREAD = 0.05 * math.sqrt(2)
# The standard deviation of a normal distribution, by the median distance of two of its values.
_SHAMOS = 1.0483
STEP_TIME, PASS = "step_time", "pass"
# Exit codes of a command with a meaning of their own, as for `git bisect run`.
_SKIP, _CANNOT_RUN = 125, (126, 127)
# Bytes of a command's output, from its end, of which the last lines are told.
_MOST_TOLD = 1 << 16


def spread_of(series: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of the log ratios within each series, by the median of all differences (Shamos)."""
    apart = [abs(value - other) for values in series for value, other in combinations(values, 2)]
    return max(_LEAST_SPREAD, _SHAMOS * statistics.median(apart)) if apart else _LEAST_SPREAD


def is_faster(ratios: Sequence[float], gap: float, spread: float) -> bool | None:
    """Return whether the log `ratios` of slow to tested times are near `gap`, and not near 0; None for more pairs."""
    steps = (gap * (ratio - gap / 2) / spread**2 for ratio in ratios)
    score = sum(max(-_MOST_WEIGHT, min(_MOST_WEIGHT, step)) for step in steps)
    return None if abs(score) < _BOUND else score > 0


def known_gap(ratios: Sequence[float], spread: float) -> float:
    """Return the gap that decided `ratios` show: the lower confidence bound of their median."""
    return statistics.median(ratios) - 2 * math.sqrt(math.pi / 2 / len(ratios)) * spread


@dataclass(slots=True)
class Judge:
    """A judge of environments by `metric`, with at most `most` measurements of each.

    `slow` is the environment of the bad lock, with which the step times of others are compared; it is judged first.
    `gap` is the log of the slow-down to look for.
    """

    metric: str
    most: int
    environment: Environment
    log: Log
    slow: Subject | None = None
    gap: float = math.log(1 + LEAST)
    ratios: list[list[float]] = field(default_factory=list)

    def keeps(self, path: Path) -> bool:
        """Return whether the environment at `path` is needed for the tests that follow."""
        return self.slow is not None and self.slow.root == path

    def of(self, path: Path, plan: Plan) -> tuple[MixState, dict[str, Any]]:
        """Return the state of the environment at `path`, and the measurements.

        Raises VerificationError if it cannot be measured, UsageError for a command that cannot be run.
        """
        settings = plan.verify
        if self.metric == STEP_TIME:
            return self._compare(open_subject(path, self.environment), settings)
        subject = open_subject(path, self.environment) if self.metric == PASS else None
        for _ in range(self.most):  # one failure of many is enough
            state, evidence = self._verify(subject, settings) if subject else self._command(path, settings.timeout_s)
            if state is not MixState.GOOD:
                break
        return state, evidence

    def _verify(self, subject: Subject, settings: VerifySettings) -> tuple[MixState, dict[str, Any]]:
        verdict = verify(subject, settings, self.environment.site, self.environment.variables, self.log)
        failed = {check.name: check.seen for check in verdict.checks if check.status == FAIL}
        return (MixState.GOOD if verdict.passed else MixState.BAD), {**failed}

    def _command(self, path: Path, timeout_s: float) -> tuple[MixState, dict[str, Any]]:
        variables = launch_environment(path, self.environment.variables)
        # No pipe: a process that the command left in the background would hold it open.
        with tempfile.TemporaryFile() as written:
            child = process.start(
                ["/bin/sh", "-c", self.metric], env=variables, stdout=written.fileno(), stderr=subprocess.STDOUT
            )
            try:
                status = child.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return MixState.BAD, {"exit": f"none after {timeout_s:g} s"}
            finally:
                process.stop([child])
            written.seek(max(0, written.seek(0, os.SEEK_END) - _MOST_TOLD))
            output = written.read().decode(errors="replace")
        output_tail = "\n".join(output.splitlines()[-process.TAIL_LINES :])
        if status in _CANNOT_RUN:
            raise UsageError(f"the command cannot be run (exit {status}): {clean(output_tail)}", "correct --metric")
        state = {0: MixState.GOOD, _SKIP: MixState.UNTESTABLE}.get(status, MixState.BAD)
        return state, {"exit": status, "output": output_tail}

    def _compare(self, subject: Subject, settings: VerifySettings) -> tuple[MixState, dict[str, Any]]:
        """Judge an environment by its step time and the bad lock's, measured in turn; a faster environment is good."""

        def measured(artifact: Subject) -> float:
            return measure_step(artifact, settings, self.environment.variables, self.environment.site.fabric)

        if self.slow is None:
            self.slow = subject
            return MixState.BAD, {"step_s": [measured(subject)]}
        tested, reference, ratios = list[float](), list[float](), list[float]()
        self.ratios.append(ratios)
        faster = None
        while faster is None and len(ratios) < self.most:
            reference.append(measured(self.slow))
            tested.append(measured(subject))
            ratios.append(math.log(reference[-1] / tested[-1]))
            self.log(f"  step: {1000 * reference[-1]:.2f} ms by the bad lock, {1000 * tested[-1]:.2f} ms by this one")
            faster = is_faster(ratios, self.gap, spread_of(self.ratios))
        middle = statistics.median(ratios)
        evidence = {
            "step_s": tested,
            "bad_step_s": reference,
            "pairs": len(ratios),
            "bad lock / this one": f"{math.exp(middle):.3f}",
        }
        if faster is None:
            return MixState.UNTESTABLE, {**evidence, "unclear after": f"{len(ratios)} measurements"}
        if faster:  # the slow-down to look for is known from now on
            self.gap = max(self.gap, known_gap(ratios, spread_of(self.ratios)))
        return (MixState.GOOD if faster else MixState.BAD), evidence


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
        """The maximum number of measurements of an environment."""
        return self.rounds or _ROUNDS.get(self.metric, 1)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of one test: the packages taken from the bad lock, the state, and the measurements."""

    moved: tuple[str, ...]
    state: MixState
    evidence: Mapping[str, Any]
    seconds: float

    @property
    def text(self) -> str:
        """The state and its evidence, on one line."""
        shown_evidence = {key: value for key, value in self.evidence.items() if not isinstance(value, list)}
        shown = ", ".join(
            f"{key} {str(value).strip().splitlines()[-1]}" for key, value in shown_evidence.items() if value != ""
        )
        return clean(f"{self.state.value} ({shown})" if shown else self.state.value)


@dataclass(frozen=True, slots=True)
class Bisected:
    """The result of a bisection."""

    bisection: Bisection
    groups: Sequence[Group]
    outcome: Culprits
    tests: Sequence[Judgement]
    packages: int

    def culprits(self) -> list[list[Difference]]:
        """Return the packages that together make an environment bad; packages in one list could not be tested apart."""
        return [
            [difference for index in sorted(mix) for difference in self.groups[index].members]
            for mix in self.outcome.groups
        ]

    def of(self, mix: Mix) -> Judgement | None:
        """Return the test of a mix, None if it was not needed."""
        moved = names_of(self.groups, mix)
        return next((judgement for judgement in self.tests if judgement.moved == moved), None)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""

        def row(test: Judgement | None) -> dict[str, Any] | None:
            if test is None:
                return None
            measured = {"evidence": test.evidence, "seconds": round(test.seconds, 3)}
            return {"moved": test.moved, "state": test.state.value, **measured}

        named = [
            [
                {"name": difference.name, "good": difference.versions[0], "bad": difference.versions[1]}
                for difference in group
            ]
            for group in self.culprits()
        ]
        return {
            "recipe": self.bisection.loaded.recipe.name,
            "target": self.bisection.target.name,
            "metric": self.bisection.metric,
            "packages": self.packages,
            "groups": len(self.groups),
            "builds": len(self.tests),
            "bound": bound(self.packages),
            "reproduced": self.outcome.reproduced,
            "why": self.outcome.why,
            "culprits": named,
            "alone": self.outcome.alone,
            "good": row(self.of(self.outcome.good)) if self.outcome.reproduced else None,
            "bad": row(self.of(self.outcome.bad)) if self.outcome.reproduced else None,
            "tests": [row(judgement) for judgement in self.tests],
        }


def names_of(groups: Sequence[Group], mix: Mix) -> tuple[str, ...]:
    """Return the names of the packages in the groups of `mix`, sorted."""
    return tuple(sorted(difference.name for index in mix for difference in groups[index].members))


def bisect(bisection: Bisection, environment: Environment, log: Log) -> Bisected:
    """Find the packages that make the environment of the bad lock bad.

    Raises UsageError for equal locks and for a command that cannot be run, BuildError if one of the locks cannot be
    built.
    """
    differing = differences(bisection.good, bisection.bad)
    if not differing:
        raise UsageError("the locks have the same packages", "compare an older lock, from version control")
    with environment.store.working("bisect") as folder:
        judge = Judge(bisection.metric, bisection.most, environment, log)
        lab = _Lab(bisection, environment, folder, log, differing, judge)
        plan, _ = lab.plan(bisection.good)
        direct = bisection.loaded.requirements(bisection.target, conda=False)
        metadata = _metadata(differing, plan, environment, bisection.offline)
        lab.groups.extend(grouped(differing, metadata, direct, plan.python))
        log(f"{len(differing)} packages differ, in {len(lab.groups)} groups; at most {lab.bound} builds for each group")
        culprits = search([group.needs for group in lab.groups], len(differing), lab.test)
    return Bisected(bisection, lab.groups, culprits, lab.tests, len(differing))


def _metadata(
    differing: Sequence[Difference], plan: Plan, environment: Environment, offline: bool
) -> dict[tuple[str, str], list[str]]:
    """Return the requirements of the wheels that differ, by name and version. Raises BuildError."""
    wheels = [
        two for difference in differing for two in (difference.good, difference.bad) if isinstance(two, LockedPackage)
    ]
    requirements = {}
    for wheel, path in zip(
        wheels, fetch_wheels(wheels, environment, plan.indexes, plan.bound, offline=offline), strict=True
    ):
        requirements[wheel.name, wheel.version] = _required_by(path)
    return requirements


def _required_by(wheel: Path) -> list[str]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(
                name for name in archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1
            )
            return required_by(archive, name.partition("/")[0])
    except (OSError, zipfile.BadZipFile, RuntimeError, StopIteration) as error:
        raise BuildError(f"{wheel} is not a wheel that can be read: {error}") from error


@dataclass(slots=True)
class _Lab:
    """The builder and judge of mixed environments in `folder`."""

    bisection: Bisection
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
        """Return the plan of a venv from `lock`, even if it is not the recipe's lock, and its trainer."""
        return prepare(
            self.bisection.loaded,
            self.bisection.target,
            self.environment,
            artifact=VENV.name,
            lock=lock,
            locked=True,
            offline=self.bisection.offline,
            log=self.log,
        )

    def test(self, mix: Mix) -> MixState:
        """Build the environment with the groups of `mix` as in the bad lock, and judge it. Raises BuildError."""
        started, moved = time.monotonic(), names_of(self.groups, mix)
        whole = len(mix) in (0, len(self.groups))
        # A build locks the folder around it, and this run holds a lock on `folder` itself.
        path = self.folder / str(len(self.tests)) / "venv"
        lock = mixed(self.bisection.good, self.differing, moved)
        named = {0: "the good lock", len(self.groups): "the bad lock"}.get(
            len(mix), f"{len(moved)} of {len(self.differing)} packages of the bad lock"
        )
        self.log(f"build {len(self.tests) + 1}: {named} …")
        try:
            plan, trainer = self.plan(lock)
            make_environment(VENV, plan, trainer, self.environment, path, offline=self.bisection.offline, verify=False)
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
