"""PBS directives and commands through Slurm's PBS layer. It is no PBS server: none can be had from Debian.

`sbatch` reads `#PBS` lines, spank_pbs sets PBS_JOBID and others, Debian's slurm-wlm-torque has qsub, qstat, qdel.
A task prolog does the rest for jobs that `qsub` of this lab submitted: the file of nodes, on the first node alone
and with a row a process as PBS writes it, a job's number with a server's name, and no variable of Slurm's.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

PLUGIN = "spank_pbs.so"
MARK = "LAB_QSUB"
_COMMANDS = ("qsub", "qstat", "qdel")

_PROLOG = f"""\
#!/bin/bash
# Rows of standard output that begin with export or unset change the task's environment.
[ -n "${{{MARK}:-}}" ] || exit 0
mkdir -p /run/pbs
file=/run/pbs/$SLURM_JOB_ID.ctl
counts=()
IFS=, read -ra groups <<<"$SLURM_TASKS_PER_NODE" # 2(x3),1
for group in "${{groups[@]}}"; do
    times=1
    if [[ $group =~ \\(x([0-9]+)\\) ]]; then times=${{BASH_REMATCH[1]}}; fi
    for ((i = 0; i < times; i++)); do counts+=("${{group%%(*}}"); done
done
i=0
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    for ((k = 0; k < counts[i]; k++)); do echo "$host"; done
    i=$((i + 1))
done >"$file"
echo "export PBS_NODEFILE=$file"
echo "export PBS_JOBID=$SLURM_JOB_ID.ctl"
echo "export PBS_QUEUE=$SLURM_JOB_PARTITION"
echo "export PBS_ENVIRONMENT=PBS_BATCH"
echo "unset {MARK}"
for name in $(compgen -e); do
    case $name in SLURM_* | SLURMD_*) echo "unset $name" ;; esac
done
"""

_LOGS = re.compile(r"(?m)^#PBS\s+-([oej])\s+(\S+)\s*$")


def missing() -> str | None:
    """Why the PBS layer cannot be had here; None when it can."""
    absent = [command for command in _COMMANDS if shutil.which(command) is None]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm-torque)" if absent else None


def write_pbs(folder: Path) -> str:
    """Write the prolog into Slurm's configuration folder; what slurm.conf says of it."""
    prolog = folder / "task_prolog"
    prolog.write_text(_PROLOG)
    prolog.chmod(0o755)
    return f"TaskProlog=/etc/slurm/{prolog.name}\n"


def log_options(script: Path) -> list[str]:
    """The options -o, -e and -j that a script's own lines ask for.

    A PBS server takes them from the script; Debian's qsub names the logs after the script unless it has the options.
    """
    found = _LOGS.findall(script.read_text())
    return [part for letter, value in found for part in (f"-{letter}", value)]
