"""The submission of a rendered job to its scheduler, the error for a site without one, and the preflight of nodes.

The preflight of existing nodes (of an allocation, or hosts that ssh reaches) runs the script that `envbuild job` would
submit, without the training and directly, so that it checks the conditions of a real job.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from envbuild.base import process
from envbuild.base.atomic import write_beside
from envbuild.base.errors import HostError, UsageError
from envbuild.data.schedulers import SCHEDULER_NAMES, listed
from envbuild.jobs.model import JobInputs, JobPlan, JobRequest
from envbuild.jobs.plan import command_of
from envbuild.jobs.schedulers import SCHEDULERS, render
from envbuild.jobs.schedulers.base import Submission, Trial
from envbuild.runtimes.base import torchrun_word
from envbuild.site.settings import Site

_SCRIPT, _MANIFEST = 0o755, 0o644
# Variables that describe a running job, and are wrong for a job that is submitted from within it. The
# launchers' variables are the process numbers in jobs/launchers.py.
_OF_A_JOB = re.compile(
    "|".join(scheduler.job_variables for scheduler in SCHEDULERS.values())
    + r"|OMPI_COMM_WORLD_.*|PMIX_RANK|PMI_(RANK|SIZE|FD)|PALS_RANKID"
)

# The line of every script and manifest that tells what made it.
_OWN = re.compile(r"^# envbuild [^\s:]+: ", re.MULTILINE)


def default_script(plan: JobPlan, folder: Path) -> Path:
    """Return the path of a submitted job's script without --out."""
    return folder / f"{plan.name}{SCHEDULERS[plan.scheduler].suffix}"


def pending_path(plan: JobPlan, script: Path) -> Path:
    """Return the path at which `script` is written until its scheduler has accepted it.

    `script` may be the manifest of an earlier job, which `kubectl delete -f` needs to remove that job, so a new
    manifest is first written beside it. Other schedulers copy the script and show its path, so it is written at
    once.
    """
    return script.with_stem(f"{script.stem}.new") if SCHEDULERS[plan.scheduler].pods else script


def write_script(text: str, path: Path, hint: str, first: Path | None = None) -> None:
    """Write the script or manifest atomically, to `first` if it becomes `path` later.

    Raises UsageError if `path` is a folder, HostError if it cannot be written; `hint` is the advice in these
    errors.
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", hint)
        write_beside(first or path, text, _MANIFEST if path.suffix in (".yaml", ".yml") else _SCRIPT)
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}", hint) from error


def outside_of_jobs(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` without the ones that describe a running job."""
    return {name: value for name, value in variables.items() if not _OF_A_JOB.fullmatch(name)}


def submit_script(
    plan: JobPlan, text: str, script: Path, variables: Mapping[str, str], hint: str, *, named: bool
) -> str:
    """Write `script` and submit it, like `write_script` and `submit`.

    If the job is refused, the previous state is restored, except for a manifest that kubectl got and a script that the
    caller `named`. Raises UsageError for a script that envbuild did not write, unless the caller `named` it.
    """
    _check_command(plan, variables)
    logs = Path(plan.work) / plan.logs
    missing = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    before = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else None
    if before is not None and not named and not _OWN.search(before):
        raise UsageError(
            f"{script} was not written by envbuild and is not overwritten",
            "choose another file with --out, or another --name",
        )
    write_script(text, script, hint, pending_path(plan, script))
    try:
        return submit(plan, script, variables)
    except HostError:
        if not SCHEDULERS[plan.scheduler].pods:
            if before is not None and not named:
                write_script(before, script, hint)
            elif not named:
                script.unlink()
            for folder in missing:
                with suppress(OSError):
                    folder.rmdir()
        raise


def _check_command(plan: JobPlan, variables: Mapping[str, str]) -> None:
    submission = SCHEDULERS[plan.scheduler].submission
    program = submission.command[0]
    if shutil.which(program, path=variables.get("PATH", os.defpath)) is None:
        line = " ".join(submission.command) + (" <FILE" if submission.stdin else "")
        raise HostError(
            f"{plan.name} was not submitted: {program} is not on PATH",
            f"run this on a login node, or write the script to a file and give it to `{line}` there",
        )


def submit(plan: JobPlan, script: Path, variables: Mapping[str, str]) -> str:
    """Submit `script`, written to `pending_path`, from the job's working folder, after creating the folder of logs.

    Returns the scheduler's name of the job. Raises HostError when the scheduler refuses it or is not available.
    """
    _check_command(plan, variables)
    chosen = SCHEDULERS[plan.scheduler]
    submission, written = chosen.submission, pending_path(plan, script)
    work = Path(plan.work)
    if chosen.pods:
        work = Path()
    else:
        try:
            (work / plan.logs).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(
                f"{work / plan.logs}: {error.strerror}: the job could not write its output there",
                "choose a folder that nodes see with --work, or [paths] shared in the site file",
            ) from error
    env = outside_of_jobs(variables)
    warned = _try(plan, submission.trial, env) if submission.trial else ""
    done = _ask(submission, written, env, work)
    if submission.refusal is not None:
        if done.returncode != 0:
            raise submission.refusal(done, process.tail(done), written, script)
        # For example of pods that PodSecurity will refuse.
        sys.stderr.write("".join(line for line in done.stderr.splitlines(keepends=True) if line not in warned))
        written.replace(script)
        return submission.job(done.stdout)
    output = f"{done.stdout}{done.stderr}"
    if done.returncode != 0 and re.search(submission.no_server, output):
        raise HostError(
            f"{plan.name} was not submitted: {plan.scheduler} does not answer:\n{process.tail(done)}",
            f"run this on a login node of the cluster; `{submission.ping}` shows whether its server is up",
        )
    if done.returncode != 0:
        raise HostError(
            f"{submission.command[0]} refuses {script}:\n{process.tail(done)}",
            "change the site file or the options that it names, then submit again",
        )
    return submission.job(done.stdout)


def _try(plan: JobPlan, trial: Trial, env: Mapping[str, str]) -> str:
    """Test the job with the scheduler; show and return its warnings. Raises HostError if the scheduler refuses it."""
    try:
        with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
            file = Path(folder) / "trial.yaml"
            file.write_text(trial.render(plan), encoding="utf-8")
            done = process.run([*trial.command, str(file)], env=env, check=False)
    except OSError as error:
        where = error.filename or tempfile.gettempdir()
        raise HostError(f"{where}: {error.strerror}", "set TMPDIR to a folder with disk space") from error
    if done.returncode == 0:
        sys.stderr.write(done.stderr)
        return done.stderr
    if reason := trial.unchecked(done):
        print(f"envbuild: whether the cluster takes the job's pods was not checked: {reason}", file=sys.stderr)
        return ""
    raise trial.refusal(done, process.tail(done), plan.name)


def _ask(submission: Submission, script: Path, env: Mapping[str, str], work: Path) -> subprocess.CompletedProcess[str]:
    path = str(script.absolute())
    line = [*submission.command, path]
    if submission.stdin:  # the shell opens the file, because process.run gives programs no input
        line = ["sh", "-c", 'script=$1 && shift && exec "$@" <"$script"', "sh", path]
        line += submission.command
    return process.run(line, env=env, cwd=work, check=False)


def no_scheduler_error(request: JobRequest, opened: JobInputs, site: Site) -> UsageError:
    """Return the error for a job on a site without a scheduler; its hint shows how to train on this host."""
    names = "|".join(SCHEDULER_NAMES)
    hint = f"name a cluster's site (--site SITE, `envbuild site list`) or --scheduler {names}"
    if opened.artifact.of_kind.form != "registry":
        hint = f"to train on this host: `{_command(request, opened)}`; for a cluster, {hint}"
    return UsageError(f"site {site.name} names no scheduler to submit jobs to", hint)


def _command(request: JobRequest, opened: JobInputs) -> str:
    """Return the command for one node of the job: torchrun, or the strategy's launcher, in the artifact."""
    artifact = opened.artifact
    command, _, _ = command_of(request, opened, pods=False)
    ranks = str(request.nproc_per_node or (opened.verify and opened.verify.nproc_per_node) or 2)
    # Each launcher but mpirun can start a rank for each GPU.
    all_gpus = artifact.accelerator.gpu and request.nproc_per_node is None
    start = [artifact.python]
    if request.strategy == "ddp":
        ranks = "gpu" if all_gpus else ranks
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command = tuple(torchrun_word(word) for word in command)
    if request.strategy == "accelerate":
        start += ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
        start += [] if all_gpus else ["--num_processes", ranks]
        command = tuple(torchrun_word(word) for word in _with_module_option(command))
    if request.strategy == "deepspeed":
        start += ["-m", "deepspeed.launcher.runner", *([] if all_gpus else ["--num_gpus", ranks])]
        start += ["--no_local_rank"] if command[:2] == ("-m", "ddp_train") else []
        command = _with_module_option(command)
    if request.strategy == "horovod":
        start = ["mpirun", "-np", ranks, *start]
    if artifact.of_kind.form == "file":
        see = ["--bind", str(request.current.absolute())]
        start = [request.envbuild, "run", *see, artifact.path, "--", *start]
    return shlex.join([*start, *command])


def _with_module_option(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return `-m MODULE …` in the form of Accelerate's and DeepSpeed's launchers, and a script as it is."""
    return ("--module", *command[1:]) if command[0] == "-m" else command


NAME = "preflight"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Allocated nodes.

    `nodes` is their number, `launcher` starts processes on them (None: the site's launcher), and `job`
    identifies the job for the script of `scheduler`. Hosts that ssh reaches use the script of PBS, which reads
    host names from a file.
    """

    scheduler: str
    nodes: int
    job: str
    launcher: Literal["ssh"] | None = None
    hosts: tuple[str, ...] = ()


def find_allocation(hosts: Sequence[str], env: Mapping[str, str]) -> Allocation:
    """Return an allocation of `hosts`, reached by ssh, or else the one around this shell.

    Raises UsageError when there is none, or for host names that are repeated or invalid.
    """
    if hosts:
        twice = sorted({host for host in hosts if hosts.count(host) > 1})
        if twice:
            raise UsageError(f"{', '.join(twice)} is given twice", "name every node once")
        for host in hosts:
            if not host or host.startswith("-") or any(character.isspace() for character in host):
                raise UsageError(f"{host!r} is not the name of a host", "--host n1,n2")
        return Allocation("pbs", len(hosts), f"{os.getpid()}.ssh", "ssh", tuple(hosts))
    known = {name: scheduler.allocation for name, scheduler in SCHEDULERS.items() if scheduler.allocation}
    for name, facts in known.items():
        if allocation := facts.find(env):
            return Allocation(name, *allocation)
    variables = tuple(facts.variable for facts in known.values())
    commands = tuple(f"`{facts.command}`" for facts in known.values())
    raise UsageError(
        f"this is not inside of an allocation: neither {listed(variables, 'nor')} is set",
        f"use {listed(commands)}, name nodes that ssh reaches by --host H1,H2, or start a job with it:"
        " `envbuild job --preflight`",
    )


def alone(plan: JobPlan) -> JobPlan:
    """Return `plan` without its training."""
    return replace(plan, preflight=True, command=(), run_files=())


def run_now(plan: JobPlan, allocation: Allocation, env: Mapping[str, str]) -> int:
    """Run the preflight of `plan` on the nodes of `allocation`, with output to this process's stderr.

    Returns the script's exit code: 5 if a job would fail on these nodes. Raises HostError when the working
    folder is not writable, UsageError for values that the script cannot express.
    """
    text = render(plan)
    work = Path(plan.work)
    try:
        (work / plan.logs).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".envbuild-preflight-", dir=work))
    except OSError as error:
        raise HostError(
            f"{work}: {(error.strerror or str(error)).lower()}: cannot create the run's folder there",
            "name a folder that all nodes see with --work, or in [paths] shared of the site file",
        ) from error
    # The nodes come only from the scheduler's own variables; the script does the rest.
    variables = dict(env)
    if allocation.hosts:
        variables |= {"PBS_JOBID": allocation.job, "PBS_NODEFILE": str(folder / "nodes"), "PBS_O_WORKDIR": plan.work}
    cleaned = "".join(character if character.isalnum() or character in "_.-" else "_" for character in allocation.job)
    run = work / f"{plan.name}_{cleaned}"
    log = work / plan.logs / f"{plan.name}_{cleaned}.out"
    begun = log.stat().st_size if log.exists() else 0
    try:
        (folder / "nodes").write_text("".join(f"{host}\n" for host in allocation.hosts))
        (folder / "script").write_text(text)
        code = _bash(folder / "script", variables, work)
        if SCHEDULERS[plan.scheduler].own_log:
            _show(log, begun)
            with suppress(OSError):
                log.unlink() if not begun else None
        return code
    finally:
        inventory = plan.site.host_stack.inventory
        if inventory and not os.path.exists(inventory):
            with suppress(OSError):  # none was written, or the site's folder is another's
                write_beside(Path(inventory), (run / "host_stack.json").read_text(encoding="utf-8"))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(run, ignore_errors=True)


def _bash(script: Path, env: Mapping[str, str], work: Path) -> int:
    """Run the script to its end; Ctrl-C ends it in order."""
    process = subprocess.Popen(
        ["bash", str(script)], env=dict(env), cwd=work, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()
    )
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)


def _show(log: Path, begun: int) -> None:
    with suppress(OSError), log.open("rb") as file:
        file.seek(begun)
        sys.stderr.write(file.read().decode(errors="replace"))
        sys.stderr.flush()
