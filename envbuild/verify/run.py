"""Verification of an artifact: training on several simulated nodes, the checks of its results, and its step time."""

from __future__ import annotations

import glob
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from envbuild.base.errors import VerificationError
from envbuild.base.process import of_caller
from envbuild.base.progress import Log
from envbuild.contract.receipt import FAIL, PASS
from envbuild.contract.verification import VerifySettings
from envbuild.site.settings import Site
from envbuild.site.tables import FabricTable
from envbuild.verify import training_checks as training
from envbuild.verify import user_code
from envbuild.verify.launch import TRAINER, Bench, Outcome, Running, fit_to_gpus, network_of, trainer_files
from envbuild.verify.model import OF_QUICK, Check, Report, Subject, Verdict, blocked, check_texts, not_tried
from envbuild.verify.model import judge as judged
from envbuild.verify.network_checks import check_bandwidth, check_gloo, check_libraries, check_nccl, rank_logs
from envbuild.verify.probes import make_request
from envbuild.verify.static_checks import (
    check_accelerator,
    check_architecture,
    check_gpus,
    check_installed,
    check_layer,
    check_linkage,
    check_trainer,
)
from envbuild.verify.survey import Survey
from envbuild.verify.training_checks import (
    check_allreduce,
    check_collectives,
    check_operations,
    check_optimizer,
    check_sampler,
    log_tail,
)

# Epochs of a launch for the step time alone, of which the fastest counts.
_EPOCHS = 40
# Long enough to kill a rank in the middle of training, even on a fast machine: after this many snapshots.
_FAULT_EPOCHS, _KILLED_AFTER = 40, 2
_SAVED = re.compile(r"Epoch (\d+) \| Training snapshot saved")
# Read by the trainer (ddp_train/resume.py, ddp_train/probes.py).
RESUME_AFTER, PROBES = "DDP_TRAIN_RESUME_AFTER", "DDP_TRAIN_PROBES"
_REQUEST = ".trainer/probes.json"
# Checks that need another launch, or more time, than a quick verification has.
_OF_OTHER_LAUNCHES = ("bandwidth", "relaunch", "resume", "reference", "operations", "loss", "curve")
_OF_FILES = (check_installed, check_trainer, check_architecture, check_accelerator, check_linkage)
# Seconds for the timed all-reduces. NCCL's go up to 1 GiB; gloo's get the longer time only if a floor judges them.
_BANDWIDTH_S, _GLOO_BANDWIDTH_S, _GLOO_JUDGED_BANDWIDTH_S = "10", "0.05", "1"


def step_seconds(report: Report) -> float:
    """Return the mean step time of the fastest epoch, which is the one least disturbed by other programs."""
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
    """Return the figures of the first launch and of the single process; figures that were not measured are left out."""
    figures: dict[str, Any] = {}
    if not first.finished or not first.reports:
        return figures
    for name, read in _READERS.items():
        # A malformed report is a finding of the checks.
        with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            value = float(read(first.reports[0], reference))
            if math.isfinite(value) and value > 0:
                figures[name] = int(value) if name.endswith("_bytes") else round(value, 6)
    with suppress(AttributeError, LookupError, TypeError):
        figures |= {"gpu": str(first.reports[0]["ranks"][0]["gpu"])}
    return figures


def measure_step(subject: Subject, settings: VerifySettings, env: Mapping[str, str], site: FabricTable) -> float:
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


def verify(
    subject: Subject,
    settings: VerifySettings,
    site: Site,
    env: Mapping[str, str],
    log: Log,
    *,
    logs: Path | None = None,
    fit: bool = False,
) -> Verdict:
    """Run every check on `subject`, with the network and the GPUs of `site`. After a failure, `logs` keeps the logs.

    Variables of the caller's `env` that could change the result are left out. With `fit`, a node has no more ranks than
    this host has GPUs.
    """
    if fit:
        settings = fit_to_gpus(settings, env, subject.target.family, log)
    started, env = time.monotonic(), of_caller(env, verifying=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=env.get("TMPDIR"), ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        if subject.target.family.gpu and not settings.gpus:
            settings = replace(settings, gpus=site.node.gpu_types)
        if settings.quick:
            settings = _quick(settings)
        with subject.nodes(work, settings.nodes, env) as nodes:
            shape = (settings.nodes, settings.nproc_per_node)
            network = network_of(subject, nodes, shape, env, site.fabric)
            request = make_request(settings.nodes * settings.nproc_per_node, gpu=network.accelerator.gpu)
            nodes.share({**trainer_files(), _REQUEST: json.dumps(request).encode()})
            bench = Bench(nodes, work, settings, subject, network, request, *_floor(subject, settings, site.fabric))
            checks, figures = _checks(bench, log)
        failed = any(check.status == FAIL for check in checks)
        kept = _keep(work, logs) if failed and logs else None
    return Verdict(tuple(checks), settings, time.monotonic() - started, kept, figures)


def _floor(subject: Subject, settings: VerifySettings, site: FabricTable) -> tuple[float, str]:
    """Return the required bus bandwidth in GB/s, and who set it."""
    if settings.busbw_floor:
        return settings.busbw_floor, "the recipe"
    return site.busbw_floor.get(subject.state.fabric, 0.0), "the site"


def _keep(work: Path, logs: Path) -> Path:
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    for path in [path for path in work.iterdir() if path.suffix in (".log", ".json", ".txt")]:
        shutil.copy(path, logs / path.name)
    return logs


def _checks(bench: Bench, log: Log) -> tuple[list[Check], dict[str, Any]]:
    """Return the results of all checks, and the performance that the launches showed."""
    subject, settings, gpu = bench.subject, bench.settings, bench.network.accelerator.gpu
    if not settings.trainer:
        survey = subject.survey(settings.timeout_s)
        return [*_file_checks(bench, survey), *user_code.check_without_training(bench, survey)], {}
    beside = "" if settings.quick else ", beside one process as reference"
    log(
        f"training on {settings.nodes} simulated nodes × {settings.nproc_per_node} "
        f"ranks, {settings.epochs} epoch{'s' * (settings.epochs > 1)}{beside} …"
    )
    for name, (theirs, ours) in bench.network.replaced.items():
        log(
            f"{name} is {theirs!r} in your environment; fabric {bench.network.fabric.name!r} needs {ours!r}, which is "
            "used here: change it in your job scripts"
        )
    if settings.quick:
        return _quick_checks(bench), {}
    reference_epochs = max(settings.epochs, _FAULT_EPOCHS) if settings.faults else settings.epochs
    bandwidth_s = _BANDWIDTH_S if gpu else _GLOO_JUDGED_BANDWIDTH_S if bench.floor else _GLOO_BANDWIDTH_S
    # Only the reference runs beside the survey: if the artifact has no bytecode, it compiles torch once for the
    # many processes that follow, each of which would otherwise do so. Its first output comes after the import.
    with ExitStack() as launches:
        probes = {PROBES: str(bench.nodes.work / _REQUEST)}
        alone = launches.enter_context(bench.start("reference", reference_epochs, shape=(0, 1), extra=probes))
        survey = subject.survey(settings.timeout_s)
        alone.wait_for_output()
        imports = user_code.modules_to_import(settings, survey)
        request = {**probes, user_code.IMPORTS: " ".join(imports)}
        train = bench.start("train", settings.first_epochs, bandwidth_s=bandwidth_s, extra=request)
        half = launches.enter_context(train)
        checks = _file_checks(bench, survey)
        again = None
        # The second launch may prepare beside the first if it disturbs no measurement.
        reference = alone.wait() if not gpu and not bench.floor else None
        if reference and _may_start_beside(half, reference):
            # The report that rank 0 writes at the end on any node, in the programs' view.
            reports = f"{glob.escape(str(bench.nodes.work))}/{half.job.name}-report*.json"
            again = launches.enter_context(_resume(bench, {RESUME_AFTER: reports}))
        first = second = half.wait()
        # Without a finished first launch, all checks that follow are blocked.
        if first.finished:
            log(f"resuming from the snapshot of epoch {settings.first_epochs}, with {settings.nodes} ranks in all …")
            again = again or launches.enter_context(_resume(bench))
            again.started = time.monotonic()
            second = again.wait()
        reference = reference or alone.wait()
    checks += judge_launches(bench, first, second, reference, imports)
    checks.append(user_code.check_command(bench, survey, checks))
    if settings.faults and first.finished:
        log("killing a rank in the middle of training …")
        checks.append(_fault_check(bench, reference, reference_epochs))
    elif settings.faults:
        checks.append(blocked("restart", "launch"))
    else:
        checks.append(not_tried("restart", "give --faults to kill a rank"))
    return checks, performance_of(first, reference)


def _quick(settings: VerifySettings) -> VerifySettings:
    """Return the settings of a quick verification: one epoch on two ranks, of two nodes if the recipe has several."""
    nodes = min(settings.nodes, 2)
    return replace(settings, epochs=1, nodes=nodes, nproc_per_node=1 if nodes > 1 else min(settings.nproc_per_node, 2))


def _quick_checks(bench: Bench) -> list[Check]:
    """Return the checks on the files and on one short launch; other checks are "not tried"."""
    survey = bench.subject.survey(bench.settings.timeout_s)
    imports = user_code.modules_to_import(bench.settings, survey)
    extra = {PROBES: str(bench.nodes.work / _REQUEST), user_code.IMPORTS: " ".join(imports)}
    checks = _file_checks(bench, survey)
    with bench.start("train", bench.settings.epochs, extra=extra) as running:
        outcome = running.wait()
    checks += judge_launches(bench, outcome, outcome, outcome, imports)
    return [*checks, user_code.check_command(bench, survey, checks), not_tried("restart", OF_QUICK)]


def _file_checks(bench: Bench, survey: Survey) -> list[Check]:
    layers = [layer for layer in bench.subject.state.layers if layer.check]
    checks = [check(bench.subject, survey) for check in _OF_FILES]
    if bench.network.accelerator.gpu:
        checks.append(check_gpus(bench.subject, survey, bench.settings.gpus))
    return checks + [check_layer(layer, bench.nodes, bench.work) for layer in layers]


def _resume(bench: Bench, extra: Mapping[str, str] | None = None) -> AbstractContextManager[Running]:
    settings = bench.settings
    # The first launch probed torch and imported modules.
    variables = {PROBES: "", user_code.IMPORTS: "", **(extra or {})}
    # One agent starts all ranks, because each agent imports torch. GPUs are divided among the nodes.
    shape = (settings.nodes, 1) if bench.network.accelerator.gpu else (1, settings.nodes)
    return bench.start("resume", settings.epochs, shape=shape, snapshot="train", extra=variables)


def _may_start_beside(first: Running, reference: Outcome) -> bool:
    """Return whether the second launch may run at the same time as `first`: not after a failed `reference`.

    If it may, first sleep until the agents of `first` have imported torch, which takes as long as in the reference.
    """
    report = reference.reports[0] if reference.reports else {}
    if "seconds" not in report:
        return False
    imported = first.started + float(report["seconds"]["import_torch"])
    time.sleep(max(0.0, imported - time.monotonic()))
    return True


def judge_launches(
    bench: Bench, first: Outcome, second: Outcome, reference: Outcome, imports: Sequence[str] = ()
) -> list[Check]:
    """Return every check on the launches. A check is blocked if a check that it depends on did not pass.

    `first` trained for half of the epochs and imported the modules `imports`, `second` continued to the end,
    `reference` is one process. A quick verification has only the first launch.
    """
    epochs, half = bench.settings.epochs, bench.settings.first_epochs
    origin = min(first.started, second.started, reference.started)
    trainer = os.path.realpath((bench.nodes.work / TRAINER).parent / "ddp_train/__init__.py")

    def losses() -> list[float]:
        return training.losses_of(first.reports[0]) + training.losses_of(second.reports[0])

    def curve() -> Check:
        expected = training.losses_of(reference.reports[0])[:epochs]
        steps = training.steps_of(first.reports[0]) + training.steps_of(second.reports[0])
        alone = training.steps_of(reference.reports[0])[:epochs]
        return training.check_curve(losses(), expected, bench.settings.loss_tolerance, steps, alone)

    judges: dict[str, Callable[[], Check]] = {
        "launch": lambda: training.check_launch("launch", first, origin),
        "world": lambda: training.check_world(first.job, first.reports),
        "versions": lambda: training.check_versions(bench.subject, first.reports, trainer),
        "fabric": lambda: _fabric(bench, first.reports[0]),
        "libraries": lambda: check_libraries(bench.subject, bench.network.fabric, first.reports[0]),
        "allreduce": lambda: check_allreduce(bench.request, first.reports[0]),
        "collectives": lambda: check_collectives(bench.request, first.reports[0]),
        "bandwidth": lambda: check_bandwidth(first.reports[0], bench.floor, bench.floor_of),
        "parameters": lambda: training.check_parameters(first.reports[0]),
        "sampler": lambda: check_sampler(bench.request, first.reports[0]),
        "optimizer": lambda: check_optimizer(bench.request, first.reports[0]),
        "snapshot": lambda: training.check_snapshot(first.reports[0], bench.work / "train.pt", half),
        "relaunch": lambda: training.check_launch("relaunch", second, origin),
        "resume": lambda: training.check_resume(second.job, second.reports, half, epochs),
        "reference": lambda: training.check_launch("reference", reference, origin),
        "operations": lambda: check_operations(bench.request, reference.reports[0]),
        "loss": lambda: training.check_loss_falls(losses()),
        "curve": curve,
        "imports": lambda: user_code.check_imports(imports, first.reports),
    }
    if not bench.network.accelerator.gpu:
        del judges["libraries"]
    checks: dict[str, Check] = {}
    for name, judge in judges.items():
        if bench.settings.quick and name in _OF_OTHER_LAUNCHES:
            checks[name] = not_tried(name, OF_QUICK)
            continue
        needs = check_texts()[name].get("needs", ())
        by = next((need for need in needs if checks[need].status != PASS), None)
        checks[name] = blocked(name, by) if by else _judged(name, judge)
    return list(checks.values())


def _judged(name: str, judge: Callable[[], Check]) -> Check:
    """Return the result of `judge`; a failed check if the reports that it reads are malformed."""
    try:
        return judge()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        seen = f"a report of the trainer is malformed: {type(error).__name__}: {error}"
        return judged(name, False, seen=seen, expected="a report as the trainer writes it", evidence={})


def _fabric(bench: Bench, report: Mapping[str, Any]) -> Check:
    network = bench.network
    if not network.accelerator.gpu:
        return check_gloo(bench.nodes.interface, report)
    # LD_LIBRARY_PATH is left out: it ends in the value of the caller's environment.
    named = {name: value for name, value in network.variables.items() if name != "LD_LIBRARY_PATH"}
    given = {name: bench.subject.relative(value) for name, value in named.items()}
    return check_nccl(network.fabric, report, rank_logs(report, bench.work), given)


def _fault_check(bench: Bench, reference: Outcome, epochs: int) -> Check:
    """Kill a rank during training, and check that the job resumes from its snapshot."""
    killed: dict[str, Any] = {}

    def kill(running: Running) -> None:
        saved = [] if killed else [int(epoch) for epoch in _SAVED.findall(running.log())]
        if len(saved) < _KILLED_AFTER:
            return
        rank = running.job.world_size - 1
        pid = running.nodes.kill_rank(running.run_id, rank)
        if pid is not None:
            killed.update(rank=rank, pid=pid, after_epoch=saved[-1])

    with bench.start("faults", epochs, max_restarts=3) as running:
        outcome = running.wait(kill)
    losses = training.losses_of(reference.reports[0]) if reference.finished and reference.reports else []
    return training.check_restart(outcome, killed, losses, bench.settings.loss_tolerance)
