"""OpenPBS and PBS Professional.

Tested with Slurm's PBS commands, never with a PBS server. Sources: qsub(1B), qstat(1B) and pbs_resources(7B) of
OpenPBS 20 to 23; its src/cmds/qsub.c, src/cmds/pbsdsh.c and src/resmom/start_exec.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from envbuild.jobcheck.lint.directives import Directive, ScriptFacts
from envbuild.jobs.model import JobPlan, Launcher
from envbuild.jobs.schedulers.base import (
    SSH,
    HostFacts,
    Queue,
    Scheduler,
    Submission,
    each,
    first_number,
    listed_in_file,
    mpi,
    time_left,
    with_site,
)
from envbuild.jobs.script import render_script
from envbuild.runtimes.base import directive

# Options in the header of every job's script, and the settings that they carry.
_OWN = {
    "N": "the job's name",
    "l": "select and walltime",
    "q": "partition",
    "A": "account",
    "j": "output",
    "o": "output",
}

_JOB = r"""# PBS_JOBID is 123.server, or 123[4].server in an array: make a file name of it.
nodes=@NODES@ job=${PBS_JOBID//[^A-Za-z0-9_.-]/_}
export ENVBUILD_RUN=@RUN@_$job
log=@LOG@_$job.out
mkdir -p "$ENVBUILD_RUN" @LOGS@
cd @WORK@
# PBS delivers its own output file only at the end of the job, and jobs of one name overwrite each other's.
echo "envbuild: the output goes to $log"
exec >>"$log" 2>&1
# PBS does not count restarts: count them in a file. A restarted job uses a new rendezvous ID.
restarts=0
[ ! -s "$ENVBUILD_RUN/starts" ] || read -r restarts <"$ENVBUILD_RUN/starts"
echo $((restarts + 1)) >"$ENVBUILD_RUN/starts"
"""

_HOSTS = r"""# The nodes, in order. The address of the second one shows by which interface the first node reaches it.
mapfile -t hosts < <(awk '!seen[$0]++' "$PBS_NODEFILE")
peer=${hosts[1]-}
"""

# pbsdsh's exit code does not reflect that of its program.
_PBSDSH_START = r"""        # shellcheck disable=SC2016
        pbsdsh -n "$number" -- /bin/sh -c 'file=$1 code=0; shift; "$@" || code=$?; echo "$code" >"$file"' \
            sh "$ENVBUILD_RUN/exit-$restarts-$1.$number" "${launch[@]}" "$1" "$settings" "$number" </dev/null &
"""

_PBSDSH_CHECK = r"""        [ "$last" -ne 0 ] ||
            last=$(sort -n "$ENVBUILD_RUN/exit-$restarts-$1".* 2>/dev/null | tail -n 1) || last=0
"""

_PBSDSH_END = r"""    for number in "${!hosts[@]}"; do
        last=1
        read -r last <"$ENVBUILD_RUN/exit-$restarts-$1.$number" || true
        [ "$last" -eq 0 ] || [ "$code" -ne 0 ] || code=$last
    done
"""

_PBSDSH_OUTPUT = r"""# pbsdsh does not forward the output of programs: write it to a file.
exec >>"$ENVBUILD_RUN/output-$restarts.$3" 2>&1

"""


def render_pbs(plan: JobPlan) -> str:
    """Return the script. Raises UsageError, naming the key, for values that PBS cannot express."""
    lines = directives(plan)
    left = time_left(plan.time, f"#PBS -l walltime={_walltime(plan.time)}", lines)
    return render_script(plan, _LAUNCHERS, lines, _JOB, _HOSTS, left=left)


def directives(plan: JobPlan) -> list[str]:
    """Return the directives. Raises UsageError, naming the key, for a value that they cannot contain."""
    scheduler, node = plan.site.scheduler, plan.site.node
    tasks = plan.nproc_per_node if plan.strategy == "horovod" else 1
    chunk = [f"select={plan.nodes}"]
    if plan.cpus_per_node:
        chunk.append(f"ncpus={plan.cpus_per_node}")
    chunk.append(f"mpiprocs={tasks}")
    if plan.gpus_per_node:
        chunk.append(f"ngpus={plan.gpus_per_node}")
    if node.memory:
        chunk.append(f"mem={_memory(node.memory)}")
    if scheduler.constraint:
        chunk.append(scheduler.constraint)
    options = [
        ("-N ", plan.name, "--name"),
        ("-l ", ":".join(chunk), "[scheduler] constraint"),
        # On a line of its own: some versions take it for a part of the chunk.
        ("-l walltime=", _walltime(plan.time), "--time"),
        ("-l place=", "scatter:excl" if scheduler.exclusive else "scatter", "exclusive"),
        ("-q ", scheduler.partition, "[scheduler] partition"),
        ("-A ", scheduler.account, "[scheduler] account"),
        ("-r ", "y" if scheduler.requeue else "n", "[scheduler] requeue"),
        ("-j ", "oe", ""),
        ("-o ", f"{plan.logs}/{plan.name}.pbs", "[paths] logs"),
    ]
    lines = [directive(option, value, key) for option, value, key in options if value]
    return with_site(lines, scheduler.directives, _keys, "#PBS")


def _keys(text: str) -> set[str]:
    """Return the settings of a directive: its options; for -l and -W the names of their values."""
    keys = set()
    for option, value in re.findall(r"(?:^|\s)-([A-Za-z])\s*(\S*)", text):
        names = [item.partition("=")[0] for item in value.split(",")] if option in "lW" else [""]
        keys |= {f"{option} {'select' if name == 'nodes' else name}".strip() for name in names}
    return keys


def _walltime(time: str) -> str:
    """Return HH:MM:SS or D-HH:MM:SS as HHH:MM:SS."""
    days, _, rest = time.rpartition("-")
    hours, _, minutes = rest.partition(":")
    return f"{int(days or 0) * 24 + int(hours):02}:{minutes}"


def _memory(text: str) -> str:
    """Return Slurm's 480G in the notation of PBS; a bare number is in MiB."""
    number, unit = re.findall(r"\d+|[KMGT]", text + ("" if text[-1] in "KMGT" else "M"))
    return f"{number}{unit.lower()}b"


_LAUNCHERS = {
    "mpiexec": mpi(hostfile=True),
    "mpirun": mpi(hostfile=True),
    "pbsdsh": Launcher(lambda _: each(_PBSDSH_START, _PBSDSH_CHECK, _PBSDSH_END), node_lines=_PBSDSH_OUTPUT),
    "ssh": SSH,
}


def _own_option(text: str) -> str | None:
    match = re.match(r"-([A-Za-z])", text)
    return _OWN.get(match[1]) if match else None


def _nodes(directives: Iterable[Directive]) -> tuple[int, int] | None:
    for line, words in directives:
        if match := re.search(r"\b(?:select|nodes)=([^\s,]+)", " ".join(words)):
            chunks = re.findall(r"(?:^|\+)(\d{1,9})(?!\d)", match[1])
            return line, sum(map(int, chunks)) or 1
    return None


def _cpus(directives: Sequence[Directive]) -> int | None:
    text = " ".join(word for _, words in directives for word in words)
    if match := re.search(r"\b(?:ncpus|ppn)=(\d{1,9})", text):
        return int(match[1])
    return 1 if re.search(r"\bselect=\S{0,200}\bngpus=", text) and "excl" not in text else None


def _queues(printed: str) -> list[Queue]:
    lines = printed.splitlines()
    rule = next((n for n, line in enumerate(lines) if line.startswith("---")), len(lines))
    return [Queue(line.split()[0]) for line in lines[rule + 1 :] if line.split()]


PBS = Scheduler(
    suffix=".pbs",
    render=render_pbs,
    directives=directives,
    launchers=_LAUNCHERS,
    submission=Submission(("qsub",), first_number, "cannot connect to server", ping="qstat -B"),
    site_keys=frozenset(["partition", "account", "constraint", "directives", "memory"]),
    job_variables=r"PBS_(ENVIRONMENT|JOB.*|NODE.*|NUM_.*|NP|VNODENUM|TASKNUM|MOMPORT|QUEUE|ACCOUNT|ARRAY.*|GPUFILE"
    r"|WALLTIME|O_.*)",
    own_option=_own_option,
    exclusive_has_cpus=False,
    own_log=True,
    allocation=listed_in_file("PBS_JOBID", "PBS_NODEFILE", "qsub -I"),
    script=ScriptFacts(
        "#PBS",
        "PBS_",
        _nodes,
        output=("-o", "-e"),
        folder=("-w", "-d"),
        submitted="PBS_O_WORKDIR",
        cpus=_cpus,
        expands=r"HOME|USER|PBS_(?:JOBID|JOBNAME|ARRAYID|ARRAY_INDEX|O_\w+)",
        delivers=("-k",),
        shell="-S",
        chunks=True,
    ),
    host=HostFacts(
        version=("--version",),
        list_queues=("qstat", "-Q"),
        queues=_queues,
        job="PBS_JOBID",
        examples=(("constraint", "model=…", "goes into each chunk of select"), ("launcher", "ssh", "default: mpiexec")),
    ),
)
