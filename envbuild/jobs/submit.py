"""Giving a rendered job to its scheduler."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from envbuild import process
from envbuild.errors import HostError, UsageError
from envbuild.files import write_atomically
from envbuild.jobs.kubectl import created_job, refusal
from envbuild.jobs.model import JobPlan, Scheduler

SUFFIXES: dict[Scheduler, str] = {"slurm": ".sbatch", "pbs": ".pbs", "kubernetes": ".yaml"}
# `create`, not `apply`: a finished job of the same name would be left as it is, in silence.
_COMMANDS: dict[Scheduler, tuple[str, ...]] = {
    "slurm": ("sbatch", "--parsable"),
    "pbs": ("qsub",),
    "kubernetes": ("kubectl", "create", "-f"),
}
# Source: src/common/slurm_errno.c, src/common/read_config.c of Slurm 22.05; src/cmds/qsub.c of OpenPBS.
_NO_SERVER = re.compile(
    "Unable to contact slurm controller|Could not establish a configuration source|cannot connect to server"
)
_SCRIPT, _MANIFEST = 0o755, 0o644
# What a job is told of itself, which is wrong for one that is submitted from within it: sbatch hands all of its
# environment on, and srun takes options from there. What says where the scheduler is stays, and users' SBATCH_….
# Source: sbatch(1), srun(1); qsub(1B) and src/resmom/start_exec.c of OpenPBS; launchers' numbers as in node_program.
_OF_A_JOB = re.compile(
    r"SLURM_(?!(CONF|CONF_SERVER|CLUSTERS|JWT)$).*|SLURMD_.*"
    r"|PBS_(ENVIRONMENT|JOB.*|NODE.*|NUM_.*|NP|VNODENUM|TASKNUM|MOMPORT|QUEUE|ACCOUNT|ARRAY.*|GPUFILE|WALLTIME|O_.*)"
    r"|OMPI_COMM_WORLD_.*|PMIX_RANK|PMI_(RANK|SIZE|FD)|PALS_RANKID"
)


def default_script(plan: JobPlan, folder: Path) -> Path:
    """Where the script of a job goes that is submitted without --out."""
    return folder / f"{plan.name}{SUFFIXES[plan.scheduler]}"


def unsubmitted(plan: JobPlan, script: Path) -> Path:
    """Where `script` is written until its scheduler has taken it.

    A manifest goes beside `script` first, which may be that of an earlier job: `kubectl delete -f` needs it to remove
    all of that job. sbatch and qsub take a copy and show the path, so theirs is written at once.
    """
    return script.with_stem(f"{script.stem}.new") if plan.scheduler == "kubernetes" else script


def write_script(text: str, path: Path, hint: str, first: Path | None = None) -> None:
    """Write the script or manifest atomically, to `first` when it becomes `path` later. Raises UsageError for a
    folder, HostError where it cannot be written; `hint` says what the caller may change."""
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", hint)
        write_atomically(
            first or path, text, _MANIFEST if path.suffix in (".yaml", ".yml") else _SCRIPT
        )
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}", hint) from error


def outside_of_jobs(variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` as they are outside of any job of Slurm or PBS."""
    return {name: value for name, value in variables.items() if not _OF_A_JOB.fullmatch(name)}


def submit_script(
    plan: JobPlan, text: str, script: Path, variables: Mapping[str, str], hint: str, *, named: bool
) -> str:
    """Write `script` and submit it, as `write_script` and `submit` do. Of a job that is refused nothing stays, but
    what kubectl was given and a script that the caller `named`."""
    _check_command(plan, variables)
    logs = Path(plan.work) / plan.logs
    missing = [one for one in (logs, *logs.parents) if not one.exists()]
    before = script.read_text(encoding="utf-8") if script.is_file() else None
    write_script(text, script, hint, unsubmitted(plan, script))
    try:
        return submit(plan, script, variables)
    except HostError:
        if plan.scheduler != "kubernetes":
            if before is not None and not named:
                write_script(before, script, hint)
            elif not named:
                script.unlink()
            for folder in missing:
                with suppress(OSError):
                    folder.rmdir()
        raise


def _check_command(plan: JobPlan, variables: Mapping[str, str]) -> None:
    command = _COMMANDS[plan.scheduler]
    if shutil.which(command[0], path=variables.get("PATH", os.defpath)) is None:
        raise HostError(
            f"{plan.name} was not submitted: {command[0]} is not on PATH",
            f"run this on a login node, or write the script to a file and give it to `{' '.join(command)}` there",
        )


def submit(plan: JobPlan, script: Path, variables: Mapping[str, str]) -> str:
    """Submit `script`, written to `unsubmitted`, from the job's working folder, whose folder of logs is made first.
    Returns what the scheduler calls the job. Raises HostError with its message when it refuses, or is not here."""
    _check_command(plan, variables)
    command, written = _COMMANDS[plan.scheduler], unsubmitted(plan, script)
    work = Path(plan.work)
    if plan.scheduler == "kubernetes":
        work = Path()
    else:
        try:
            (work / plan.logs).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(
                f"{work / plan.logs}: {error.strerror}: the job could not write its output there",
                "choose a folder that nodes see with --work, or [paths] shared in the site file",
            ) from error
    line = [*command, str(written.absolute())]
    done = process.run(line, env=outside_of_jobs(variables), cwd=work, check=False)
    if plan.scheduler == "kubernetes":
        if done.returncode != 0:
            raise refusal(done, written, script)
        sys.stderr.write(done.stderr)  # such as pods that PodSecurity is going to refuse
        written.replace(script)
        return created_job(done.stdout)
    if done.returncode != 0 and _NO_SERVER.search(f"{done.stdout}{done.stderr}"):
        tool = "scontrol ping" if plan.scheduler == "slurm" else "qstat -B"
        raise HostError(
            f"{plan.name} was not submitted: {plan.scheduler} does not answer:\n{process.tail(done)}",
            f"run this on a login node of the cluster; `{tool}` tells whether its server is up",
        )
    if done.returncode != 0:
        raise HostError(
            f"{command[0]} refuses {script}:\n{process.tail(done)}",
            "change the site file or the options that it names, then submit again",
        )
    # sbatch --parsable: NUMBER[;CLUSTER]; qsub: NUMBER[.SERVER]
    found = re.search(r"^\s*(\d[^\s;]*)", done.stdout, re.MULTILINE)
    return found[1] if found else done.stdout.strip()
