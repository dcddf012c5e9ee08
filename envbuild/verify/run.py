"""Verify an artifact: train in it over several simulated nodes and judge what happened."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.verify import training_checks as training
from envbuild.verify.faults import RESTART_TITLE, Killer, check_restart
from envbuild.verify.launch import Job, Outcome, Running, start_job
from envbuild.verify.model import FAIL, Check, blocked
from envbuild.verify.nodes import Nodes
from envbuild.verify.static_checks import check_architecture, check_installed
from envbuild.verify.subject import Subject

Say = Callable[[str], None]
# Long enough that a rank can be killed in the middle of it, on a fast machine too.
_FAULT_EPOCHS = 40
_STEPS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """How to verify: the recipe's [verify] table, or the command line's word over it."""

    nodes: int = 2
    nproc_per_node: int = 2
    epochs: int = 6
    batch_size: int = 32
    model: str = "mlp"
    timeout_s: float = 600
    loss_tolerance: float = 1e-4
    faults: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """All checks, in order. `logs` is the folder of the nodes' logs, kept only after a failure."""

    checks: tuple[Check, ...]
    settings: Settings
    seconds: float
    logs: Path | None

    @property
    def passed(self) -> bool:
        return all(check.status == "pass" for check in self.checks)


def verify(
    subject: Subject,
    settings: Settings,
    env: Mapping[str, str],
    say: Say,
    *,
    logs: Path | None = None,
) -> Verdict:
    """Run every check on `subject`; `logs` is where the nodes' logs are kept when one fails."""
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="envbuild-verify-"))
    try:
        with subject.nodes(work, settings.nodes, env) as nodes:
            checks = _checks(subject, settings, _Bench(nodes, work, settings, subject), say)
        failed = any(check.status == FAIL for check in checks)
        kept = _keep(work, logs) if failed and logs else None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Verdict(tuple(checks), settings, time.monotonic() - started, kept)


@dataclass(frozen=True, slots=True)
class _Bench:
    """Where and how this verification trains. `work` is the folder on this host."""

    nodes: Nodes
    work: Path
    settings: Settings
    subject: Subject

    def start(
        self,
        name: str,
        epochs: int,
        *,
        nodes: int | None = None,
        snapshot: str | None = None,
        max_restarts: int = 0,
    ) -> Running:
        """Start the trainer. One process (`nodes` 0) takes the whole global batch of all ranks."""
        settings = self.settings
        world = settings.nodes * settings.nproc_per_node
        batch = settings.batch_size * (world if nodes == 0 else 1)
        arguments: tuple[str, ...] = (
            str(epochs), "1" if max_restarts else str(epochs),
            "--batch_size", str(batch), "--model", settings.model,
            "--dataset_size", str(settings.batch_size * world * _STEPS),
            "--checkpoint_path", str(self.nodes.work / f"{snapshot or name}.pt"),
        )  # fmt: skip
        if not self.subject.target.is_cuda:
            arguments += ("--backend", "gloo")
        job = Job(
            name,
            arguments,
            nodes=settings.nodes if nodes is None else nodes,
            nproc_per_node=settings.nproc_per_node,
            timeout_s=settings.timeout_s,
            max_restarts=max_restarts,
        )
        return start_job(job, self.nodes, self.work)


def _checks(subject: Subject, settings: Settings, bench: _Bench, say: Say) -> list[Check]:
    half = max(1, settings.epochs // 2)
    say(
        f"training on {settings.nodes} simulated nodes × {settings.nproc_per_node} "
        f"ranks, {settings.epochs} epochs, beside one process as reference …"
    )
    reference = bench.start("reference", _reference_epochs(settings), nodes=0)
    with reference:
        with bench.start("train", half) as first:
            survey = subject.survey(bench.nodes)
            checks = [check_installed(subject, survey), check_architecture(subject, survey)]
            first_outcome = first.wait()
        reference_outcome = reference.wait()
    second = first_outcome
    if first_outcome.finished:  # else all that follows is blocked, and not worth the waiting
        say(f"resuming from the snapshot of epoch {half} …")
        second = bench.start("resume", settings.epochs, snapshot="train").wait()
    checks += _training_checks(
        subject, settings, bench.work, half, [first_outcome, second], first.job, reference_outcome
    )
    if settings.faults and first_outcome.finished:
        say("killing a rank in the middle of training …")
        checks.append(_fault_check(bench, reference_outcome))
    elif settings.faults:
        checks.append(blocked("restart", RESTART_TITLE, "launch"))
    return checks


def _training_checks(
    subject: Subject,
    settings: Settings,
    work: Path,
    half: int,
    outcomes: list[Outcome],
    job: Job,
    reference: Outcome,
) -> list[Check]:
    """Judge the launches. A check that a failed one makes meaningless is blocked by it."""
    checks: list[Check] = []

    def add(name: str, title: str, make: Callable[[], Check], *needs: str) -> None:
        failed = [check.name for check in checks if check.status != "pass"]
        by = next((need for need in needs if need in failed), None)
        checks.append(blocked(name, title, by) if by else make())

    first, second = outcomes
    snapshot = work / "train.pt"
    add(
        "launch",
        "torchrun on every node",
        lambda: training.check_launch("launch", "torchrun on every node", [first]),
    )
    add(
        "world",
        "ranks form the world asked for",
        lambda: training.check_world(job, first.reports),
        "launch",
    )
    add(
        "versions",
        "interpreter and torch as loaded",
        lambda: training.check_versions(subject, first.reports),
        "launch",
    )
    add(
        "allreduce",
        "all-reduce of known tensors",
        lambda: training.check_allreduce(first.reports[0]),
        "launch",
        "world",
    )
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
        lambda: training.check_snapshot(first.reports[0], snapshot, half),
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
        lambda: training.check_resume(second.reports[0], half, settings.epochs),
        "launch",
        "world",
        "snapshot",
        "relaunch",
    )
    add(
        "reference",
        "training in one process",
        lambda: training.check_launch("reference", "training in one process", [reference]),
        "launch",
    )

    losses = _losses(checks, first, second)
    add(
        "loss", "loss falls", lambda: training.check_loss_falls(losses), "launch", "world", "resume"
    )
    add("curve", "loss curve equals one process's",
        lambda: training.check_curve(
            losses, training.losses_of(reference.reports[0])[: settings.epochs], settings.loss_tolerance),
        "launch", "world", "parameters", "resume", "reference", "loss")  # fmt: skip
    return checks


def _losses(checks: list[Check], first: Outcome, second: Outcome) -> list[float]:
    """The curve over both launches; of the first alone when the second did not continue it."""
    passed = {check.name for check in checks if check.status == "pass"}
    losses = training.losses_of(first.reports[0]) if {"launch", "world"} <= passed else []
    return losses + training.losses_of(second.reports[0]) if "resume" in passed else losses


def _fault_check(bench: _Bench, reference: Outcome) -> Check:
    settings = bench.settings
    running = bench.start("faults", _reference_epochs(settings), max_restarts=3)
    killer = Killer(rank=running.job.world_size - 1)
    outcome = running.wait(killer)
    losses = (
        training.losses_of(reference.reports[0]) if reference.finished and reference.reports else []
    )
    return check_restart(running.job, outcome, killer.killed, losses, settings.loss_tolerance)


def _reference_epochs(settings: Settings) -> int:
    return max(settings.epochs, _FAULT_EPOCHS) if settings.faults else settings.epochs


def _keep(work: Path, logs: Path) -> Path:
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    for path in sorted(work.iterdir()):
        if path.suffix in (".log", ".json"):
            shutil.copy(path, logs / path.name)
    return logs
