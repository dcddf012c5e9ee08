"""The interface of a scheduler, and the launchers that several schedulers share.

A launcher defines `everywhere`, the bash function of a job's script that runs a step on every node; `stop`, `nodes`,
`hosts`, `restarts`, `launch`, `settings` and ENVBUILD_RUN are defined by the script. One of them is the loop over nodes
for launchers that start one process at a time.
Sources: mpirun(1) of Open MPI 4 and 5, mpiexec of MPICH's Hydra, HPE's PALS.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from envbuild.base.errors import HostError, UsageError
from envbuild.jobcheck.lint.directives import ScriptFacts
from envbuild.jobs.model import JobPlan, Launcher, seconds
from envbuild.runtimes.base import directive_line, fill

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
    if it does, and `refusal` makes the error from the output, its end for people, and the job's name.
    """

    command: tuple[str, ...]
    render: Callable[[JobPlan], str]
    unchecked: Callable[[subprocess.CompletedProcess[str]], str]
    refusal: Callable[[subprocess.CompletedProcess[str], str, str], HostError]


@dataclass(frozen=True, slots=True)
class Submission:
    """The way to submit a job to a scheduler.

    `command` is followed by the file, or reads it from standard input if `stdin` is set. `job` extracts the job's
    number from the output, `no_server` is a pattern of the message that no server answers, and `ping` is the command
    that shows whether one does. `refusal` makes the error from the output, its end for people, the refused file and
    the file of an earlier job; without it, the error shows the scheduler's message. `trial` makes the question to the
    scheduler before the job is submitted.
    """

    command: tuple[str, ...]
    job: Callable[[str], str]
    no_server: str = ""
    ping: str = ""
    stdin: bool = False
    refusal: Callable[[subprocess.CompletedProcess[str], str, Path, Path], HostError] | None = None
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
    `directives` returns its lines that request resources, None if jobs are pods of images, without scripts. `launchers`
    are listed in its row of data/schedulers.toml. `suffix` is the suffix of the file. `site_keys` are the keys of
    [scheduler] and [node] that this scheduler supports, among those that not all schedulers know. `job_variables`
    matches the variables that describe a running job. `own_option` names the setting of a site's directive that jobs
    set themselves, None for others. `exclusive_has_cpus`: a job with exclusive nodes gets all of their CPUs by default.
    `own_log`: the script writes the log itself, because the scheduler shows the output late or not at all.
    `leaves_out_nodes`: a job can put itself back into the queue without some nodes.
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


def listed_in_file(job: str, file: str, command: str) -> AllocationFacts:
    """Return the facts of a scheduler whose variable `file` names a file that begins each line with a job's node."""

    def find(env: Mapping[str, str]) -> tuple[int, str] | None:
        if not env.get(job):
            return None
        place = env.get(file, "")
        try:
            rows = Path(place).read_text().splitlines()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"the list of nodes, {file}={place!r}: {reason}", f"use {command}") from error
        return len({row.split()[0] for row in rows if row.strip()}), env[job]

    return AllocationFacts(find, job, command)


def first_number(printed: str) -> str:
    """Return the job's number from a line of `printed` that begins with it: NUMBER[.SERVER], NUMBER;CLUSTER."""
    number = re.search(r"^\s*(\d[^\s;]*)", printed, re.MULTILINE)
    return number[1] if number else printed.strip()


def with_site(
    own: Sequence[str], directives: Sequence[str], keys: Callable[[str], Collection[str]], marker: str
) -> list[str]:
    """Return the lines of a job's directives: first envbuild's, then the site's, which override them.

    `keys` returns the names of the settings in a directive, without its `marker`. A line of `own` with a setting of the
    site is left out, because schedulers differ in which of two lines wins. Raises UsageError for text that is not one
    line.
    """
    replaced = {key for line in directives for key in keys(line)}
    kept = [line for line in own if not replaced & {*keys(line)}]
    return [f"{marker} {line}" for line in (*kept, *map(directive_line, directives))]


def minutes(time: str) -> int:
    """Return the minutes of a time limit, [D-]HH:MM:SS, rounded up."""
    return -(-seconds(time) // 60)


def saving_s(time: str) -> int:
    """Return the number of seconds before its time limit at which a job is asked to end."""
    return min(_SAVING_S, seconds(time) // 10)


def time_left(time: str, line: str, lines: Collection[str]) -> int | None:
    """Return the number of seconds after which a script asks its training to save its state and end, before `time`.

    Returns None if the site's directives replaced `line`, the directive with that limit: the script does not know the
    new limit.
    """
    return seconds(time) - saving_s(time) if line in lines else None


ABOUT = """\
# everywhere STEP: runs one step on every node. It ends in exec or exit: call it in a subshell."""

# The number of SIGURG on Linux: Slurm does not know its name. ddp_train/launch/end.py tells why this signal.
STEP_SIGNAL = 23

_MPI = r"""mpirun=$(command -v @LAUNCHER@) ||
    stop 'there is no @LAUNCHER@ here; say its module in [modules] run of the site' 6
case $("$mpirun" --version 2>&1 || true) in
*'Open MPI'* | *OpenRTE* | *PRTE*)
    @HOSTFILE@mpi=openmpi
    ;;
*PALS*) mpi=pals ;;
*) mpi=hydra ;;
esac

@ABOUT@
everywhere() {
    local each=1 options=()
@HOROVOD@    case $mpi in
    # Without --bind-to none, torchrun and all of its workers would share one core.
    openmpi) options+=(-np $((nodes * each)) --map-by "ppr:$each:node" --bind-to none @HOSTS@) ;;
    pals) options+=(-n $((nodes * each)) --ppn "$each" --cpu-bind none) ;;
    hydra) options+=(-n $((nodes * each)) -ppn "$each") ;;
    esac
    # Launchers other than Open MPI's pass this environment to every node, where this node's name would be wrong.
    [ "$mpi" = openmpi ] || unset SLURMD_NODENAME
    exec "$mpirun" "${options[@]}" "${launch[@]}" "$1" "$settings" </dev/null
}"""

_HOSTFILE = r"""hostfile=$ENVBUILD_RUN/slots-$restarts
    for host in "${hosts[@]}"; do echo "$host slots=@EACH@"; done >"$hostfile"
    """

_HOROVOD = r"""    if [ "$1" = training ]; then
        each=@EACH@
        [ "$mpi" = openmpi ] || stop 'Horovod is started by Open MPI, and this @LAUNCHER@ is another' 6
        interface=$(cut -d ' ' -f 3 "$ENVBUILD_RUN/at-$restarts".* | sort -u)
        if [ "$(wc -l <<<"$interface")" -eq 1 ]; then # all nodes use the same interface
            options+=(--mca btl_tcp_if_include "$interface" --mca oob_tcp_if_include "$interface")
        fi
    fi
"""

_EACH = r"""@ABOUT@
everywhere() {
    local number pids=() left last code=0 signalled=
@OPEN@    trap 'signalled=yes; @TELL@' TERM
    for number in "${!hosts[@]}"; do
@START@        pids+=($!)
    done
    # If one node fails, stop the others: they would only wait for it.
    left=${#pids[@]}
    while [ "$left" -gt 0 ]; do
        last=0
        wait -n || last=$?
        if [ -n "$signalled" ]; then # the trap ended the wait, not a node
            signalled='' code=143
            continue
        fi
@CHECK@        left=$((left - 1))
        if [ "$last" -ne 0 ]; then
            [ "$code" -ne 0 ] || code=$last
            kill -TERM "${pids[@]}" 2>/dev/null || true
        fi
    done
@END@    exit "$code"
}"""

# ssh's standard input ends with this script, or on SIGTERM: node-RESTARTS.sh then ends its process. An ssh that was
# killed could not carry what a rank prints while it saves its state, and the rank would end with a broken pipe.
_SSH_BEFORE = r"""alive=$(mktemp -u -p /tmp) # TMPDIR may name a folder that exists on other nodes only
mkfifo -m 600 "$alive"
trap 'rm -f "$alive"' EXIT

quoted() { printf "'%s' " "${@//\'/\'\\\'\'}"; }

"""

_SSH_START = r"""        ssh -o BatchMode=yes -o ConnectTimeout=20 "${hosts[number]}" \
            "$(quoted "${launch[@]}" "$1" "$settings" "$number")" <&8 8<&- 9>&- &
"""


# Each launcher's process number: Open MPI, PMIx, MPICH and Intel MPI, HPE's PALS.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID")

# The scheduler does not manage a process that ssh started. The process ends with the batch script, which holds
# the other end of its standard input. $$ stays the same over exec.
_WATCH = r"""exec 3<&0 </dev/null
(
    exec >/dev/null 2>&1
    cat <&3
    kill -TERM $$
) &
exec 3<&-

"""


def each(
    start: str,
    check: str = "",
    end: str = "",
    begin: str = "",
    tell: str = 'kill -TERM "${pids[@]}" 2>/dev/null || true',
) -> str:
    """Return `everywhere` as a loop over the nodes.

    `begin` are its first lines, `tell` asks the nodes to end when the script is asked to. `start` are the lines that
    start a process on node $number, `check` the lines that correct $last, the exit code of an ended process, `end` the
    lines that run after all processes have ended.
    """
    return fill(_EACH, about=ABOUT, open=begin, tell=tell, start=start, check=check, end=end)


def mpi(*, hostfile: bool = False) -> Launcher:
    """Return the launcher mpirun or mpiexec, as the plan names it.

    `hostfile` passes the nodes to Open MPI, for a scheduler that many of its builds do not support.
    """
    return Launcher(partial(_mpi, hostfile), number=_RANKS)


def _mpi(hostfile: bool, plan: JobPlan) -> str:
    horovod = plan.strategy == "horovod"
    each = plan.nproc_per_node if horovod else 1
    return fill(
        _MPI,
        about=ABOUT,
        launcher=plan.launcher,
        hostfile=fill(_HOSTFILE, each=each) if hostfile else "",
        hosts='--hostfile "$hostfile"' if hostfile else "",
        horovod=fill(_HOROVOD, each=each, launcher=plan.launcher) if horovod else "",
    ).replace("none )", "none)")


_SSH = _SSH_BEFORE + each(_SSH_START, begin='    exec 9<>"$alive"\n    exec 8<"$alive"\n', tell="exec 9>&-")
SSH = Launcher(lambda _: _SSH, node_lines=_WATCH)
