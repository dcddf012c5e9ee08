"""The job as its script describes it: the file settings-RESTARTS.sh in the run's folder, which every node sees.

The file is a shell script, because the batch script and container runtimes use its variables too. Variables of an
image cannot override it, and launchers need not pass anything on.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import BAD_INPUT, TrainError, os_reason

# The variable in the file that is not for processes: the fields of Job as JSON.
JOB = "ENVBUILD_JOB"
# Network file systems may show a new file late.
_LATE_S = 20


@dataclass(frozen=True)
class Job:
    """A job.

    `launcher` starts this program, and tells its number in one of the variables `number`, unless the script does.
    `strategy` is ddp, accelerate, deepspeed, horovod or single. `command` is a script or -m MODULE, and its arguments;
    `run_files` maps options of it to names of files in the run's folder. `environment` is the folder of an environment
    that must be activated, of conda if `conda` is set. `check` are the preflight's options. `endpoint` is etcd's, ""
    for a rendezvous on the first node. `signalled` means that the launcher sends SIGURG to all processes to end the
    job, and `exit_codes` that it would end all nodes when one exits with an error. `chips` are those that the
    environment has code for, () for no limit.
    """

    name: str
    python: str
    nodes: int
    nproc_per_node: int
    command: tuple[str, ...] = ()
    launcher: str = ""
    number: tuple[str, ...] = ()
    strategy: str = "ddp"
    run_files: Mapping[str, str] = field(default_factory=dict)
    environment: str = ""
    conda: bool = False
    library_path: str = ""
    interface: str = ""
    gpu: bool = False
    chips: tuple[str, ...] = ()
    max_restarts: int = 3
    join_timeout_s: int = 900
    read_timeout_s: int = 300
    endpoint: str = ""
    check: tuple[str, ...] = ()
    auto_resume: bool = False
    signalled: bool = False
    exit_codes: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One start of a job. `folder` is the run's own; the scheduler started the job `restarts` times before."""

    job: Job
    folder: Path
    restarts: str

    @property
    def id(self) -> str:
        """The name under which the nodes meet: another one for each start."""
        number = self.folder.name[len(self.job.name) + 1 :]
        return f"{self.job.name}-{number}-{self.restarts}"

    @property
    def first_port(self) -> int:
        """The port where the search for a free one begins, from the job's number, and that in its array: 12_3_.head."""
        ids = re.search("([0-9]+)(?:_([0-9]+)_)?", self.folder.name[len(self.job.name) + 1 :])
        number, element = (int(group or 0) for group in ids.groups()) if ids else (0, 0)
        return 20000 + (number + 7919 * element) % 10000

    def failed(self, code: int) -> None:
        """Keep `code` as the job's exit code if this node is the first to fail.

        Launchers report the largest code of all nodes, which is mostly that of one that they ended themselves.
        """
        if self.job.auto_resume:  # srun starts the node again
            return
        with suppress(OSError), open(self.file("failed"), "x", encoding="utf-8") as first:
            first.write(f"{code}\n")

    def file(self, name: str) -> Path:
        """Return the path of this start's file `name`: NAME-RESTARTS, or NAME-RESTARTS.NUMBER for NAME.NUMBER."""
        stem, dot, number = name.partition(".")
        return self.folder / f"{stem}-{self.restarts}{dot}{number}"


def read_run(path: Path) -> Run:
    """Return the run whose settings are in the file `path`. Raises TrainError."""
    late = time.monotonic() + _LATE_S
    while not path.exists() and time.monotonic() < late:
        time.sleep(0.2)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TrainError(f"{path}: {os_reason(error)}: it must be on a file system that all nodes see") from error
    variables = dict(read_variables(text))
    try:
        fields = json.loads(variables.pop(JOB))
        lists = {name: tuple(items) for name, items in fields.items() if isinstance(items, list)}
        job = Job(**{**fields, **lists}, variables=variables)
    except (KeyError, TypeError, ValueError) as error:
        raise TrainError(
            f"{path} does not fit this ddp_train: {error}; build the artifact and render the job with one envbuild",
            BAD_INPUT,
        ) from error
    return Run(job, path.absolute().parent, path.stem.rpartition("-")[2])


def read_variables(text: str) -> list[tuple[str, str]]:
    """Return the variables of a shell script that consists of comments, NAME=VALUE and `export NAME=VALUE`."""
    words = shlex.split(text, comments=True)
    pairs = (word.partition("=") for word in words if word != "export")
    return [(name, value) for name, _, value in pairs]


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
