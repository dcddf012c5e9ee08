"""Judge an environment by a metric: its verification, the step time of a training, or a command of the user.

The step time is compared with that of the bad lock. Both are measured in turn, so that a machine that becomes slower
slows both. Each pair gives the logarithm of the ratio of their times. A sequential probability ratio test (Wald 1945)
decides between two hypotheses: the ratio is 1, or it is the `gap`. The contribution of each pair is bounded, so that no
outlier decides, and the spread is estimated from medians.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from envbuild.base import process
from envbuild.base.errors import UsageError
from envbuild.base.progress import Log
from envbuild.base.terminal import clean
from envbuild.bisect.search import MixState
from envbuild.build.commit import open_subject
from envbuild.build.venv import launch_environment
from envbuild.contract.receipt import FAIL
from envbuild.contract.verification import VerifySettings
from envbuild.environment import Environment
from envbuild.plan.plan import Plan
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
    apart = [abs(one - other) for values in series for one, other in combinations(values, 2)]
    return max(_LEAST_SPREAD, _SHAMOS * statistics.median(apart)) if apart else _LEAST_SPREAD


def is_faster(ratios: Sequence[float], gap: float, spread: float) -> bool | None:
    """Return whether the log `ratios` of slow to tested times are near `gap`, and not near 0; None for more pairs."""
    steps = (gap * (ratio - gap / 2) / spread**2 for ratio in ratios)
    score = sum(max(-_MOST_WEIGHT, min(_MOST_WEIGHT, step)) for step in steps)
    return None if abs(score) < _BOUND else score > 0


def known_gap(ratios: Sequence[float], spread: float) -> float:
    """Return the gap that decided `ratios` show: the lower end of what their median may be."""
    return statistics.median(ratios) - 2 * math.sqrt(math.pi / 2 / len(ratios)) * spread


@dataclass(slots=True)
class Judge:
    """A judge of environments by `metric`, with at most `most` measurements of each.

    `slow` is the environment of the bad lock, to which others are compared by their step time; it is the first that is
    judged. `gap` is the log of the slow-down to look for.
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
        judge: Callable[[], tuple[MixState, dict[str, Any]]]
        if self.metric == PASS:
            subject = open_subject(path, self.environment)
            judge = lambda: self._verify(subject, settings)  # noqa: E731
        else:
            judge = lambda: self._command(path, settings.timeout_s)  # noqa: E731
        for _ in range(self.most):  # one failure of many is enough
            state, evidence = judge()
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
        told = "\n".join(output.splitlines()[-process.TAIL_LINES :])
        if status in _CANNOT_RUN:
            raise UsageError(f"the command cannot be run (exit {status}): {clean(told)}", "correct --metric")
        state = {0: MixState.GOOD, _SKIP: MixState.UNTESTABLE}.get(status, MixState.BAD)
        return state, {"exit": status, "output": told}

    def _compare(self, subject: Subject, settings: VerifySettings) -> tuple[MixState, dict[str, Any]]:
        """Judge an environment by its step time and that of the bad lock, measured in turn; good is faster."""

        def measured(one: Subject) -> float:
            return measure_step(one, settings, self.environment.variables, self.environment.site.fabric)

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
