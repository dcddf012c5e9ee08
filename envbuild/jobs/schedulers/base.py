"""What the package has to know of a scheduler."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.errors import HostError
from envbuild.jobs.model import JobPlan, Launcher

# A line of a script that tells a scheduler something: its number and words.
Directive = tuple[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue, by Slurm a partition. None and "" where the scheduler does not tell: whether it is the default, its
    time limit (Slurm's form), CPUs, memory in MB and GPUs of one node, the number of nodes."""

    name: str
    default: bool | None = None
    time: str = ""
    cpus: int | None = None
    memory: int | None = None
    gpus: int | None = None
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """How a scheduler is given a job: `command` is followed by the file, or reads it from standard input where `stdin`
    is set. `job` finds the number in its answer, `no_server` tells that nothing answered, and `ping` is the command
    that shows whether something does. `refusal` makes the error of a refusal from the answer, the file that was
    refused and that of an earlier job; without it the scheduler's message is the error's."""

    command: tuple[str, ...]
    job: Callable[[str], str]
    no_server: str = ""
    ping: str = ""
    stdin: bool = False
    refusal: Callable[[subprocess.CompletedProcess[str], Path, Path], HostError] | None = None


@dataclass(frozen=True, slots=True)
class AllocationFacts:
    """How a shell knows the nodes that it was given: `find` returns how many there are and the job, None outside of
    one, and raises UsageError where that cannot be told. `variable` and `command` are for messages."""

    find: Callable[[Mapping[str, str]], tuple[int, str] | None]
    variable: str
    command: str


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """What `envbuild lint-job` has to know of scripts: `marker` begins a directive, `variables` the names of the
    scheduler's own; `nodes` finds (line, number of nodes asked for) in directives. A script that saves snapshots should
    have one of `requeue`, where there are any. `pattern` matches markers that are written in several ways."""

    marker: str
    variables: str
    nodes: Callable[[Iterable[Directive]], tuple[int, int] | None]
    requeue: frozenset[str] = frozenset()
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What `envbuild doctor` and `envbuild site` have to know: `version` are options of the command that submits, for
    its version. `list_queues` prints the queues, which `queues` reads. `queue` is what it calls one. `examples` are
    lines that `envbuild site init` suggests: (key of [scheduler], value, why). `job` and `nodes` are variables of a
    job."""

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

    `render` returns the script or manifest of a plan and raises UsageError for what it cannot express; `directives`
    those of its lines that ask for resources, None where jobs are pods of images, without scripts. `launchers` are
    those of its row in data/schedulers.toml. `suffix` is that of the file. `site_keys` are the keys of [scheduler] and
    [node] that have a meaning here, of those that not all schedulers know. `job_variables` matches the variables that a
    job is told of itself. `own_option` says what a directive of the site sets that jobs set themselves, None for
    others. `exclusive_has_cpus`: a job that has its nodes alone has all of their CPUs, unasked. `own_log`: the script
    itself writes the log, for the scheduler shows the output late or not at all.
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
    allocation: AllocationFacts | None = None
    script: ScriptFacts | None = None
    host: HostFacts | None = None

    @property
    def pods(self) -> bool:
        """Whether jobs are pods of images, without scripts, login nodes and folders that both see."""
        return self.directives is None


def first_number(printed: str) -> str:
    """The number of a job where a line of `printed` begins with it: NUMBER[.SERVER], NUMBER;CLUSTER."""
    found = re.search(r"^\s*(\d[^\s;]*)", printed, re.MULTILINE)
    return found[1] if found else printed.strip()


def option_values(words: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """The values in `words` of the options of these names: --NAME=VALUE, --NAME VALUE, -N VALUE, -NVALUE."""
    for number, word in enumerate(words):
        name, equal, value = word.partition("=")
        if name in names:
            yield value if equal else "".join(words[number + 1 : number + 2])
        elif len(word) > 2 and word[:2] in names and word[1] != "-":
            yield word[2:]


def minutes(time: str) -> int:
    """The minutes of a time limit, [D-]HH:MM:SS, rounded up."""
    days, _, clock = time.rpartition("-")
    hours, minute, second = map(int, clock.split(":"))
    return (int(days or 0) * 24 + hours) * 60 + minute + (second > 0)
