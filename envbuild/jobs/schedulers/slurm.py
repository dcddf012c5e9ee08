"""Slurm.

Sources: sbatch(1), srun(1), scancel(1), sinfo(1), scontrol(1) of Slurm 22.05 to 24.11; src/common/slurm_errno.c,
src/common/read_config.c and src/srun/libsrun/srun_job.c, _srun_signal_mgr.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from envbuild.base.errors import UsageError
from envbuild.jobcheck.lint.directives import Directive, ScriptFacts, option_values, whole_number
from envbuild.jobs.model import JobPlan, Launcher, runtime_of, work_key
from envbuild.jobs.schedulers.base import (
    ABOUT,
    STEP_SIGNAL,
    AllocationFacts,
    HostFacts,
    Queue,
    Scheduler,
    Submission,
    first_number,
    mpi,
    saving_s,
    with_site,
)
from envbuild.jobs.script import render_script
from envbuild.jobs.staging import container_of
from envbuild.runtimes.base import directive, fill

# Options in the header of every job's script that a key of the site file or an option of `envbuild job` sets.
_OWN = (
    "job-name",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "cpus-per-task",
    "partition",
    "account",
    "qos",
    "constraint",
    "time",
    "exclusive",
    "mem",
    "output",
    "error",
    "open-mode",
    "requeue",
    "no-requeue",
)
# Options for one thing: a job may have one of them, and which is the site's choice.
_SAME = {
    "gpus": "gpus-per-node",
    "gpus-per-task": "gpus-per-node",
    "gpus-per-socket": "gpus-per-node",
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    "tasks-per-node": "ntasks-per-node",
    "cpus-per-gpu": "cpus-per-task",
    "no-requeue": "requeue",
}
_SHORT = {
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "p": "partition",
    "A": "account",
    "q": "qos",
    "C": "constraint",
    "t": "time",
    "o": "output",
    "e": "error",
    "D": "chdir",
    "G": "gpus",
}

_JOB = r"""nodes=@NODES@ job=$SLURM_JOB_ID
# A requeued job continues from its snapshot and uses a new rendezvous ID.
restarts=${SLURM_RESTART_COUNT:-0}
export ENVBUILD_RUN=@RUN@_$job
log=@LOG@_$job.out
mkdir -p "$ENVBUILD_RUN"
cd @WORK@
"""

_HOSTS = r"""# The nodes, in order, and the second one's address: it shows by which interface the first node reaches it.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
peer=
if [ "$nodes" -gt 1 ]; then
    peer=$(scontrol show node -o "${hosts[1]}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p') || peer=
fi
"""

# torchrun restarts workers itself; if it gives up on one node, the others would only wait for it.
_SRUN = r"""everywhere() {
    # Without --cpus-per-task, a step gets all CPUs of the job.
    local options=(--nodes=@NODES@ --ntasks=@NODES@ --ntasks-per-node=1 --kill-on-bad-exit=1)
    options+=(--cpu-bind=none --mpi=none --export=ALL)
@MORE@    exec srun "${options[@]}" "${launch[@]}" "$1" "$settings" </dev/null
}"""

_RESUME = r"""    if [ "$1" = training ]; then options+=(--auto-resume=1); fi
"""

_IN_CONTAINER = r"""    case $1 in own | earlier) # --overlap: runs while another step runs
        exec srun "${options[@]}" --overlap sh "$ENVBUILD_RUN/tidy-$restarts.sh" "$1" </dev/null
        ;;
    esac
    options+=("${container[@]}" --task-epilog="$ENVBUILD_RUN/tidy-$restarts.sh")
"""

_SIGNAL_NOTE = r"""
# SIGTERM to srun would kill them. Slurm signals every process of a step, including squashfuse, which serves a
# container's image. So the signal is 23 (SIGURG), on which only ddp_train.launch acts."""


def render_slurm(plan: JobPlan) -> str:
    """Return the script. Raises UsageError, naming the key, for values that Slurm cannot express."""
    return render_script(plan, _LAUNCHERS, directives(plan), _JOB, _HOSTS)


def directives(plan: JobPlan) -> list[str]:
    """Return the directives. Raises UsageError, naming the key, for a value that they cannot contain."""
    scheduler, node = plan.site.scheduler, plan.site.node
    horovod = plan.strategy == "horovod"
    tasks = plan.nproc_per_node if horovod else 1
    cpus = plan.cpus_per_node // tasks
    options = [
        ("--job-name=", plan.name, "--name"),
        ("--nodes=", str(plan.nodes), "--nodes"),
        ("--ntasks-per-node=", str(tasks), "--nproc-per-node"),
        ("--cpus-per-task=", str(cpus) if cpus else "", "[node] cpus"),
        ("--gpus-per-node=", str(plan.gpus_per_node or ""), "[node] gpus"),
        ("--mem=", node.memory, "[node] memory"),
        ("--partition=", scheduler.partition, "[scheduler] partition"),
        ("--account=", scheduler.account, "[scheduler] account"),
        ("--qos=", scheduler.qos, "[scheduler] qos"),
        ("--constraint=", scheduler.constraint, "[scheduler] constraint"),
        ("--time=", plan.time, "--time"),
        ("--signal=", f"B:USR1@{saving_s(plan.time)}" if plan.command else "", "--time"),
        ("--chdir=", plan.work, work_key(plan)),
        # sbatch does not create this folder; without it the job ends at once and leaves no log.
        ("--output=", f"{plan.logs}/", "[paths] logs"),
    ]
    lines = [directive(option, value, key) for option, value, key in options if value]
    lines[-1] += "%x_%j.out"
    lines.append("--open-mode=append")
    lines.append(f"--{'' if scheduler.requeue else 'no-'}requeue")
    if scheduler.exclusive:
        lines.append("--exclusive")
    lines = with_site(lines, scheduler.directives, _keys, "#SBATCH")
    lines.append(
        f"# The folder {plan.logs} must exist when the job starts. `envbuild job --submit` creates it, sbatch does not."
    )
    return lines


def _srun(plan: JobPlan) -> str:
    more = _RESUME if plan.site.scheduler.auto_resume else ""
    container = ""
    if options_of := runtime_of(plan).step_options:
        options = "".join(f"    {option}\n" for option in options_of(container_of(plan)))
        container = f"# shellcheck disable=SC2054 # the commas are for {plan.runtime}\ncontainer=(\n{options})\n\n"
        more += _IN_CONTAINER
    return f"{container}{ABOUT}\n{fill(_SRUN, nodes=plan.nodes, more=more)}"


_LAUNCHERS = {
    "srun": Launcher(
        _srun,
        number=("SLURM_NODEID",),
        carries_environment=True,
        # scancel(1): without --batch
        signal=f'scancel --signal={STEP_SIGNAL} "$SLURM_JOB_ID"',
        signal_note=_SIGNAL_NOTE,
    ),
    "mpirun": mpi(),
    "mpiexec": mpi(),
}


def _options(text: str) -> Iterator[str]:
    """Yield the long names of the options in a directive."""
    for match in re.finditer(r"(?:^|\s)-(?:-([a-z-]+)|([A-Za-z]))", text):
        yield match[1] or _SHORT.get(match[2], match[2])


def _keys(text: str) -> set[str]:
    """Return the settings of a directive: its options, and `gpus-per-node` for each option that requests GPUs."""
    return {
        "gpus-per-node" if option == "gres" and "gpu" in text else _SAME.get(option, option)
        for option in _options(text)
    }


def _own_option(text: str) -> str | None:
    option = next(_options(text), None)
    return f"--{option}" if option in _OWN else None


def _find_allocation(env: Mapping[str, str]) -> tuple[int, str] | None:
    job = env.get("SLURM_JOB_ID")
    if not job:
        return None
    count = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or ""
    if not count.isdigit():
        raise UsageError("SLURM_JOB_ID is set, and SLURM_JOB_NUM_NODES is not", "use salloc")
    return int(count), job


def _nodes(directives: Iterable[Directive]) -> tuple[int, int] | None:
    nodes = tasks = None
    each = 0
    for line, words in directives:
        for value in option_values(words, ("--nodes", "-N")):
            nodes = (line, value)
        for value in option_values(words, ("--ntasks", "-n")):
            tasks = (line, whole_number(value) or 0)
        for value in option_values(words, ("--ntasks-per-node", "--tasks-per-node")):
            each = whole_number(value) or 0
    if nodes is None and tasks and each:
        return tasks[0], max(1, -(-tasks[1] // each))
    if nodes and (match := re.fullmatch(r"(?:\d+-)?(\d{1,9})", nodes[1])):
        return nodes[0], int(match[1])
    return None


# Source: sbatch(1), "Output environment variables".
_OPTIONAL = {
    "SLURM_CPUS_PER_TASK": ("--cpus-per-task", "-c"),
    "SLURM_CPUS_PER_GPU": ("--cpus-per-gpu",),
    "SLURM_GPUS": ("--gpus", "-G"),
    "SLURM_GPUS_PER_NODE": ("--gpus-per-node",),
    "SLURM_GPUS_PER_TASK": ("--gpus-per-task",),
    "SLURM_NTASKS_PER_NODE": ("--ntasks-per-node", "--tasks-per-node"),
}


def _cpus(directives: Sequence[Directive]) -> int | None:
    words = [word for _, line in directives for word in line]
    tasks = [*option_values(words, ("--ntasks", "-n", "--ntasks-per-node", "--tasks-per-node"))]
    others = ("--exclusive", "--cpus-per-gpu", "--mem=0", "--mincpus")
    if any(word.startswith(others) for word in words) or set(tasks) - {"1"}:
        return None
    return next((whole_number(value) for value in option_values(words, _OPTIONAL["SLURM_CPUS_PER_TASK"])), 1)


def _partitions(printed: str) -> list[Queue]:
    queues: dict[str, Queue] = {}
    for line in printed.splitlines():
        row = line.strip().split("|")
        if len(row) != 6:
            continue
        listed = re.findall(r"gpu(?::([^:,()]+))?:(\d+)", row[4])
        gpus, types = sum(int(n) for _, n in listed), {kind for kind, _ in listed if kind}
        cpus, memory, nodes = (int((re.match(r"\d+", row[at]) or "0")[0]) for at in (2, 3, 5))
        name = row[0].rstrip("*")
        # Nodes of different kinds are listed separately: each value is the best among them.
        if old := queues.get(name):
            cpus, memory = max(old.cpus or 0, cpus), max(old.memory or 0, memory)
            gpus, nodes, types = max(old.gpus or 0, gpus), old.nodes + nodes, types.union(old.gpu_types)
        queues[name] = Queue(name, row[0].endswith("*"), row[1], cpus, memory, gpus, nodes, tuple(sorted(types)))
    return list(queues.values())


SLURM = Scheduler(
    suffix=".sbatch",
    render=render_slurm,
    directives=directives,
    launchers=_LAUNCHERS,
    submission=Submission(
        ("sbatch", "--parsable"),
        first_number,
        "Unable to contact slurm controller|Could not establish a configuration source",
        ping="scontrol ping",
    ),
    site_keys=frozenset(["partition", "account", "qos", "constraint", "directives", "memory"]),
    # sbatch passes on its whole environment, and srun takes options from it. Variables that locate the
    # scheduler stay, and so do the user's SBATCH_….
    job_variables=r"SLURM_(?!(CONF|CONF_SERVER|CLUSTERS|JWT)$).*|SLURMD_.*",
    own_option=_own_option,
    allocation=AllocationFacts(_find_allocation, "SLURM_JOB_ID", "salloc --nodes=N"),
    script=ScriptFacts(
        "#SBATCH",
        "SLURM_",
        _nodes,
        requeue=frozenset(["--requeue", "--no-requeue"]),
        output=("--output", "-o", "--error", "-e"),
        own_steps=True,
        strict=True,
        expands="",
        submitted="SLURM_SUBMIT_DIR",
        optional=_OPTIONAL,
        cpus=_cpus,
    ),
    leaves_out_nodes=True,
    host=HostFacts(
        version=("--version",),
        list_queues=("sinfo", "--noheader", "--format=%P|%l|%c|%m|%G|%D"),
        queues=_partitions,
        job="SLURM_JOB_ID",
        nodes="SLURM_JOB_NODELIST",
        queue="partition",
        examples=(
            ("account", "project", "who pays"),
            ("constraint", "", "which nodes"),
            ("launcher", "mpirun", "default: srun"),
        ),
    ),
)
