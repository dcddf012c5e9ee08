"""IBM Spectrum LSF. Rendered from its documentation, never run.

Sources: IBM Spectrum LSF 10.1, command reference: bsub, bkill, blaunch, bqueues; "Starting parallel tasks with
LSF utilities" (blaunch is one of them) for how they pass on signals; release notes of Fix Pack 9 for `/host` in
resource requirements; configuration reference, "Environment variables set for job execution".
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence

from envbuild.jobcheck.lint.directives import Directive, ScriptFacts, option_values, whole_number
from envbuild.jobs.model import JobPlan, Launcher, work_key
from envbuild.jobs.schedulers.base import (
    SSH,
    HostFacts,
    Queue,
    Scheduler,
    Submission,
    each,
    listed_in_file,
    minutes,
    mpi,
    time_left,
    with_site,
)
from envbuild.jobs.script import render_script
from envbuild.runtimes.base import directive

# Options in the header of every job's script.
_OWN = ("J", "n", "W", "cwd", "o", "oo", "e", "eo", "x", "r", "rn", "gpu", "q", "P")

_JOB = r"""nodes=@NODES@ job=$LSB_JOBID
export ENVBUILD_RUN=@RUN@_$job
log=@LOG@_$job.out
mkdir -p "$ENVBUILD_RUN" @LOGS@
cd @WORK@
# LSF may deliver its own output file only at the end of the job.
echo "envbuild: the output goes to $log"
exec >>"$log" 2>&1
# LSF does not count restarts: count them in a file. A restarted job uses a new rendezvous ID.
restarts=0
[ ! -s "$ENVBUILD_RUN/starts" ] || read -r restarts <"$ENVBUILD_RUN/starts"
echo $((restarts + 1)) >"$ENVBUILD_RUN/starts"
# At the run limit, LSF sends SIGUSR2 to all processes of the job, which would end them. Ignore it in all programs; this
# script traps it below.
trap '' USR2
"""

_HOSTS = r"""# The nodes, in order; LSF lists each once per slot. The address of the second one shows by which interface
# the first node reaches it.
mapfile -t hosts < <(awk 'NF && !seen[$1]++ { print $1 }' "$LSB_DJOB_HOSTFILE")
peer=${hosts[1]-}
"""

_BLAUNCH = r"""        blaunch -no-shell "${hosts[number]}" \
            "${launch[@]}" "$1" "$settings" "$number" </dev/null &
"""

# bkill sends INT, TERM and KILL; a job that exceeds its run limit gets USR2 first.
_SIGNALS = "INT TERM USR1 USR2"


def _render(plan: JobPlan) -> str:
    lines = _directives(plan)
    left = time_left(plan.time, f"#BSUB -W {minutes(plan.time)}", lines)
    return render_script(plan, _LAUNCHERS, lines, _JOB, _HOSTS, _SIGNALS, left)


def _directives(plan: JobPlan) -> list[str]:
    scheduler, node = plan.site.scheduler, plan.site.node
    tasks = plan.nproc_per_node if plan.strategy == "horovod" else 1
    slots = max(plan.cpus_per_node, tasks)  # per node
    needs = [f"span[ptile={slots}]"]
    if scheduler.constraint:
        value = directive("", scheduler.constraint, "[scheduler] constraint")
        needs.insert(0, f"select[{value}]")
    if node.memory:
        unit = "" if node.memory[-1] in "KMGT" else "M"
        needs.append(f"rusage[mem={node.memory}{unit}/host]")
    options = [
        ("-J ", plan.name, "--name"),
        ("-n ", str(plan.nodes * slots), "--nodes"),
        ("-W ", str(minutes(plan.time)), "--time"),
        ("-q ", scheduler.partition, "[scheduler] partition"),
        ("-P ", scheduler.account, "[scheduler] account"),
        ("-cwd ", plan.work, work_key(plan)),
        ("-o ", posixpath.join(plan.work, plan.logs, f"{plan.name}.lsf"), "[paths] logs"),
    ]
    lines = [directive(option, value, key) for option, value, key in options if value]
    lines += [f'-R "{need}"' for need in needs]
    if plan.gpus_per_node:
        lines.append(f'-gpu "num={plan.gpus_per_node}/host"')
    if scheduler.exclusive:
        lines.append("-x")
    lines.append("-r" if scheduler.requeue else "-rn")
    return with_site(lines, scheduler.directives, _keys, "#BSUB")


def _keys(text: str) -> set[str]:
    """Return the settings of a directive: its options; for -R its sections, which LSF joins to one requirement."""
    options = re.findall(r"(?:^|\s)-([A-Za-z_]+)", text)
    sections = {f"R {section}" for section in re.findall(r"\b([a-z]+)\[", text)}
    return {{"oo": "o", "eo": "e", "rn": "r"}.get(option, option) for option in options if option != "R"} | sections


def _job(printed: str) -> str:
    number = re.search(r"Job <(\d+)>", printed)
    return number[1] if number else printed.strip()


def _own_option(text: str) -> str | None:
    match = re.match(r"-([A-Za-z]+)", text)
    return match[0] if match and match[1] in _OWN else None


def _nodes(directives: Iterable[Directive]) -> tuple[int, int] | None:
    slots = each_node = None
    for line, words in directives:
        for value in option_values(words, ("-n",)):
            number = whole_number(value)
            slots = None if number is None else (line, number)
        for value in option_values(words, ("-nnodes",)):  # whole nodes, on systems with jsrun
            if number := whole_number(value):
                return line, number
        if match := re.search(r"\bspan\[(?:ptile=(\d{1,9})|hosts=1)\]", " ".join(words)):
            each_node = int(match[1] or 10**9)
    if slots is None or not (each_node or slots[1] == 1):
        return None
    each_node = each_node or 1
    return slots[0], -(-slots[1] // each_node)


def _cpus(directives: Sequence[Directive]) -> int | None:
    nodes = _nodes(directives)
    words = [word for _, line in directives for word in line]
    if nodes is None or nodes[1] > 1 or "affinity[" in "".join(words) or "-x" in words or "-nnodes" in words:
        return None
    return whole_number(next(option_values(words, ("-n",)), "1"))


def _queues(printed: str) -> list[Queue]:
    rows = [line.split() for line in printed.splitlines() if line.strip()]
    return [Queue(row[0]) for row in rows if row[0] != "QUEUE_NAME"]


_LAUNCHERS = {"blaunch": Launcher(lambda _: each(_BLAUNCH)), "mpirun": mpi(hostfile=True), "ssh": SSH}

LSF = Scheduler(
    suffix=".lsf",
    render=_render,
    directives=_directives,
    launchers=_LAUNCHERS,
    submission=Submission(
        ("bsub",),
        _job,
        "LSF is down|Cannot connect to LSF|batch daemon not responding",
        ping="lsid",
        stdin=True,  # bsub ignores the directives of a file that is an argument
    ),
    site_keys=frozenset(["partition", "account", "constraint", "directives", "memory"]),
    job_variables=r"LSB_(JOB.*|BATCH_JID|HOSTS|MCPU_HOSTS|DJOB_.*|QUEUE|RESTART|SUB_.*|EXEC.*|OUTPUTFILE|ERRORFILE"
    r"|EFFECTIVE_RSRCREQ|CHKPNT_.*|EXIT_.*|TRAPSIGS|ACCT_FILE|EEXEC_.*|INTERACTIVE|MAX_NUM_PROCESSORS|AFFINITY_.*"
    r"|BIND_.*|RANK_HOSTFILE)|LS_(JOBPID|EXEC_T|SUBCWD)",
    own_option=_own_option,
    own_log=True,
    allocation=listed_in_file("LSB_JOBID", "LSB_DJOB_HOSTFILE", "bsub -Is"),
    script=ScriptFacts(
        "#BSUB",
        "LSB_",
        _nodes,
        requeue=frozenset(["-r", "-rn"]),
        output=("-o", "-oo", "-e", "-eo"),
        submitted="LS_SUBCWD",
        cpus=_cpus,
        whole=("-nnodes", "-x"),
        reads_on=True,
    ),
    host=HostFacts(
        version=("-V",),
        list_queues=("bqueues", "-w"),
        queues=_queues,
        job="LSB_JOBID",
        examples=(
            ("account", "project", "who pays"),
            ("constraint", "", "goes into select[…]"),
            ("launcher", "ssh", "default: blaunch"),
        ),
    ),
)
