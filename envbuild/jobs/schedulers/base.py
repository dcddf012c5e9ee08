"""The interface of a scheduler."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.base.errors import HostError
from envbuild.jobcheck.lint.directives import ScriptFacts
from envbuild.jobs.model import JobPlan, Launcher
from envbuild.jobs.quote import directive_line

# At the limit itself, schedulers signal every process of a job, also those that serve a container's files.
_SAVING_S = 120


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue (a partition, in Slurm).

    None and "" mean that the scheduler does not tell. `time` is the time limit in Slurm's form; `cpus`,
    `memory` (in MB) and `gpus` are per node; `nodes` is the number of nodes. `gpu_types` are the scheduler's names.
    """

    name: str
    default: bool | None = None
    time: str = ""
    cpus: int | None = None
    memory: int | None = None
    gpus: int | None = None
    nodes: int = 0
    gpu_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """A question to the scheduler that changes nothing.

    `render` makes the file that follows `command`. `unchecked` returns why a failure says nothing about the job, ""
    if it does, and `refusal` makes the error from the output and the job's name.
    """

    command: tuple[str, ...]
    render: Callable[[JobPlan], str]
    unchecked: Callable[[subprocess.CompletedProcess[str]], str]
    refusal: Callable[[subprocess.CompletedProcess[str], str], HostError]


@dataclass(frozen=True, slots=True)
class Submission:
    """The way to submit a job to a scheduler.

    `command` is followed by the file, or reads it from standard input if `stdin` is set. `job` extracts the
    job's number from the output, `no_server` is a pattern of the message that no server answers, and `ping` is
    the command that shows whether one does. `refusal` makes the error from the output, the refused file and
    that of an earlier job; without it, the error shows the scheduler's message. `trial` makes what the scheduler is
    asked about before the job is submitted.
    """

    command: tuple[str, ...]
    job: Callable[[str], str]
    no_server: str = ""
    ping: str = ""
    stdin: bool = False
    refusal: Callable[[subprocess.CompletedProcess[str], Path, Path], HostError] | None = None
    trial: Trial | None = None


@dataclass(frozen=True, slots=True)
class AllocationFacts:
    """The way to find the allocation around a shell.

    `find` returns the number of nodes and the job, None outside of an allocation, and raises UsageError if it
    cannot tell. `variable` and `command` are for messages.
    """

    find: Callable[[Mapping[str, str]], tuple[int, str] | None]
    variable: str
    command: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about a scheduler's commands, for `envbuild doctor` and `envbuild site`.

    `version` are the options that make the submitting command print its version. `list_queues` prints the
    queues, and `queues` parses that output. `queue` is the scheduler's word for a queue. `examples` are lines
    that `envbuild site init` suggests: (key of [scheduler], value, reason). `job` and `nodes` are variables of
    a job.
    """

    version: tuple[str, ...]
    list_queues: tuple[str, ...]
    queues: Callable[[str], list[Queue]]
    job: str = ""
    nodes: str = ""
    queue: str = "queue"
    examples: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A scheduler.

    `render` returns the script or manifest of a plan and raises UsageError for values that it cannot express;
    `directives` returns its lines that request resources, None if jobs are pods of images, without scripts.
    `launchers` are those of its row in data/schedulers.toml. `suffix` is the suffix of the file. `site_keys`
    are the keys of [scheduler] and [node] that this scheduler supports, among those that not all schedulers
    know. `job_variables` matches the variables that describe a running job. `own_option` names the setting of a
    site's directive that jobs set themselves, None for others. `exclusive_has_cpus`: a job with exclusive nodes
    gets all of their CPUs by default. `own_log`: the script writes the log itself, because the scheduler shows
    the output late or not at all. `leaves_out_nodes`: a job can put itself back into the queue without some nodes.
    """

    suffix: str
    render: Callable[[JobPlan], str]
    submission: Submission
    directives: Callable[[JobPlan], list[str]] | None = None
    launchers: Mapping[str, Launcher] = field(default_factory=dict)
    site_keys: frozenset[str] = frozenset()
    job_variables: str = "(?!)"
    own_option: Callable[[str], str | None] = lambda _: None
    exclusive_has_cpus: bool = True
    own_log: bool = False
    leaves_out_nodes: bool = False
    allocation: AllocationFacts | None = None
    script: ScriptFacts | None = None
    host: HostFacts | None = None

    @property
    def pods(self) -> bool:
        """Whether jobs are pods of images, without scripts, login nodes and folders that both see."""
        return self.directives is None


def first_number(printed: str) -> str:
    """Return the job's number from a line of `printed` that begins with it: NUMBER[.SERVER], NUMBER;CLUSTER."""
    number = re.search(r"^\s*(\d[^\s;]*)", printed, re.MULTILINE)
    return number[1] if number else printed.strip()


def with_site(
    own: Sequence[str], directives: Sequence[str], keys: Callable[[str], Collection[str]], marker: str
) -> list[str]:
    """Return the lines of a job's directives: those of the site after those of envbuild, which they replace.

    `keys` returns the names of what a directive, without its `marker`, sets; a line of `own` that sets one of the
    site's is left out, because schedulers differ in which of two lines wins. Raises UsageError for what is no line.
    """
    replaced = {key for line in directives for key in keys(line)}
    kept = [line for line in own if not replaced & {*keys(line)}]
    return [f"{marker} {line}" for line in (*kept, *map(directive_line, directives))]


def seconds(time: str) -> int:
    """Return the seconds of a time limit, [D-]HH:MM:SS."""
    days, _, clock = time.rpartition("-")
    hours, minute, second = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minute) * 60 + second


def minutes(time: str) -> int:
    """Return the minutes of a time limit, [D-]HH:MM:SS, rounded up."""
    return -(-seconds(time) // 60)


def saving_s(time: str) -> int:
    """Return how many seconds before its time limit a job is told to end."""
    return min(_SAVING_S, seconds(time) // 10)


def time_left(time: str, line: str, lines: Collection[str]) -> int | None:
    """Return after how many seconds a script tells its training to end, so that it saves its state before `time`.

    None if the site's directives replaced `line`, the directive with that limit: the script does not know theirs.
    """
    return seconds(time) - saving_s(time) if line in lines else None
