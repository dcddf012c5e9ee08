"""Judge the launches of a verification: the checks, their order, and which failures block which checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.verify import fabric_checks, network_checks
from envbuild.verify import training_checks as training
from envbuild.verify.launch import Outcome, TrainingJob
from envbuild.verify.model import Check, blocked
from envbuild.verify.network import Network
from envbuild.verify.subject import Subject


@dataclass(frozen=True, slots=True)
class Launches:
    """The launches of a verification.

    `first` trained with `job` for `half` of `epochs`, `second` continued to the end with `resumed`, `reference`
    is one process. `work` is the folder with their files on this host; `interface` is gloo's. `floor` is the
    bus bandwidth to reach, in GB/s, and `floor_of` tells who set it.
    """

    subject: Subject
    work: Path
    job: TrainingJob
    first: Outcome
    resumed: TrainingJob
    second: Outcome
    reference: Outcome
    half: int
    epochs: int
    tolerance: float
    network: Network
    interface: str
    floor: float
    floor_of: str


def judge_launches(run: Launches) -> list[Check]:
    """Return every check on the launches. A check is blocked if a check that it depends on did not pass."""
    checks: list[Check] = []

    def add(name: str, title: str, make: Callable[[], Check], *needs: str) -> None:
        failed = [check.name for check in checks if check.status != "pass"]
        by = next((need for need in needs if need in failed), None)
        checks.append(blocked(name, title, by) if by else make())

    first, second = run.first, run.second
    snapshot = run.work / "train.pt"
    add("launch", "torchrun on every node", lambda: training.check_launch("launch", "torchrun on every node", [first]))
    add("world", "ranks form the world asked for", lambda: training.check_world(run.job, first.reports), "launch")
    add(
        "versions",
        "interpreter and torch as loaded",
        lambda: training.check_versions(run.subject, first.reports),
        "launch",
    )
    add("fabric", fabric_checks.TITLE, lambda: _fabric(run), "launch", "world")
    if run.network.accelerator.gpu:
        add("libraries", network_checks.LIBRARIES,
            lambda: network_checks.check_libraries(run.subject, run.network.fabric, first.reports[0]),
            "launch", "world")  # fmt: skip
    add(
        "allreduce",
        "all-reduce of known tensors",
        lambda: training.check_allreduce(first.reports[0]),
        "launch",
        "world",
    )
    add("bandwidth", network_checks.BANDWIDTH,
        lambda: network_checks.check_bandwidth(first.reports[0], run.floor, run.floor_of),
        "launch", "world", "allreduce")  # fmt: skip
    add(
        "parameters",
        "parameters bit-equal on all ranks",
        lambda: training.check_parameters(first.reports[0]),
        "launch",
        "world",
    )
    add(
        "snapshot",
        "snapshot written",
        lambda: training.check_snapshot(first.reports[0], snapshot, run.half),
        "launch",
        "world",
    )
    add(
        "relaunch",
        "a second launch",
        lambda: training.check_launch("relaunch", "a second launch", [second]),
        "launch",
        "world",
        "snapshot",
    )
    add(
        "resume",
        "training resumes from the snapshot",
        lambda: training.check_resume(run.resumed, second.reports, run.half, run.epochs),
        "launch",
        "world",
        "snapshot",
        "relaunch",
    )
    add(
        "reference",
        "training in one process",
        lambda: training.check_launch("reference", "training in one process", [run.reference]),
        "launch",
    )

    losses = _losses(checks, first, second)
    add("loss", "loss falls", lambda: training.check_loss_falls(losses), "launch", "world", "resume")
    add("curve", "loss curve equals one process's",
        lambda: training.check_curve(
            losses, training.losses_of(run.reference.reports[0])[: run.epochs], run.tolerance),
        "launch", "world", "parameters", "resume", "reference", "loss")  # fmt: skip
    return checks


def _fabric(run: Launches) -> Check:
    report = run.first.reports[0]
    if not run.network.accelerator.gpu:
        return fabric_checks.check_gloo(run.interface, report)
    logs = fabric_checks.rank_logs(report, run.work)
    # LD_LIBRARY_PATH is left out: it ends in the value of the caller's environment.
    given = {
        name: run.subject.relative(value) for name, value in run.network.variables.items() if name != "LD_LIBRARY_PATH"
    }
    return fabric_checks.check_nccl(run.network.fabric, report, logs, given)


def _losses(checks: Sequence[Check], first: Outcome, second: Outcome) -> list[float]:
    """Return the loss curve of both launches, or of the first alone when the second did not resume it."""
    passed = {check.name for check in checks if check.status == "pass"}
    losses = training.losses_of(first.reports[0]) if {"launch", "world"} <= passed else []
    return losses + training.losses_of(second.reports[0]) if "resume" in passed else losses
