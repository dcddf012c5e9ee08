"""The user's own code: the imports and the command of [verify], and programs of `envbuild run` on simulated nodes."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import signal
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

from envbuild.base.errors import UsageError
from envbuild.base.masking import masked_forms
from envbuild.base.progress import step
from envbuild.contract.receipt import FAIL
from envbuild.contract.verification import BOUND, ExpectTable, VerifySettings
from envbuild.environment import Environment
from envbuild.jobcheck.diagnose.engine import explain
from envbuild.verify.launch import TRAINER, Bench, Outcome, Running, TrainingJob, network_of, run_program
from envbuild.verify.model import OF_QUICK, Check, Report, Subject, blocked, judge, not_tried
from envbuild.verify.survey import Survey
from envbuild.verify.training_checks import log_tail

# Read by the trainer (ddp_train/imports.py).
IMPORTS = "DDP_TRAIN_IMPORTS"
# The folder of the script of [verify], in the nodes' shared folder.
_SCRIPT = ".script"
_SHOWN = 5
_FILE_TIMEOUT_S = 60.0
_IMPORT = "import sys; sys.path.insert(0, sys.argv[1]); from ddp_train.imports import main; main(sys.argv[2])"
_SIZE = "import os, sys; sys.exit(not (os.path.isfile(sys.argv[1]) and os.path.getsize(sys.argv[1])))"
_RANK0 = re.compile(r"^\[0\.0\]: ?", re.MULTILINE)
# The ranks' own lines begin with their numbers.
_EXIT_CODE = re.compile(r"^E\d{4} .{0,500}?failed \(exitcode: (-?\d{1,9})\)", re.MULTILINE)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": lambda value, bound: value < bound,
    "<=": lambda value, bound: value <= bound,
    ">": lambda value, bound: value > bound,
    ">=": lambda value, bound: value >= bound,
}
_TRENDS: dict[str, Callable[[Sequence[float]], bool]] = {
    "finite": lambda values: bool(values),
    "falls": lambda values: len(values) > 1 and values[-1] < values[0],
    "rises": lambda values: len(values) > 1 and values[-1] > values[0],
}
_TMP = ".envbuild-run-"
_NAME = "run"
_OF_RANK = re.compile(r"\[\d+\.\d+\]:")
# Those before which torchrun writes the rank; str.splitlines has more, such as U+2028 and the form feed.
_LINE_END = re.compile("\r\n?|\n")
# A run has no time limit of its own.
_ENDLESS_S = 10.0 * 365 * 86400


def modules_to_import(settings: VerifySettings, survey: Survey) -> list[str]:
    """Return the modules that every rank imports: the recipe's list, and top-level modules of direct requirements."""
    modules = dict.fromkeys(settings.imports)
    for name in settings.direct:
        distribution = survey.distributions.get(name) or survey.distributions.get(f"{name} (pip)")
        modules |= dict.fromkeys(distribution.modules if distribution and "*" not in settings.imports_except else ())
    return sorted(name for name in modules if name not in settings.imports_except or name in settings.imports)


def check_without_training(bench: Bench, survey: Survey) -> list[Check]:
    """Return the checks `imports` and `command` of an artifact that is verified without training."""
    modules = modules_to_import(bench.settings, survey)
    checks = [check_imports(modules, _import_alone(bench, modules).reports if modules else [])]
    return [*checks, check_command(bench, survey, checks)]


def check_command(bench: Bench, survey: Survey, checks: Sequence[Check]) -> Check:
    """Run the command or script of [verify] and judge it, unless an import failed, by the `checks` so far."""
    if bench.settings.quick:
        return not_tried("command", OF_QUICK)
    spoken = bench.settings.command or bench.settings.script
    if not spoken:
        return not_tried("command", "give `command` or `script` in [verify] of the recipe")
    if any(check.name == "imports" and check.status == FAIL for check in checks):
        return blocked("command", "imports")
    with step(f"running {textwrap.shorten(spoken, 100)} …"):
        return run_command(bench, torchrun=survey.elf.torch is not None or bench.settings.trainer)


def _import_alone(bench: Bench, modules: Sequence[str]) -> Outcome:
    """Import `modules` in one process."""
    settings, folder = bench.settings, bench.nodes.work / PurePath(TRAINER).parent
    report = str(bench.nodes.work / "imports-report.json")
    program = ("python", "-c", _IMPORT, str(folder), report)
    job = TrainingJob("imports", (), 1, 1, settings.timeout_s, program=program, bare=True)
    with bench.launch(job, {IMPORTS: " ".join(modules)}) as running:
        return running.wait()


def check_imports(modules: Sequence[str], reports: Sequence[Report]) -> Check:
    """Check that every rank imported every module of `modules`; "not tried" without modules."""
    if not modules:
        return not_tried("imports", "no module is named, and no direct requirement has one")
    failed: dict[str, dict[str, list[object]]] = {}
    for rank in (rank for report in reports for rank in report.get("ranks", ())):
        results = rank.get("imports") or {}
        for name in modules:
            if problem := masked_forms(str(results.get(name, "not tried: the process ended before it"))):
                failed.setdefault(name, {}).setdefault(problem, []).append(rank.get("rank"))
    lines = [
        f"{name} on rank {', '.join(map(str, ranks))}: {problem}"
        for name, problems in failed.items()
        for problem, ranks in problems.items()
    ]
    ranks = sum(len(report.get("ranks", ())) for report in reports)
    if not ranks:
        lines = ["the process that imports ended before its report"]
    more = [f"{len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return judge(
        "imports",
        not lines,
        seen="; ".join([*lines[:_SHOWN], *more]) or f"{', '.join(modules)} on {ranks} ranks",
        expected=f"{len(modules)} modules imported by every rank",
        evidence={"modules": list(modules), "failed": failed},
    )


def run_command(bench: Bench, *, torchrun: bool) -> Check:
    """Run the command or script of [verify] on the simulated nodes, and judge its results.

    torchrun starts it, or it runs once on each node.
    """
    settings = bench.settings
    program = shlex.split(settings.command or settings.script)
    if settings.script:
        name = f"{_SCRIPT}/{PurePath(program[0]).name}"
        bench.nodes.share({name: settings.script_text.encode()})
        program = ["python", str(bench.nodes.work / name), *program[1:]]
    job = TrainingJob(
        "command",
        (),
        settings.nodes,
        settings.nproc_per_node,
        settings.timeout_s,
        program=tuple(program),
        named=True,
        bare=not torchrun,
    )
    with bench.launch(job, {}) as running:
        outcome = running.wait()
    file, missing = settings.expect.file, False
    if file and not outcome.timed_out:
        log = bench.work / "command-file.log"
        code, _ = run_program(bench.nodes, "python", ["-c", _SIZE, file], {}, log, _FILE_TIMEOUT_S)
        missing = code != 0
    return judge_command(settings.expect, outcome, missing)


def judge_command(expect: ExpectTable, outcome: Outcome, missing: bool = False) -> Check:
    """Check exit codes, metric and file of a command; `missing` is whether its file is missing or empty."""
    values, wrong = metric_values(expect.metric, outcome.log), []
    codes = outcome.returncodes
    if any(codes) and not outcome.job.bare:
        codes = _rank_codes(outcome) or codes
    if outcome.timed_out:
        wrong.append(f"still running after {outcome.seconds:.0f} s; stopped")
    elif any(code != expect.exit_code for code in codes):
        wrong.append(f"exit codes {codes}")
    if expect.metric:
        wrong += _metric_faults(expect, values)
    if missing:
        wrong.append(f"{expect.file} is missing or empty")
    course = f"; {len(values)} values, {values[0]:.6g} -> {values[-1]:.6g}" if values else ""
    shown = [f"exit code {expect.exit_code} on every node"]
    if expect.metric:
        shown.append(
            f"values of {expect.metric!r}: {expect.trend}" + (f", the last {expect.last}" if expect.last else "")
        )
    if expect.file:
        shown.append(f"{expect.file} is there")
    return judge(
        "command",
        not wrong,
        seen="; ".join(wrong) + f"\n{masked_forms(log_tail(outcome.log))}" if wrong else f"exit codes {codes}{course}",
        expected=", ".join(shown),
        cause=explain(outcome.log, "verification") if wrong else "",
        evidence={
            "command": " ".join(outcome.command),
            "returncodes": outcome.returncodes,
            # JSON has no NaN.
            "values": [value if math.isfinite(value) else str(value) for value in values[:1000]],
            "seconds": round(outcome.seconds, 3),
        },
    )


def _rank_codes(outcome: Outcome) -> list[int | None]:
    """Return the exit codes of failed ranks, which torchrun prints; torchrun itself always exits with 1."""
    return [int(code) for code in _EXIT_CODE.findall(outcome.log)]


def metric_values(pattern: str, log: str) -> list[float]:
    """Return the numbers that `pattern` finds in rank 0's lines of `log`, in order; NaN for text that is no number."""
    if not pattern:
        return []
    values = []
    own = [_RANK0.sub("", line) for line in log.splitlines() if _RANK0.match(line)]
    for match in (match for line in own or log.splitlines() for match in re.finditer(pattern, line)):
        try:
            values.append(float(match[1]))
        except (TypeError, ValueError):
            values.append(math.nan)
    return values


def _metric_faults(expect: ExpectTable, values: Sequence[float]) -> list[str]:
    if not values:
        return [f"no line of rank 0 matches {expect.metric!r}"]
    if not all(math.isfinite(value) for value in values):
        return [f"the metric is not finite: {values[-_SHOWN:]}"]
    wrong = []
    if not _TRENDS[expect.trend](values):
        wrong.append(f"the metric does not {expect.trend[:-1]}: {values[0]:.6g} -> {values[-1]:.6g}")
    if (bound := BOUND.fullmatch(expect.last)) and not _COMPARE[bound[1]](values[-1], float(bound[2])):
        wrong.append(f"the metric's last value is {values[-1]:.6g}, not {expect.last}")
    return wrong


def run_program_on_nodes(
    subject: Subject,
    program: Sequence[str],
    environment: Environment,
    folder: Path,
    *,
    nodes: int,
    nproc_per_node: int,
    variables: Mapping[str, str],
    echo: Callable[[str], None],
) -> Outcome:
    """Run `program` as every rank, started by torchrun in `folder`, which images show as their work folder.

    It gets `variables`, too. Each line of output is passed to `echo` when it comes, and starts with [NODE.RANK OF THE
    NODE]. Without torch in the artifact, the program starts once on each node. Raises HostError when the artifact
    cannot run here.
    """
    settings = VerifySettings(nodes=nodes, nproc_per_node=nproc_per_node)
    bare = not subject.isolated and not subject.state.has_torch  # the base of an image may have torch
    if bare and nproc_per_node != 1:
        raise UsageError(
            "the artifact has no torch, and so no torchrun: the program starts once on each node",
            "say --nproc-per-node 1",
        )
    job = TrainingJob(_NAME, (), nodes, nproc_per_node, _ENDLESS_S, program=tuple(program), named=True, bare=bare)
    env = environment.variables
    temporary = Path(tempfile.mkdtemp(prefix=_TMP, dir=folder))  # programs in images see no other folder
    try:
        with (
            tempfile.TemporaryDirectory(prefix="run-", dir=env.get("TMPDIR")) as logs,
            subject.nodes(folder, nodes, env) as opened,
        ):
            network = network_of(subject, opened, (nodes, nproc_per_node), env, environment.site.fabric)
            bench = Bench(opened, Path(logs), settings, subject, network, {})
            extra = {"TMPDIR": str(opened.work / temporary.name), **variables}
            with bench.launch(job, extra) as running:
                followed = _Follower(running, echo)
                outcome = running.wait(followed.poll)
                followed.poll(running)
                return outcome
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Follower:
    """The parts of the nodes' logs that were not echoed yet; torchrun's own lines are echoed only after a failure."""

    def __init__(self, running: Running, echo: Callable[[str], None]) -> None:
        self.echo = echo
        self.read = [0] * len(running.children)
        self.own: list[str] = []

    def poll(self, running: Running) -> None:
        """Echo the complete lines since the last call; after the end, also an incomplete last line."""
        ended = all(child.poll() is not None for child in running.children)
        for node, start in enumerate(self.read):
            with (running.work / f"{running.job.name}-node{node}.log").open("rb") as stream:
                stream.seek(start)
                new = stream.read()
            whole = new if ended else new[: new.rfind(b"\n") + 1]
            self.read[node] += len(whole)
            lines = _LINE_END.split(whole.decode(errors="replace"))
            for line in lines if lines[-1] else lines[:-1]:
                if running.job.bare:
                    self.echo(f"[{node}]: {line}")
                elif _OF_RANK.match(line):
                    self.echo(line)
                else:
                    self.own.append(line)
        if ended and any(child.returncode for child in running.children):
            for line in self.own:
                self.echo(line)
            self.own.clear()


def exit_code(outcome: Outcome) -> int:
    """Return the exit code of a run: the first failed node's, 128 + N for a node ended by signal N, or 0."""
    failed = next((code for code in outcome.returncodes if code), 0)
    return 128 + signal.Signals(-failed) if failed < 0 else failed
