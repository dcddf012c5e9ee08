"""The preflight of existing nodes: nodes of an allocation, or hosts that ssh reaches.

It runs the script that `envbuild job` would submit, without the training and directly, so that it checks the
conditions of a real job.
"""

from __future__ import annotations

import os
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

from envbuild.base.errors import HostError, UsageError
from envbuild.data.schedulers import listed
from envbuild.jobs.model import JobPlan
from envbuild.jobs.schedulers import SCHEDULERS, render

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
