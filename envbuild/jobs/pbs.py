"""JobPlan → script for qsub of OpenPBS and PBS Professional.

Run here through Slurm's PBS layer, never by a PBS server. Source: qsub(1B) and pbs_resources(7B) of OpenPBS 20 to 23.
"""

from __future__ import annotations

import re

from envbuild.jobs.model import JobPlan
from envbuild.jobs.quote import directive, directive_line
from envbuild.jobs.script import about, check, known, opening, programs, steps

_JOB = r"""# 123.server, or 123[4].server in an array
nodes=@NODES@ job=${PBS_JOBID//[^A-Za-z0-9_.-]/_} job_number=${PBS_JOBID%%[!0-9]*}
export ENVBUILD_RUN=@RUN@_$job
log=@LOG@_$job.out
mkdir -p "$ENVBUILD_RUN" @LOGS@
cd @WORK@
# PBS shows its own file of output only when the job has ended, and writes one job's over another's.
echo "envbuild: the output goes to $log"
exec >>"$log" 2>&1
# PBS does not tell how often it has started this job: count. A job that starts again meets under another name.
restarts=0
[ ! -s "$ENVBUILD_RUN/starts" ] || read -r restarts <"$ENVBUILD_RUN/starts"
echo $((restarts + 1)) >"$ENVBUILD_RUN/starts"
"""

_HOSTS = r"""# Nodes by their numbers; the second tells by which interface the head reaches it.
mapfile -t hosts < <(awk '!seen[$0]++' "$PBS_NODEFILE")
peer=${hosts[1]-}
"""


def render_pbs(plan: JobPlan) -> str:
    """The script. Raises UsageError for what PBS cannot express, naming the key."""
    check(plan)
    return "\n".join(
        [
            opening(plan, directives(plan), about(plan)),
            "",
            known(plan, _JOB),
            f"{_HOSTS}",
            f"{programs(plan)}\n",
            f"{steps(plan)}",
        ]
    )


def directives(plan: JobPlan) -> list[str]:
    """The lines that tell the scheduler. Raises UsageError, naming the key, for a value that they cannot hold."""
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
    said = [
        ("-N ", plan.name, "--name"),
        ("-l ", ":".join(chunk), "[scheduler] constraint"),
        # On a line of its own: some take it for a part of the chunk.
        ("-l walltime=", _walltime(plan.time), "--time"),
        ("-l place=", "scatter:excl" if scheduler.exclusive else "scatter", "exclusive"),
        ("-q ", scheduler.partition, "[scheduler] partition"),
        ("-A ", scheduler.account, "[scheduler] account"),
        ("-r ", "y" if scheduler.requeue else "n", "[scheduler] requeue"),
        ("-j ", "oe", ""),
        ("-o ", f"{plan.logs}/{plan.name}.pbs", "[paths] logs"),
    ]
    lines = [f"#PBS {directive(option, value, key)}" for option, value, key in said if value]
    return lines + [f"#PBS {directive_line(line)}" for line in scheduler.directives]


def _walltime(time: str) -> str:
    """HHH:MM:SS of HH:MM:SS or D-HH:MM:SS."""
    days, _, rest = time.rpartition("-")
    hours, _, minutes = rest.partition(":")
    return f"{int(days or 0) * 24 + int(hours):02}:{minutes}"


def _memory(text: str) -> str:
    """Slurm's 480G as PBS says it; a bare number is of MiB."""
    number, unit = re.findall(r"\d+|[KMGT]", text + ("" if text[-1] in "KMGT" else "M"))
    return f"{number}{unit.lower()}b"
