"""JobPlan → script for sbatch.

Source: sbatch(1) and srun(1) of Slurm 22.05 to 24.11.
"""

from __future__ import annotations

from envbuild.jobs.containers import work_key
from envbuild.jobs.model import JobPlan
from envbuild.jobs.quote import directive, directive_line
from envbuild.jobs.script import about, check, known, opening, programs, steps

_JOB = r"""nodes=@NODES@ job=$SLURM_JOB_ID job_number=$SLURM_JOB_ID
# A job that Slurm starts again goes on from its snapshot, and meets under another name.
restarts=${SLURM_RESTART_COUNT:-0}
export ENVBUILD_RUN=@RUN@_$job
log=@LOG@_$job.out
mkdir -p "$ENVBUILD_RUN"
cd @WORK@
"""

_HOSTS = r"""# Nodes by their numbers, and an address of the second, to know by which interface the head reaches it.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
peer=
if [ "$nodes" -gt 1 ]; then
    peer=$(scontrol show node -o "${hosts[1]}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p') || peer=
fi
"""


def render_slurm(plan: JobPlan) -> str:
    """The script. Raises UsageError for what Slurm cannot express, naming the key."""
    check(plan)
    return (
        "\n".join(
            [
                opening(plan, directives(plan), about(plan)),
                "",
                known(plan, _JOB),
                f"{programs(plan)}\n",
                f"{_HOSTS}{steps(plan)}",
            ]
        ).rstrip("\n")
        + "\n"
    )


def directives(plan: JobPlan) -> list[str]:
    """The lines that tell the scheduler. Raises UsageError, naming the key, for a value that they cannot hold."""
    scheduler, node = plan.site.scheduler, plan.site.node
    horovod = plan.strategy == "horovod"
    tasks = plan.nproc_per_node if horovod else 1
    cpus = plan.cpus_per_node // tasks
    said = [
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
        ("--chdir=", plan.work, work_key(plan)),
        # sbatch does not make the folder; without it the job ends at once and leaves no word.
        ("--output=", f"{plan.logs}/", "[paths] logs"),
    ]
    lines = [f"#SBATCH {directive(option, value, key)}" for option, value, key in said if value]
    lines[-1] += "%x_%j.out"
    lines.append("#SBATCH --open-mode=append")
    lines.append(f"#SBATCH --{'' if scheduler.requeue else 'no-'}requeue")
    if scheduler.exclusive:
        lines.append("#SBATCH --exclusive")
    lines += [f"#SBATCH {directive_line(line)}" for line in scheduler.directives]
    lines.append(
        f"# The folder {plan.logs} must be there: `envbuild job --submit` makes it, sbatch does not."
    )
    return lines
