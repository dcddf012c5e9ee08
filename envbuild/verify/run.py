"""Verify an artifact: train in it on several simulated nodes and judge the results."""

from __future__ import annotations

import glob
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from envbuild.progress import Log
from envbuild.site.settings import FabricTable, load_site
from envbuild.verify import training_checks as training
from envbuild.verify.accelerator_checks import check_accelerator
from envbuild.verify.faults import RESTART_TITLE, Killer, check_restart
from envbuild.verify.judgement import Launches, judge_launches
from envbuild.verify.launch import Outcome, Running, TrainingJob, start_job
from envbuild.verify.model import FAIL, Check, Settings, Verdict, blocked
from envbuild.verify.network import Network, network_of
from envbuild.verify.network_checks import check_layer
from envbuild.verify.nodes import Nodes
from envbuild.verify.static_checks import check_architecture, check_installed
from envbuild.verify.subject import Subject

# Long enough to kill a rank in the middle of training, even on a fast machine.
_FAULT_EPOCHS = 40
_STEPS = 16
# Read by the trainer (ddp_train/loop.py).
RESUME_AFTER = "DDP_TRAIN_RESUME_AFTER"
# Seconds for the timed all-reduces. NCCL's go up to 1 GiB; gloo's get the longer time only if a floor judges them.
_BANDWIDTH_S, _GLOO_BANDWIDTH_S, _GLOO_JUDGED_BANDWIDTH_S = "10", "0.1", "1"


def verify(
    subject: Subject, settings: Settings, env: Mapping[str, str], log: Log, *, logs: Path | None = None
) -> Verdict:
    """Run every check on `subject`. If one fails, the nodes' logs are kept in `logs`."""
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="envbuild-verify-"))
    try:
        site = load_site(env).fabric
        with subject.nodes(work, settings.nodes, env) as nodes:
            shape = (settings.nodes, settings.nproc_per_node)
            network = network_of(subject, nodes, shape, env, site)
            bench = _Bench(nodes, work, settings, subject, network)
            checks = _checks(bench, *_floor(subject, settings, site), log)
        failed = any(check.status == FAIL for check in checks)
        kept = _keep(work, logs) if failed and logs else None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Verdict(tuple(checks), settings, time.monotonic() - started, kept)


@dataclass(frozen=True, slots=True)
class _Bench:
    """The nodes, the settings and the network of this verification. `work` is the work folder on this host."""

    nodes: Nodes
    work: Path
    settings: Settings
    subject: Subject
    network: Network

    def start(
        self,
        name: str,
        epochs: int,
        *,
        nodes: int | None = None,
        nproc_per_node: int | None = None,
        snapshot: str | None = None,
        max_restarts: int = 0,
        bandwidth_s: str | None = None,
        lean: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> Running:
        """Start the trainer on `nodes` × `nproc_per_node` ranks, or as one process if `nodes` is 0.

        The defaults are those of the settings. Every launch trains on the same global batches, whatever its
        number of ranks.
        """
        settings = self.settings
        nodes = settings.nodes if nodes is None else nodes
        nproc_per_node = nproc_per_node or settings.nproc_per_node
        batch = settings.batch_size * settings.nodes * settings.nproc_per_node
        arguments: tuple[str, ...] = (
            str(epochs), "1" if max_restarts else str(epochs),
            "--batch_size", str(batch // max(1, nodes * nproc_per_node)), "--model", settings.model,
            "--dataset_size", str(batch * _STEPS),
            "--checkpoint_path", str(self.nodes.work / f"{snapshot or name}.pt"),
        )  # fmt: skip
        arguments += ("--backend", self.network.accelerator.backend)
        if bandwidth_s:
            arguments += ("--bandwidth", bandwidth_s)
        job = TrainingJob(
            name,
            arguments,
            nodes=nodes,
            nproc_per_node=nproc_per_node,
            timeout_s=settings.timeout_s,
            max_restarts=max_restarts,
            lean=lean,
        )
        work = str(self.nodes.work)
        return start_job(
            job, self.nodes, self.work, lambda node: {**self.network.of_node(node, name, work), **(extra or {})}
        )


def _checks(bench: _Bench, floor: float, floor_of: str, log: Log) -> list[Check]:
    subject, settings = bench.subject, bench.settings
    half = max(1, settings.epochs // 2)
    log(
        f"training on {settings.nodes} simulated nodes × {settings.nproc_per_node} "
        f"ranks, {settings.epochs} epochs, beside one process as reference …"
    )
    for name, (theirs, ours) in bench.network.replaced.items():
        log(
            f"{name} is {theirs!r} in your environment; fabric {bench.network.fabric.name!r} needs {ours!r}, which is "
            "used here: change it in your job scripts"
        )
    # Only the reference runs beside the survey: if the artifact has no bytecode, it compiles torch once for the
    # many processes that follow, each of which would otherwise do so. Its first output comes after the import.
    with bench.start("reference", _reference_epochs(settings), nodes=0) as reference:
        survey = subject.survey(bench.nodes)
        reference.wait_for_output()
        with bench.start("train", half, bandwidth_s=_bandwidth_s(bench, floor)) as first, ExitStack() as stack:
            checks = [
                check_installed(subject, survey),
                check_architecture(subject, survey),
                check_accelerator(subject, survey),
            ]
            checks += [check_layer(layer, bench.nodes, bench.work) for layer in subject.state.layers if layer.check]
            again = None
            reference_outcome = reference.wait() if _may_overlap(bench, floor) else None
            if reference_outcome and _may_start_beside(first, reference_outcome):
                again = stack.enter_context(_resume(bench, {RESUME_AFTER: _reports_of(bench, first)}))
            first_outcome = first.wait()
            resumed = first.job
            second = first_outcome
            # Without a finished first launch, all checks that follow are blocked.
            if first_outcome.finished:
                log(f"resuming from the snapshot of epoch {half}, with one rank on each node …")
                again = again or stack.enter_context(_resume(bench))
                again.started = time.monotonic()
                resumed, second = again.job, again.wait()
        reference_outcome = reference_outcome or reference.wait()
    checks += judge_launches(
        Launches(
            subject, bench.work, first.job, first_outcome, resumed, second, reference_outcome, half,
            settings.epochs, settings.loss_tolerance, bench.network, bench.nodes.interface, floor, floor_of,
        )
    )  # fmt: skip
    if settings.faults and first_outcome.finished:
        log("killing a rank in the middle of training …")
        checks.append(_fault_check(bench, reference_outcome))
    elif settings.faults:
        checks.append(blocked("restart", RESTART_TITLE, "launch"))
    return checks


def _resume(bench: _Bench, extra: Mapping[str, str] | None = None) -> Running:
    return bench.start("resume", bench.settings.epochs, nproc_per_node=1, snapshot="train", lean=True, extra=extra)


def _reports_of(bench: _Bench, launched: Running) -> str:
    """Return a glob pattern, in the programs' view, for the report that rank 0 writes at the end on any node."""
    return f"{glob.escape(str(bench.nodes.work))}/{launched.job.name}-report*.json"


def _may_overlap(bench: _Bench, floor: float) -> bool:
    """Return whether the second launch may prepare beside the first, because it disturbs no measurement."""
    return not bench.network.accelerator.gpu and not floor


def _may_start_beside(first: Running, reference: Outcome) -> bool:
    """Return whether the second launch may start beside `first`.

    It may if the artifact's trainer can wait for its turn, which the report of `reference` tells. In that case,
    sleep until the agents of `first` have imported torch, estimated by the time that the reference took.
    """
    report = reference.reports[0] if reference.reports else {}
    if RESUME_AFTER not in report.get("variables", []):
        return False
    imported = first.started + float(report["seconds"]["import_torch"])
    time.sleep(max(0.0, imported - time.monotonic()))
    return True


def _fault_check(bench: _Bench, reference: Outcome) -> Check:
    settings = bench.settings
    running = bench.start("faults", _reference_epochs(settings), max_restarts=3)
    killer = Killer(rank=running.job.world_size - 1)
    outcome = running.wait(killer)
    losses = training.losses_of(reference.reports[0]) if reference.finished and reference.reports else []
    return check_restart(running.job, outcome, killer.killed, losses, settings.loss_tolerance)


def _floor(subject: Subject, settings: Settings, site: FabricTable) -> tuple[float, str]:
    """Return the bus bandwidth to reach, in GB/s, and who set it."""
    if settings.busbw_floor:
        return settings.busbw_floor, "the recipe"
    return site.busbw_floor.get(subject.state.fabric, 0.0), "the site"


def _bandwidth_s(bench: _Bench, floor: float) -> str:
    if bench.network.accelerator.gpu:
        return _BANDWIDTH_S
    return _GLOO_JUDGED_BANDWIDTH_S if floor else _GLOO_BANDWIDTH_S


def _reference_epochs(settings: Settings) -> int:
    return max(settings.epochs, _FAULT_EPOCHS) if settings.faults else settings.epochs


def _keep(work: Path, logs: Path) -> Path:
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    for path in sorted(work.iterdir()):
        if path.suffix in (".log", ".json", ".txt"):
            shutil.copy(path, logs / path.name)
    return logs
