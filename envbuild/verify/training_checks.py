"""Checks on the trainer's reports: pure functions from reports to checks."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envbuild import process
from envbuild.diagnose.engine import explain
from envbuild.recipe.accelerators import CPU, gpu_families
from envbuild.recipe.targets import Target
from envbuild.verify.launch import Outcome, TrainingJob
from envbuild.verify.model import Check, judge
from envbuild.verify.subject import Subject

Report = Mapping[str, Any]
# The loss of a run that learns nothing fluctuates; 5% is well above that and well below the real fall.
_LEAST_FALL = 0.05
SEE_LOG = "see the log: its last lines are above, all of it is in the folder named below"


def check_launch(name: str, title: str, outcomes: Sequence[Outcome]) -> Check:
    """Check that torchrun exited with 0 on every node and rank 0 wrote a report."""
    bad = next((o for o in outcomes if not o.finished or not o.reports), None)
    if bad is None:
        seen = f"exit codes {[o.returncodes for o in outcomes]}"
    elif bad.timed_out:
        seen = f"still running after {bad.seconds:.0f} s; stopped\n{_log_tail(bad.log)}"
    else:
        seen = f"exit codes {bad.returncodes}, {len(bad.reports)} reports\n{_log_tail(bad.log)}"
    return judge(
        name,
        title,
        bad is None,
        seen=seen,
        expected="exit code 0 on every node, within the time limit, and a report",
        cause=(explain(bad.log, "verification") or SEE_LOG) if bad else "",
        evidence={
            "commands": [" ".join(o.command) for o in outcomes],
            "returncodes": [o.returncodes for o in outcomes],
            "seconds": [round(o.seconds, 3) for o in outcomes],
        },
    )


def check_world(job: TrainingJob, reports: Sequence[Report]) -> Check:
    """Check that the ranks form one world of the requested shape: every rank once, on the requested nodes."""
    worlds: list[dict[str, Any]] = [
        {"world_size": r.get("world_size"), "ranks": [_rank_row(rank) for rank in r.get("ranks", [])]} for r in reports
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
        "ranks form the world asked for",
        good,
        seen=f"{len(worlds)} world(s) of size {sizes or 'none'}; ranks of each node: {group_sizes}",
        expected=f"one world of {job.world_size}: {job.nodes} nodes × {job.nproc_per_node} ranks",
        cause="each node met only itself: the rendezvous endpoint named localhost, or a host name that "
        "every node resolves to its own address",
        evidence={"worlds": worlds},
    )


def check_allreduce(report: Report) -> Check:
    """Check that the all-reduce of known tensors was exact on every rank."""
    rows = [(rank["rank"], row) for rank in report["ranks"] for row in rank["allreduce"]]
    wrong = [
        f"rank {rank}: {row['dtype']} × {row['numel']} off by {row['max_error']}" for rank, row in rows if not row["ok"]
    ]
    ranks = {rank for rank, _ in rows}
    good = not wrong and ranks == set(range(report["world_size"]))
    return judge(
        "allreduce",
        "all-reduce of known tensors",
        good,
        seen="; ".join(wrong[:5]) or f"{len(rows)} sums exact on {len(ranks)} ranks",
        expected=f"every sum exact on all {report['world_size']} ranks",
        cause="a broken collective library or network path; compare torch's build and the interface "
        "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) on all nodes",
        evidence={"sums": [{"rank": rank, **row} for rank, row in rows]},
    )


def check_parameters(report: Report) -> Check:
    """Check that all ranks ended with the same parameters, bit for bit."""
    digests = {str(rank["rank"]): rank["parameters_digest"] for rank in report["ranks"]}
    different = sorted(set(digests.values()))
    return judge(
        "parameters",
        "parameters bit-equal on all ranks",
        len(different) == 1,
        seen=f"{len(digests)} ranks hold {len(different)} set(s) of parameters",
        expected="the same parameters on every rank",
        cause="gradients were not synchronised (the model not wrapped in DDP, no_sync() left on, a rank "
        "with unused parameters), or ranks loaded different snapshots",
        evidence={"sha256": digests},
    )


def check_loss_falls(losses: Sequence[float]) -> Check:
    """Check that the loss fell by at least 5% between the first and the last epoch."""
    good = len(losses) > 1 and losses[-1] < losses[0] * (1 - _LEAST_FALL)
    return judge(
        "loss",
        "loss falls",
        good,
        seen=f"{_number(losses[0])} -> {_number(losses[-1])} over {len(losses)} epochs" if losses else "no epoch",
        expected=f"at least {_LEAST_FALL:.0%} lower after the last epoch than after the first",
        cause="the optimizer does not step, or the loss has no gradient",
        evidence={"losses": list(losses)},
    )


def check_curve(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> Check:
    """Check that each epoch's loss equals one process's on the same global batches, within `tolerance` (relative)."""
    differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, reference, strict=False)]
    worst = max(differences, default=float("inf"))
    good = len(losses) == len(reference) and all(each <= tolerance for each in differences)
    return judge(
        "curve",
        "loss curve equals one process's",
        good and bool(losses),
        seen=f"largest relative difference {worst:.3g} over {len(losses)} of {len(reference)} epochs",
        expected=f"at most {tolerance:g} in each epoch",
        cause="ranks trained on other data than their share (a rank with another seed, a sampler without "
        "set_epoch), or gradients were summed instead of averaged",
        evidence={"losses": list(losses), "one_process": list(reference), "tolerance": tolerance},
    )


def check_snapshot(report: Report, path: Path, epochs: int) -> Check:
    """Check that rank 0 wrote one complete snapshot (a zip archive: torch.save's format) after the last epoch."""
    said = [entry["epoch"] for entry in report["snapshots"]]
    fault = _snapshot_fault(path)
    litter = [p.name for p in path.parent.glob(f"*{path.name}*") if p not in (path, _previous(path))]
    good = fault is None and not litter and bool(said) and said[-1] == epochs - 1
    return judge(
        "snapshot",
        "snapshot written",
        good,
        seen=fault or (f"left behind: {litter}" if litter else f"saved after epochs {said}"),
        expected=f"a whole snapshot after epoch {epochs - 1}, nothing else left beside it",
        cause="a full or failing disk, or several ranks writing the same file",
        evidence={"epochs": said, "bytes": path.stat().st_size if path.exists() else 0},
    )


def check_resume(job: TrainingJob, reports: Sequence[Report], epoch: int, total: int) -> Check:
    """Check that a second launch resumed at `epoch` from the first one's snapshot and ran to `total`.

    The second launch is `job`; it has another number of ranks, and forms one world.
    """
    report = reports[0]
    epochs = [entry["epoch"] for entry in report["losses"]]
    good = (
        len(reports) == 1
        and report["world_size"] == job.world_size
        and report["start_epoch"] == epoch
        and bool(report["resumed_from"])
        and not report["rejected_snapshots"]
        and epochs == list(range(epoch, total))
    )
    rejected = "; ".join(f"rejected: {entry['reason']}" for entry in report["rejected_snapshots"])
    return judge(
        "resume",
        "training resumes from the snapshot",
        good,
        seen=f"resumed at epoch {report['start_epoch']}, ran epochs {epochs}; "
        f"{len(reports)} world(s) of size {report['world_size']}" + (f"; {rejected}" if rejected else ""),
        expected=f"resumed at epoch {epoch}, ran epochs {list(range(epoch, total))} as one world of {job.world_size}",
        cause="the snapshot is damaged, from an older run, or does not record the epochs that were finished",
        evidence={
            "start_epoch": report["start_epoch"],
            "epochs": epochs,
            "world_size": report["world_size"],
            "rejected": report["rejected_snapshots"],
        },
    )


def check_versions(subject: Subject, reports: Sequence[Report]) -> Check:
    """Check that the ranks loaded the artifact's own interpreter, torch and trainer, in the locked versions."""
    state = subject.state
    locked = next((version for name, version, _ in state.packages if name == "torch"), None)
    wrong: list[str] = []
    for rank in (rank for report in reports for rank in report["ranks"]):
        where = f"rank {rank['rank']}"
        if not _is_release(rank["python_version"], state.python_version):
            wrong.append(f"{where}: Python {rank['python_version']}, built with {state.python_version}")
        if locked is not None and rank["torch_version"] != locked:
            wrong.append(f"{where}: torch {rank['torch_version']}, locked {locked}")
        wrong += _wrong_build(where, rank, subject.target, locked is not None)
        for what in ("torch_file", "ddp_train_file", "sys_executable"):
            if not subject.holds(rank[what]):
                wrong.append(f"{where}: {what} is {rank[what]}, outside of the artifact")
    first = reports[0]["ranks"][0]
    return judge(
        "versions",
        "interpreter and torch as loaded",
        not wrong,
        seen="; ".join(dict.fromkeys(wrong)) or f"Python {first['python_version']}, torch {first['torch_version']}",
        expected=f"Python {state.python_version}, torch {locked or 'of the base image'}, loaded from the artifact",
        cause="another environment is found first: PYTHONPATH, a module loaded on the node, ~/.local",
        evidence={
            "python": first["python_version"],
            "torch": first["torch_version"],
            "torch_cuda": first["torch_cuda"],
            "backend": reports[0]["backend"],
            "torch_file": subject.relative(first["torch_file"]),
            "ddp_train_file": subject.relative(first["ddp_train_file"]),
            "executable": subject.relative(first["sys_executable"]),
        },
    )


def _wrong_build(where: str, rank: Mapping[str, Any], target: Target, locked: bool) -> list[str]:
    """Return the fault if the loaded torch is built for another accelerator than the target's.

    A base image's GPU build may serve a CPU target, but a CPU build never serves a GPU target.
    """
    builds = {one: rank.get(f"torch_{one.torch_field}") for one in gpu_families()}
    found = next((one for one, version in builds.items() if version is not None), CPU)
    if found is target.family or (found.gpu and not target.family.gpu and not locked):
        return []
    shown = found if found.gpu else target.family
    return [f"{where}: torch built for {shown.title} {builds[shown]}, target {target.name}"]


def _is_release(version: str, known: str) -> bool:
    """Return whether `version` is `known`, or a release of the series `known` ("3.11", for a base image's Python)."""
    return version == known or version.startswith(known + ".")


def losses_of(report: Report) -> list[float]:
    """Return the global mean loss of each epoch in a report, in order."""
    return [float(entry["loss"]) for entry in report["losses"]]


def _snapshot_fault(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except FileNotFoundError:
        return "there is no snapshot"
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        return f"the snapshot is damaged: {error}"
    return f"the snapshot is damaged: {broken} fails its checksum" if broken else None


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".prev")


def _rank_row(rank: Mapping[str, Any]) -> dict[str, Any]:
    names = ("rank", "local_rank", "group_rank", "local_world_size", "host", "pid", "device")
    return {name: rank.get(name) for name in names}


def _log_tail(log: str) -> str:
    """Return the trainer's own error lines, which torchrun's summary may push out of the tail, and the last lines."""
    lines = [line for line in log.splitlines() if line.strip()]
    tail = lines[-process.TAIL_LINES :]
    first = [line for line in dict.fromkeys(lines) if "ddp_train: error" in line and line not in tail]
    return "\n".join("    " + line for line in [*first, *tail])


def _number(value: float) -> str:
    return f"{value:.6g}"
