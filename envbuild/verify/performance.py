"""Performance figures of an artifact, read from the launches of its verification; and a launch for the step time."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from envbuild.base.errors import VerificationError
from envbuild.site.tables import FabricTable
from envbuild.verify.launch import Bench, Outcome
from envbuild.verify.model import Report, Settings, Subject
from envbuild.verify.network import network_of
from envbuild.verify.own_trainer import trainer_files
from envbuild.verify.training_checks import log_tail

# Epochs of a launch for the step time alone, of which the fastest counts.
_EPOCHS = 40


def step_seconds(report: Report) -> float:
    """Return the mean time of a step in the fastest epoch: other programs make an epoch slower, and never faster."""
    return min(map(float, report["epoch_seconds"])) / int(report["steps_per_epoch"])


def _startup(outcome: Outcome) -> float:
    """Return the seconds until the artifact's interpreter ran the trainer; 0 if a daemon elsewhere has another clock.

    Both clocks are CLOCK_MONOTONIC.
    """
    seconds = float(outcome.reports[0]["started"]) - outcome.started
    return seconds if seconds <= outcome.seconds else 0.0


def _largest(report: Report, name: str) -> float:
    return max(float(rank[name]) for rank in report["ranks"])


_READERS: dict[str, Callable[[Report, Outcome], float]] = {
    "step_s": lambda report, _: step_seconds(report),
    "import_s": lambda report, _: report["seconds"]["import_torch"],
    "startup_s": lambda _, reference: _startup(reference),
    "peak_memory_bytes": lambda report, _: _largest(report, "peak_memory"),
    "peak_gpu_memory_bytes": lambda report, _: _largest(report, "peak_gpu_memory"),
    "busbw_gbs": lambda report, _: report["bandwidth"][-1]["busbw"],
}


def performance_of(first: Outcome, reference: Outcome) -> dict[str, Any]:
    """Return the figures of the first launch, and of the single process; those that were not measured are left out."""
    found: dict[str, Any] = {}
    if not first.finished or not first.reports:
        return found
    for name, read in _READERS.items():
        # A malformed report is a finding of the checks.
        with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            value = float(read(first.reports[0], reference))
            if math.isfinite(value) and value > 0:
                found[name] = int(value) if name.endswith("_bytes") else round(value, 6)
    with suppress(AttributeError, LookupError, TypeError):
        found |= {"gpu": str(first.reports[0]["ranks"][0]["gpu"])}
    return found


def measure_step(subject: Subject, settings: Settings, env: Mapping[str, str], site: FabricTable) -> float:
    """Run a short training on one node and return its step time in seconds. Raises VerificationError if it fails."""
    settings = replace(settings, nodes=1)
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="step-", dir=env.get("TMPDIR"), ignore_cleanup_errors=True)
        work = Path(stack.enter_context(made))
        nodes = stack.enter_context(subject.nodes(work, 1, env))
        nodes.share(trainer_files())
        network = network_of(subject, nodes, (1, settings.nproc_per_node), env, site)
        running = stack.enter_context(Bench(nodes, work, settings, subject, network, {}).start("step", _EPOCHS))
        outcome = running.wait()
    if not outcome.finished or not outcome.reports:
        raise VerificationError(f"the training failed, exit codes {outcome.returncodes}\n{log_tail(outcome.log)}")
    return step_seconds(outcome.reports[0])
