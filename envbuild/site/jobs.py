"""Tables of site.toml about jobs: scheduler, modules, paths, containers and nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from envbuild.site.schedulers import LAUNCHER_NAMES, LAUNCHERS, SCHEDULER_NAMES, TITLES
from envbuild.toml import form, key

# Excludes TOKENIZERS_PARALLELISM, BYPASS and COMPASS_HOME.
_SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|(?<!BY)(?<!COM)PASS(W|PHRASE|$|_)|CREDENTIAL|API_?KEY|PRIVATE", re.I)
_DEFAULT_LAUNCHERS = ", ".join(f"{known[0]} on {TITLES[name]}" for name, known in LAUNCHERS.items() if known)
# A time limit: [D-]HH:MM:SS.
TIME_PATTERN = r"(\d{1,4}-)?\d{1,3}:\d{2}:\d{2}"
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = r"^\S*$"
_ABSOLUTE = r"^(/\S*)?$"


def job_variable_problem(name: str) -> str | None:
    """Return why `name` may not be a variable of jobs, or None: other users read job scripts, so no secrets."""
    if not _SHELL_NAME.fullmatch(name):
        return f"{name!r} is not the name of a variable"
    if _SECRET.search(name):
        return (
            f"{name!r} sounds like a secret: job scripts and receipts are read by others; "
            "let the job read it from a file that only you may read"
        )
    return None


def line_problem(text: str) -> str | None:
    """Return why `text` is not one line, or None."""
    return None if text.isprintable() and text.strip() == text and text else "is not one line of text"


def value_problem(value: str) -> str | None:
    """Return why `value` may not be the value of a variable, or None: job scripts show it, so no passwords in URLs."""
    if not value.isprintable():
        return "a variable's value is text on one line"
    if re.search(r"://[^/\s@]+:[^/\s@]+@", value):
        return "holds a password, and job scripts are read by others; use a proxy or mirror that needs none"
    return None


def time_problem(text: str) -> str | None:
    """Return why `text` is not a time limit, or None."""
    found = re.fullmatch(TIME_PATTERN, text)
    if found and re.search("[1-9]", text):
        return None
    return f"{text!r} is no time {'at all' if found else 'limit'}: HH:MM:SS or D-HH:MM:SS, such as 04:00:00"


mount_problem = form(r"/[^:,\s]*(:/[^:,\s]*)?", "is not /PATH or /HOST:/CONTAINER")


@dataclass(frozen=True, slots=True)
class SchedulerTable:
    """`[scheduler]`: the scheduler of jobs and its options."""

    kind: str = key("none", "The scheduler.", choices=("none", *SCHEDULER_NAMES), example="slurm")
    partition: str = key("", "Partition (Slurm) or queue (others).", pattern=_WORD, example="gpu")
    account: str = key("", "Who pays.", pattern=_WORD, example="project_1234")
    qos: str = key("", "Slurm's quality of service.", pattern=_WORD)
    constraint: str = key(
        "", "Which nodes: Slurm's --constraint, each chunk of PBS's select, LSF's select[…], Flux's --requires.",
        pattern=_WORD, example="icelake",
    )  # fmt: skip
    time: str = key(
        "01:00:00", "Most time of a job, HH:MM:SS or D-HH:MM:SS.",
        pattern=f"^{TIME_PATTERN}$", check=time_problem, example="04:00:00",
    )  # fmt: skip
    exclusive: bool = key(True, "Whether jobs have their nodes alone.")
    requeue: bool = key(True, "Whether a job whose node failed starts again.")
    auto_resume: bool = key(False, "SageMaker HyperPod's --auto-resume=1 for srun.")
    launcher: str | None = key(
        None, f"What starts torchrun on every node. Default: {_DEFAULT_LAUNCHERS}.", choices=LAUNCHER_NAMES
    )
    directives: tuple[str, ...] = key(
        (), "More lines for the scheduler, without #SBATCH, #PBS, #BSUB or #flux:.",
        check=line_problem, example=["--mail-type=END"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModulesTable:
    """`[modules]`: environment modules, loaded exactly like this at build and at run time."""

    init: str = key(
        "", "File that defines `module` where login shells do not.", pattern=_ABSOLUTE, example="/etc/profile.d/lmod.sh"
    )
    purge: bool = key(True, "Unload what is loaded first.")
    build: tuple[str, ...] = key(
        (), "Modules for building environments.", check=line_problem, example=["python/3.11.7", "cuda/12.6"]
    )
    run: tuple[str, ...] = key((), "Modules for jobs.", check=line_problem, example=["python/3.11.7", "cuda/12.6"])


@dataclass(frozen=True, slots=True)
class PathsTable:
    """`[paths]`: file systems, as seen from the nodes."""

    shared: str = key(
        "", "What all nodes see: artifacts, snapshots and logs belong here.", pattern=_ABSOLUTE, example="/fsx/{user}"
    )
    scratch: str = key("", "A node's own fast disk, for temporary files.", pattern=_ABSOLUTE, example="/scratch/{user}")
    cache: str = key("", "Caches of pip, Apptainer and enroot, off $HOME.", pattern=_ABSOLUTE)
    logs: str = key("logs", "Folder of the jobs' output, below the working folder.", pattern=r"^\S+$")


@dataclass(frozen=True, slots=True)
class ContainerTable:
    """`[container]`: the container runtime of the nodes."""

    runtime: Literal["none", "pyxis", "enroot", "apptainer"] = key("none", "What the nodes have.", example="pyxis")
    mounts: tuple[str, ...] = key(
        (), "What containers see of the host: /PATH, or /HOST:/CONTAINER.", check=mount_problem, example=["/fsx:/fsx"]
    )


@dataclass(frozen=True, slots=True)
class NodeTable:
    """`[node]`: resources of one node."""

    gpus: int = key(0, "GPUs.", minimum=0, example=8)
    cpus: int = key(
        0,
        "CPUs as the scheduler counts them, Slurm by threads: CPUTot of `scontrol show node`. 0: not said.",
        minimum=0,
    )
    arch: Literal["x86_64", "aarch64"] | None = key(
        None, "Processors. An artifact for others is refused.", example="aarch64"
    )
    memory: str = key("", "Memory for a job.", pattern=r"^(\d+[KMGT]?)?$", example="480G")
