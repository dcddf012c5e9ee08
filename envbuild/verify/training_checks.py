"""Checks on the trainer's reports: pure functions from reports to checks."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envbuild.base import process
from envbuild.jobcheck.diagnose.engine import diagnose, explain
from envbuild.recipe.accelerators import CPU, gpu_families
from envbuild.recipe.targets import Target
from envbuild.verify.launch import Outcome, TrainingJob
from envbuild.verify.model import Check, Report, Subject, judge

# The loss of a run that learns nothing fluctuates; 5% is well above that and well below the real fall.
_LEAST_FALL = 0.05
_RANK = ("rank", "local_rank", "group_rank", "local_world_size", "host", "pid", "device")


def check_launch(name: str, outcome: Outcome, origin: float | None = None) -> Check:
    """Check that torchrun exited with 0 on every node and rank 0 wrote a report that is JSON.

    `origin` is when the first launch started, None for this one.
    """
    unreadable = [f", {report['unreadable']} is not JSON" for report in outcome.reports if "unreadable" in report]
    good = outcome.finished and bool(outcome.reports) and not unreadable
    if good:
        seen = f"exit codes {[outcome.returncodes]}"
    elif outcome.timed_out:
        seen = f"still running after {outcome.seconds:.0f} s; stopped\n{log_tail(outcome.log)}"
    else:
        count = f"{len(outcome.reports)} reports{''.join(unreadable)}"
        seen = f"exit codes {outcome.returncodes}, {count}\n{log_tail(outcome.log)}"
    return judge(
        name,
        good,
        seen=seen,
        expected="exit code 0 on every node, within the time limit, and a report",
        cause="" if good else explain(outcome.log, "verification"),
        evidence={
            "commands": [" ".join(outcome.command)],
            "returncodes": [outcome.returncodes],
            "seconds": [round(outcome.seconds, 3)],
            "started_s": round(outcome.started - (outcome.started if origin is None else origin), 3),
        },
    )


def check_world(job: TrainingJob, reports: Sequence[Report]) -> Check:
    """Check that the ranks form one world of the requested shape: every rank once, on the requested nodes."""
    worlds: list[dict[str, Any]] = [
        {
            "world_size": report.get("world_size"),
            "ranks": [{name: rank.get(name) for name in _RANK} for rank in report.get("ranks", [])],
        }
        for report in reports
    ]
    rows = worlds[0]["ranks"] if len(worlds) == 1 else []
    group_sizes = sorted(Counter(row["group_rank"] for row in rows).items())
    good = (
        len(worlds) == 1
        and worlds[0]["world_size"] == job.world_size
        and [row["rank"] for row in rows] == list(range(job.world_size))
        and group_sizes == [(node, job.nproc_per_node) for node in range(job.nodes)]
        and all(row["local_world_size"] == job.nproc_per_node for row in rows)
        and len({(row["host"], row["pid"]) for row in rows}) == job.world_size
    )
    sizes = ", ".join(str(world["world_size"]) for world in worlds)
    return judge(
        "world",
        good,
        seen=f"{len(worlds)} world(s) of size {sizes or 'none'}; ranks of each node: {group_sizes}",
        expected=f"one world of {job.world_size}: {job.nodes} nodes × {job.nproc_per_node} ranks",
        evidence={"worlds": worlds},
    )


def check_parameters(report: Report) -> Check:
    """Check that all ranks ended with the same parameters, bit for bit."""
    digests = {str(rank["rank"]): rank["parameters_digest"] for rank in report["ranks"]}
    different = len(set(digests.values()))
    return judge(
        "parameters",
        different == 1,
        seen=f"{len(digests)} ranks hold {different} set(s) of parameters",
        expected="the same parameters on every rank",
        evidence={"sha256": digests},
    )


def check_loss_falls(losses: Sequence[float]) -> Check:
    """Check that the loss fell by at least 5% between the first and the last epoch."""
    return judge(
        "loss",
        len(losses) > 1 and losses[-1] < losses[0] * (1 - _LEAST_FALL),
        seen=f"{losses[0]:.6g} -> {losses[-1]:.6g} over {len(losses)} epochs" if losses else "no epoch",
        expected=f"at least {_LEAST_FALL:.0%} lower after the last epoch than after the first",
        evidence={"losses": list(losses)},
    )


def check_curve(
    losses: Sequence[float],
    reference: Sequence[float],
    tolerance: float,
    steps: Sequence[Sequence[float]] = (),
    reference_steps: Sequence[Sequence[float]] = (),
) -> Check:
    """Check that each epoch's loss equals one process's on the same global batches, within `tolerance` (relative).

    `steps` and `reference_steps` have the losses of each epoch's steps, for the report.
    """
    differences = _differences(losses, reference)
    worst = max(differences, default=float("inf"))
    return judge(
        "curve",
        bool(losses) and len(losses) == len(reference) and all(each <= tolerance for each in differences),
        seen=f"largest relative difference {worst:.3g} over {len(losses)} of {len(reference)} epochs",
        expected=f"at most {tolerance:g} in each epoch",
        evidence={
            "losses": list(losses),
            "one_process": list(reference),
            "tolerance": tolerance,
            "steps": list(steps),
            "one_process_steps": list(reference_steps),
        },
    )


def _differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, reference, strict=False)]


def check_snapshot(report: Report, path: Path, epochs: int) -> Check:
    """Check that rank 0 wrote one complete snapshot (a zip archive: torch.save's format) after the last epoch."""
    said = [entry["epoch"] for entry in report["snapshots"]]
    fault = _snapshot_fault(path)
    litter = [p.name for p in path.parent.glob(f"*{path.name}*") if p.name not in (path.name, f"{path.name}.prev")]
    return judge(
        "snapshot",
        fault is None and not litter and bool(said) and said[-1] == epochs - 1,
        seen=fault or (f"left behind: {litter}" if litter else f"saved after epochs {said}"),
        expected=f"a whole snapshot after epoch {epochs - 1}, nothing else left beside it",
        evidence={"epochs": said, "bytes": path.stat().st_size if path.exists() else 0},
    )


def _snapshot_fault(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except FileNotFoundError:
        return "there is no snapshot"
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        return f"the snapshot is damaged: {error}"
    return f"the snapshot is damaged: {broken} fails its checksum" if broken else None


def check_resume(job: TrainingJob, reports: Sequence[Report], epoch: int, total: int) -> Check:
    """Check that `job`, with another number of ranks, resumed from the snapshot at `epoch` and ran to `total`."""
    report = reports[0]
    start, world_size, rejected = report["start_epoch"], report["world_size"], report["rejected_snapshots"]
    epochs, wanted = [entry["epoch"] for entry in report["losses"]], list(range(epoch, total))
    same = len(reports) == 1 and world_size == job.world_size and start == epoch and epochs == wanted
    return judge(
        "resume",
        same and bool(report["resumed_from"]) and not rejected,
        seen=f"resumed at epoch {start}, ran epochs {epochs}; {len(reports)} world(s) of size {world_size}"
        + "".join(f"; rejected: {entry['reason']}" for entry in rejected),
        expected=f"resumed at epoch {epoch}, ran epochs {wanted} as one world of {job.world_size}",
        evidence={"start_epoch": start, "epochs": epochs, "world_size": world_size, "rejected": rejected},
    )


def check_restart(outcome: Outcome, killed: Mapping[str, Any], reference: Sequence[float], tolerance: float) -> Check:
    """Check that the killed job restarted, resumed from a snapshot and finished on the undisturbed loss curve."""
    report = outcome.reports[0] if outcome.reports else {}
    start, losses = report.get("start_epoch", 0), losses_of(report)
    total, expected = len(reference), list(reference[start:])
    close = len(losses) == len(expected) and all(each <= tolerance for each in _differences(losses, expected))
    if not killed:
        seen = f"the job ended before a rank could be killed: exit codes {outcome.returncodes}"
    elif not outcome.finished:
        seen = f"rank {killed['rank']} killed; exit codes {outcome.returncodes}, no recovery"
    else:
        seen = (
            f"rank {killed['rank']} killed after epoch {killed['after_epoch']}; resumed at epoch {start} of "
            f"{total}, {len(losses)} epochs run, curve {'as undisturbed' if close else 'differs'}"
        )
    return judge(
        "restart",
        bool(killed) and outcome.finished and bool(report.get("resumed_from")) and 0 < start < total and close,
        seen=seen,
        expected=f"restarted, resumed from the snapshot, finished epoch {total - 1} on the undisturbed curve",
        evidence={
            "killed": dict(killed),
            "start_epoch": start,
            "losses": losses,
            "steps": steps_of(report),
            "returncodes": outcome.returncodes,
            "max_restarts": outcome.job.max_restarts,
            "seconds": round(outcome.seconds, 3),
        },
    )


def check_versions(subject: Subject, reports: Sequence[Report], trainer: str) -> Check:
    """Check that the ranks loaded the artifact's own, locked interpreter and torch, and the `trainer` of envbuild."""
    state = subject.state
    locked = next((version for name, version, _ in state.packages if name == "torch"), None)
    wrong: list[str] = []
    for rank in (rank for report in reports for rank in report["ranks"]):
        where = f"rank {rank['rank']}"
        # Of a base image's Python, the series may be known alone ("3.11").
        if not f"{rank['python_version']}.".startswith(f"{state.python_version}."):
            wrong.append(f"{where}: Python {rank['python_version']}, built with {state.python_version}")
        # PyPI's builds for CUDA are locked as 2.7.1, and call themselves 2.7.1+cu126: _wrong_build() judges the build.
        loaded = rank["torch_version"]
        if locked is not None and locked not in (loaded, loaded.partition("+")[0]):
            wrong.append(f"{where}: torch {loaded}, locked {locked}")
        wrong += _wrong_build(where, rank, subject.target, locked is not None)
        for what in ("torch_file", "sys_executable"):
            if not subject.holds(rank[what]):
                wrong.append(f"{where}: {what} is {rank[what]}, outside of the artifact")
        if rank["ddp_train_file"] != trainer:
            wrong.append(f"{where}: the trainer is {rank['ddp_train_file']}, not envbuild's")
    first = reports[0]["ranks"][0]
    return judge(
        "versions",
        not wrong,
        seen="; ".join(dict.fromkeys(wrong)) or f"Python {first['python_version']}, torch {first['torch_version']}",
        expected=f"Python {state.python_version}, torch {locked or 'of the base image'}, loaded from the artifact",
        evidence={
            "python": first["python_version"],
            "torch": first["torch_version"],
            "torch_cuda": first["torch_cuda"],
            "backend": reports[0]["backend"],
            "torch_file": subject.relative(first["torch_file"]),
            "executable": subject.relative(first["sys_executable"]),
        },
    )


def _wrong_build(where: str, rank: Mapping[str, Any], target: Target, locked: bool) -> list[str]:
    """Return the fault if the loaded torch is built for another accelerator than the target's."""
    # A base image's GPU build may serve a CPU target, but a CPU build never serves a GPU target.
    builds = {one: rank.get(f"torch_{one.torch_field}") for one in gpu_families()}
    found = next((one for one, version in builds.items() if version is not None), CPU)
    if found is target.family or (found.gpu and not target.family.gpu and not locked):
        return []
    shown = found if found.gpu else target.family
    return [f"{where}: torch built for {shown.title} {builds[shown]}, target {target.name}"]


def losses_of(report: Report) -> list[float]:
    """Return the global mean loss of each epoch in a report, in order."""
    return [float(entry["loss"]) for entry in report.get("losses", ())]


def steps_of(report: Report) -> list[list[float]]:
    """Return the global mean loss of the steps of each epoch in a report, in order, with seven digits."""
    return [[float(f"{loss:.7g}") for loss in entry.get("steps", ())] for entry in report.get("losses", ())]


def log_tail(log: str) -> str:
    """Return the trainer's own error lines and the first exception of a rank, which torchrun's summary may push out of
    the tail, and the last lines.
    """
    lines = [line for line in log.splitlines() if line.strip()]
    tail = lines[-process.TAIL_LINES :]
    raised = {one.line for one in diagnose([("log", lines)], ()).exception}
    first = [line for number, line in enumerate(lines, 1) if "ddp_train: error" in line or number in raised]
    return "\n".join("    " + line for line in [*(one for one in dict.fromkeys(first) if one not in tail), *tail])
