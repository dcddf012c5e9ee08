"""Flux. Rendered from its documentation, never run.

Sources: flux-batch(1), flux-run(1), flux-hostlist(1), flux-job(1), flux-queue(1) and flux-environment(7) of
flux-core; RFC 36 (directives), RFC 23 (durations).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

from envbuild.jobcheck.lint.directives import Directive, ScriptFacts, option_values, whole_number
from envbuild.jobs.model import JobPlan, Launcher, work_key
from envbuild.jobs.schedulers.base import (
    ABOUT,
    STEP_SIGNAL,
    HostFacts,
    Queue,
    Scheduler,
    Submission,
    minutes,
    time_left,
    with_site,
)
from envbuild.jobs.script import render_script
from envbuild.runtimes.base import directive, fill

# Options in the header of every job's script.
_OWN = (
    "job-name",
    "nodes",
    "nslots",
    "cores-per-slot",
    "gpus-per-slot",
    "exclusive",
    "queue",
    "requires",
    "time-limit",
    "cwd",
    "output",
    "error",
)
_SHORT = {
    "N": "nodes",
    "n": "nslots",
    "c": "cores-per-slot",
    "g": "gpus-per-slot",
    "x": "exclusive",
    "q": "queue",
    "t": "time-limit",
}

_JOB = r"""# Flux sets no FLUX_JOB_ID in batch scripts. Use the job's ID in decimal for names of files.
job=$(flux job id "$(flux getattr jobid)")
nodes=@NODES@
restarts=0 # Flux never restarts a job
export ENVBUILD_RUN=@RUN@_$job
log=@LOG@_$job.out
mkdir -p "$ENVBUILD_RUN"
cd @WORK@
"""

_HOSTS = r"""# The nodes, in order. The address of the second one shows by which interface the first node reaches it.
mapfile -t hosts < <(flux hostlist --expand --delimiter='\n' instance)
peer=${hosts[1]-}
"""

_RUN = r"""everywhere() {
    # This Flux instance manages only this job's nodes; each task gets a whole node.
    local options=(--nodes=@NODES@ --ntasks=@NODES@ --exclusive --setopt=exit-on-error)
    options+=(--setopt=cpu-affinity=off --setopt=gpu-affinity=off --setopt=pmi=off)
    exec flux run "${options[@]}" "${launch[@]}" "$1" "$settings" </dev/null
}"""

_SIGNAL_NOTE = r"""
# Flux signals every process of a task, including squashfuse, which serves a container's image. So the signal is 23
# (SIGURG), on which only ddp_train.launch acts."""


def _render(plan: JobPlan) -> str:
    lines = _directives(plan)
    left = time_left(plan.time, f"#flux: --time-limit={minutes(plan.time)}m", lines)
    return render_script(plan, _LAUNCHERS, lines, _JOB, _HOSTS, left=left)


def _directives(plan: JobPlan) -> list[str]:
    scheduler = plan.site.scheduler
    bank = f"bank={scheduler.account}" if scheduler.account else ""
    options = [
        ("--job-name=", plan.name, "--name"),
        ("--nodes=", str(plan.nodes), "--nodes"),
        ("--nslots=", str(plan.nodes), "--nodes"),
        ("--cores-per-slot=", str(plan.cpus_per_node or ""), "[node] cpus"),
        ("--gpus-per-slot=", str(plan.gpus_per_node or ""), "[node] gpus"),
        ("--queue=", scheduler.partition, "[scheduler] partition"),
        ("--setattr=", bank, "[scheduler] account"),
        ("--requires=", scheduler.constraint, "[scheduler] constraint"),
        ("--time-limit=", f"{minutes(plan.time)}m", "--time"),
        ("--cwd=", plan.work, work_key(plan)),
        ("--output=", posixpath.join(plan.work, plan.logs, f"{plan.name}_{{{{id.dec}}}}.out"), "[paths] logs"),
    ]
    # All have one form, and only comment lines stand between them: RFC 36.
    lines = [directive(option, value, key) for option, value, key in options if value]
    if scheduler.exclusive:
        lines.append("--exclusive")
    return with_site(lines, scheduler.directives, _keys, "#flux:")


def _run(plan: JobPlan) -> str:
    return f"{ABOUT}\n{fill(_RUN, nodes=plan.nodes)}"


def _keys(text: str) -> set[str]:
    """Return the settings of a directive: its options, with the name of an attribute."""
    options = re.findall(r"(?:^|\s)-(?:-([a-z-]+)(?:[= ]([a-z._]+)=)?|([A-Za-z]))", text)
    return {
        f"{long} {name}" if name and long == "setattr" else long or _SHORT.get(short, short)
        for long, name, short in options
    }


def _own_option(text: str) -> str | None:
    match = re.match(r"--([a-z-]+)|-([A-Za-z])", text)
    option = (match[1] or _SHORT.get(match[2])) if match else None
    return f"--{option}" if option in _OWN else None


def _nodes(directives: Iterable[Directive]) -> tuple[int, int] | None:
    nodes = None
    for line, words in directives:
        for value in option_values(words, ("--nodes", "-N")):
            number = whole_number(value)
            nodes = None if number is None else (line, number)
    return nodes


def _queues(printed: str) -> list[Queue]:
    return [Queue(line.strip()) for line in printed.splitlines() if line.strip()]


_LAUNCHERS = {
    "flux": Launcher(
        _run,
        number=("FLUX_TASK_RANK",),
        carries_environment=True,
        signal=f"flux job killall --force --signal={STEP_SIGNAL}",
        signal_note=_SIGNAL_NOTE,
    )
}

FLUX = Scheduler(
    suffix=".flux",
    render=_render,
    directives=_directives,
    launchers=_LAUNCHERS,
    submission=Submission(("flux", "batch"), str.strip, "Unable to connect to Flux", ping="flux uptime"),
    site_keys=frozenset(["partition", "account", "constraint", "directives"]),
    # FLUX_URI stays: within an instance that the user started, jobs are submitted to that instance.
    job_variables=r"FLUX_(JOB_.*|TASK_.*|KVS_NAMESPACE|PMI_LIBRARY_PATH|PROXY_REMOTE)",
    own_option=_own_option,
    script=ScriptFacts("#flux:", "FLUX_", _nodes, pattern="#\\s*(?:flux|FLUX):"),
    host=HostFacts(
        version=("version",),
        list_queues=("flux", "queue", "list", "--no-header", "--format={queue}"),
        queues=_queues,
        examples=(("account", "project", "the bank of flux-accounting"), ("constraint", "", "goes into --requires")),
    ),
)
