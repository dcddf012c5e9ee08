"""Giving a rendered job to its scheduler."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from envbuild import process
from envbuild.errors import HostError
from envbuild.files import write_atomically
from envbuild.jobs.model import JobPlan, Scheduler

SUFFIXES: dict[Scheduler, str] = {"slurm": ".sbatch", "pbs": ".pbs", "kubernetes": ".yaml"}
# `create`, not `apply`: a finished job of the same name would be left as it is, in silence.
_COMMANDS: dict[Scheduler, tuple[str, ...]] = {
    "slurm": ("sbatch", "--parsable"),
    "pbs": ("qsub",),
    "kubernetes": ("kubectl", "create", "-f"),
}
_SCRIPT, _MANIFEST = 0o755, 0o644


def default_script(plan: JobPlan, folder: Path) -> Path:
    """Where the script of a job goes that is submitted without --out."""
    return folder / f"{plan.name}{SUFFIXES[plan.scheduler]}"


def write_script(text: str, path: Path) -> None:
    """Write the script or manifest atomically. Raises OSError."""
    write_atomically(path, text, _MANIFEST if path.suffix in (".yaml", ".yml") else _SCRIPT)


def submit(plan: JobPlan, script: Path, variables: Mapping[str, str]) -> str:
    """Submit `script` from the job's working folder, whose folder of logs is made first. Returns what the scheduler
    calls the job. Raises HostError with its message when it refuses, or is not here."""
    command = _COMMANDS[plan.scheduler]
    if shutil.which(command[0], path=variables.get("PATH", os.defpath)) is None:
        raise HostError(
            f"{command[0]} is not on PATH: {script} was written and not submitted",
            f"submit it where {plan.scheduler} is: {' '.join(command)} {script}",
        )
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
    done = process.run([*command, str(script.absolute())], env=variables, cwd=work, check=False)
    if done.returncode != 0:
        raise HostError(
            f"{command[0]} refuses {script}:\n{process.tail(done)}",
            "change the site file or the options that it names, then submit again",
        )
    if plan.scheduler == "kubernetes":
        return done.stdout.strip().splitlines()[0]
    # sbatch --parsable: NUMBER[;CLUSTER]; qsub: NUMBER[.SERVER]
    found = re.search(r"^\s*(\d[^\s;]*)", done.stdout, re.MULTILINE)
    return found[1] if found else done.stdout.strip()
