"""Checks on the trainer's reports: launches, world, losses, snapshots, and the results of the probes."""

from __future__ import annotations

import functools
import math
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envbuild.base import process
from envbuild.data import load_table
from envbuild.jobcheck.diagnose.engine import diagnose, explain
from envbuild.recipe.targets import CPU, Target, gpu_families
from envbuild.verify.launch import Outcome, TrainingJob
from envbuild.verify.model import Check, Report, Subject, judge
from envbuild.verify.probes import (
    OPTIMIZERS,
    SHUFFLED,
    Case,
    Request,
    expected_digest,
    expected_parameters,
    expected_parts,
    operation_cases,
)

# The loss of a run that learns nothing fluctuates; 5% is well above that and well below the real fall.
_LEAST_FALL = 0.05
_RANK = ("rank", "local_rank", "group_rank", "local_world_size", "host", "pid", "device")
# float64 rounds at 1e-16, and the order of sums is free.
_TOLERANCE = 1e-9
_SHOWN = 5
_LARGEST = 1e300  # JSON has no infinity
# How the trainer's reason begins if not torch, but this host makes a probe impossible (ddp_train/operations.py).
_HOST = "host: "


def check_launch(name: str, outcome: Outcome, origin: float | None = None) -> Check:
    """Check that torchrun exited with 0 on every node and rank 0 wrote a report that is JSON.

    `origin` is the start time of the first launch, None for this launch.
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
    """Check that each epoch's loss equals the loss of one process on the same global batches, within `tolerance`
    (relative).

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
    epochs_saved = [entry["epoch"] for entry in report["snapshots"]]
    fault = _snapshot_fault(path)
    litter = [p.name for p in path.parent.glob(f"*{path.name}*") if p.name not in (path.name, f"{path.name}.prev")]
    return judge(
        "snapshot",
        fault is None and not litter and bool(epochs_saved) and epochs_saved[-1] == epochs - 1,
        seen=fault or (f"left behind: {litter}" if litter else f"saved after epochs {epochs_saved}"),
        expected=f"a whole snapshot after epoch {epochs - 1}, nothing else left beside it",
        evidence={"epochs": epochs_saved, "bytes": path.stat().st_size if path.exists() else 0},
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
    epochs, expected = [entry["epoch"] for entry in report["losses"]], list(range(epoch, total))
    same = len(reports) == 1 and world_size == job.world_size and start == epoch and epochs == expected
    return judge(
        "resume",
        same and bool(report["resumed_from"]) and not rejected,
        seen=f"resumed at epoch {start}, ran epochs {epochs}; {len(reports)} world(s) of size {world_size}"
        + "".join(f"; rejected: {entry['reason']}" for entry in rejected),
        expected=f"resumed at epoch {epoch}, ran epochs {expected} as one world of {job.world_size}",
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
    """Check that the ranks loaded the artifact's locked interpreter and torch, and the `trainer` of envbuild."""
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
        for field in ("torch_file", "sys_executable"):
            if not subject.holds(rank[field]):
                wrong.append(f"{where}: {field} is {rank[field]}, outside of the artifact")
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
    builds = {family: rank.get(f"torch_{family.torch_field}") for family in gpu_families()}
    accelerator = next((family for family, version in builds.items() if version is not None), CPU)
    if accelerator is target.family or (accelerator.gpu and not target.family.gpu and not locked):
        return []
    shown = accelerator if accelerator.gpu else target.family
    return [f"{where}: torch built for {shown.title} {builds[shown]}, target {target.name}"]


def losses_of(report: Report) -> list[float]:
    """Return the global mean loss of each epoch in a report, in order."""
    return [float(entry["loss"]) for entry in report.get("losses", ())]


def steps_of(report: Report) -> list[list[float]]:
    """Return the global mean loss of each step, by epoch, in a report, in order, with seven digits."""
    return [[float(f"{loss:.7g}") for loss in entry.get("steps", ())] for entry in report.get("losses", ())]


def log_tail(log: str) -> str:
    """Return the trainer's own error lines and the first exception of a rank, which torchrun's summary may push out of
    the tail, and the last lines.
    """
    lines = [line for line in log.splitlines() if line.strip()]
    tail = lines[-process.TAIL_LINES :]
    raised = {evidence.line for evidence in diagnose([("log", lines)], ()).exception}
    first = [line for number, line in enumerate(lines, 1) if "ddp_train: error" in line or number in raised]
    return "\n".join("    " + line for line in [*(line for line in dict.fromkeys(first) if line not in tail), *tail])


def check_allreduce(request: Request, report: Report) -> Check:
    """Check that all-reduces of known tensors leave the exact bytes on every rank."""
    return _check_cases("allreduce", request, report, [])


def check_collectives(request: Request, report: Report) -> Check:
    """Check the bytes of broadcast, all-gather and reduce-scatter, and that no rank left the barrier early."""
    times = [rank["probes"]["barrier"] for rank in report["ranks"]]
    last = max(time["entered"] for time in times)
    early = [rank for rank, row in enumerate(times) if row["left"] < last]
    wrong = [f"ranks {early} left the barrier before another rank entered"] if early else []
    return _check_cases("collectives", request, report, wrong)


def _check_cases(check: str, request: Request, report: Report, wrong: list[str]) -> Check:
    cases: list[Case] = [tuple(case) for case in request["cases"][check]]  # lists, if it comes from JSON
    expected = functools.cache(functools.partial(expected_digest, request))
    lacking: set[str] = set()
    for rank in report["ranks"]:
        results: Mapping[str, str] = rank.get("probes", {}).get(check, {})
        for case in cases:
            name = "{} {} × {}".format(*case)
            result = results.get(name, "is missing")
            facts = {"backend": report["backend"], "op": case[0], "dtype": case[1]}
            if result.startswith("error: ") and _may_lack(facts, rank):
                lacking.add(name)
            elif result != expected(case, rank["rank"] if case[0] == "reduce_scatter" else 0):
                wrong.append(f"rank {rank['rank']}: {name} {result if ' ' in result else 'is wrong'}")
    number = len(cases) - len(lacking)
    good = f"{number} results exact on {len(report['ranks'])} ranks"
    return judge(
        check,
        not wrong,
        seen=(_some(wrong) or good) + (f"; {len(lacking)} that this torch lacks" if lacking else ""),
        expected=f"on all ranks the {number} results that envbuild computes",
        evidence={"cases": cases, "unsupported": sorted(lacking), "wrong": wrong[:50]},
    )


def _some(wrong: Sequence[str]) -> str:
    return "; ".join(wrong[:_SHOWN]) + (f"; {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")


def _may_lack(facts: Mapping[str, Any], rank: Mapping[str, Any]) -> bool:
    """Return whether a row of data/probes.toml allows torch to lack a probe on this rank.

    `facts` describe the probe, under the names of a row's keys.
    """
    facts = {**facts, "device": rank["device"].partition(":")[0]}
    return any(
        all(facts.get(name) == value for name, value in row.items() if name != "before")
        and _release(rank["torch_version"]) < _release(row["before"])
        for row in load_table("probes")["unsupported"]
    )


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def check_sampler(request: Request, report: Report) -> Check:
    """Check that the ranks' shares are complete and equally large, in an order that depends only on the epoch."""
    size, epochs, world = request["sampler"]["size"], request["sampler"]["epochs"], len(request["values"])
    each = -(-size // world)  # shares are filled up with samples that another rank has, too
    # By epoch, the shares of all ranks
    orders = list(zip(*(rank["probes"]["sampler"] for rank in report["ranks"]), strict=True))
    wrong = []
    for epoch, shares in zip(epochs, orders, strict=True):
        sizes, seen = [len(share) for share in shares], set().union(*shares)
        if seen != set(range(size)) or sizes != [each] * world:
            wrong.append(f"epoch {epoch}: {len(seen)} of {size} samples, in shares of {sizes}")
    if orders[0] == orders[1]:
        wrong.append(f"epochs {epochs[0]} and {epochs[1]} have one order: set_epoch has no effect")
    if orders[0] != orders[2]:
        wrong.append(f"epoch {epochs[0]} has two orders")
    good = f"{size} samples in {world} shares of {each}, in another order in another epoch"
    evidence = {"samples": size, "epochs": epochs, "wrong": wrong}
    return judge("sampler", not wrong, seen="; ".join(wrong) or good, expected=good, evidence=evidence)


def check_optimizer(request: Request, report: Report) -> Check:
    """Check that every rank's steps of each optimizer equal the steps that envbuild computes."""
    expected = {name: expected_parameters(request, name) for name in OPTIMIZERS}
    ranks: list[Mapping[str, list[float]]] = [rank["probes"]["optimizer"] for rank in report["ranks"]]
    worst = {name: max(_difference(rank[name], expected[name]) for rank in ranks) for name in OPTIMIZERS}
    return judge(
        "optimizer",
        all(difference <= _TOLERANCE for difference in worst.values()),
        seen=f"{len(request['optimizer']['data'])} steps, largest difference "
        + ", ".join(f"of {name} {difference:.3g}" for name, difference in worst.items()),
        expected=f"the parameters that envbuild computes, within {_TOLERANCE:g}",
        evidence={
            "settings": {name: request["optimizer"][name] for name in OPTIMIZERS},
            "expected": expected,
            "seen": {name: ranks[0][name] for name in OPTIMIZERS},
        },
    )


def _difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference, relative to the expected value, or to 1 if that is smaller."""
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(values, expected, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def check_operations(request: Request, report: Report) -> Check:
    """Check the results of the operations that one process probed."""
    rank, tolerances = (
        report["ranks"][0],
        {(op, dtype): tolerance for op, dtype, tolerance in operation_cases(gpu=True)},
    )
    results: Mapping[str, Mapping[str, list[float]] | str] = rank["probes"]["operations"]
    expected = functools.cache(functools.partial(expected_parts, request["operations"]))
    wrong: list[str] = []
    worst: dict[str, float] = {}
    lacking: dict[str, str] = {}
    for op, dtype in request["operations"]["cases"]:
        name = f"{op} {dtype}"
        result = results.get(name, "no result")
        if isinstance(result, str):
            known = result.startswith("error: ") and _may_lack({"op": op, "dtype": dtype}, rank)
            if known or (result.startswith(_HOST) and (op == "DataLoader" or dtype == "bfloat16")):
                lacking[name] = result
            else:
                wrong.append(f"{name}: {result}")
            continue
        parts = [_part(part, result.get(part), values, tolerances[op, dtype]) for part, values in expected(op).items()]
        worst[name] = min(_LARGEST, max(difference for difference, _ in parts))
        if faults := [fault for _, fault in parts if fault]:
            more = f"; {len(faults) - 1} other parts are wrong, too" if len(faults) > 1 else ""
            wrong.append(f"{name}: {faults[0]}{more}")
    number = len(worst)
    return judge(
        "operations",
        not wrong,
        seen=(_some(wrong) or f"{number} results of {len({op for op, _ in request['operations']['cases']})} operations")
        + "".join(f"; not probed: {name} ({why})" for name, why in lacking.items()),
        expected="the results that envbuild computes, within the tolerance of each operation and type",
        evidence={"differences": worst, "unsupported": lacking, "wrong": wrong[:50]},
    )


def _part(part: str, values: Sequence[float] | None, expected: Sequence[float], tolerance: float) -> tuple[float, str]:
    """Return the largest difference in a part of a result, and the fault in words, "" for none."""
    if values is None:
        return math.inf, f"{part} is missing"
    if len(values) != len(expected):
        return math.inf, f"{part} has {len(values)} values instead of {len(expected)}"
    if part == SHUFFLED:
        if list(values) == list(expected):
            return math.inf, f"{part} has the order of the samples"
        values, expected = sorted(values), sorted(expected)
    worst = _difference(values, expected)
    if worst <= tolerance:
        return worst, ""
    number = sum(not _difference([a], [b]) <= tolerance for a, b in zip(values, expected, strict=True))
    return worst, f"{part} differs in {number} of {len(values)} values, by up to {worst:.3g}"
