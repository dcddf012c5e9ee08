"""The common parts of the scripts of all schedulers except Kubernetes, in the order of the file.

Directives, modules, the job's values, the settings and programs for the nodes, the preflight, the training.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

import envbuild
from envbuild.base.errors import UsageError
from envbuild.data.schedulers import LAUNCHERS
from envbuild.jobs.containers import TIDY, tidies, work_key
from envbuild.jobs.model import JobPlan, Launcher
from envbuild.jobs.node import (
    keeps_first_code,
    launch,
    module_lines,
    node_program,
    purged,
    records_exit_codes,
    runs_shell,
    settings,
)
from envbuild.jobs.quote import fill, heredoc, path_word
from envbuild.jobs.stage import stage_lines, staged_image

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_STOP = r"""stop() { # stop MESSAGE [EXIT-CODE]: end the job
    printf 'envbuild: %s\n' "$1" >&2
    exit "${2-6}"
}
"""

_NODES = r"""[ "${#hosts[@]}" -eq "$nodes" ] ||
    stop "$nodes nodes were asked for, and there are ${#hosts[@]}: ${hosts[*]-}" 5
[ -z "$peer" ] || peer=$(getent ahosts "$peer" | awk '$1 !~ /^(127\.|::1$)/ { print $1; exit }') || peer=
printf '%s\n' "$peer" "${hosts[@]}" >"$ENVBUILD_RUN/hosts-$restarts"
rm -f "$ENVBUILD_RUN/at-$restarts".* "$ENVBUILD_RUN/failed-$restarts"
"""

_FIND = r"""
(everywhere find) || stop 'the first step failed, see above' 5
"""

_TRUST = r"""
# The site accepts only signed artifacts. Check again: the artifact may have changed since the job was submitted.
@ENVBUILD@ trust --exact @RECIPE@@SITE@@ARTIFACT@ >&2 ||
    stop 'the artifact is not trusted, see above; nothing was trained' 5
"""

_PREFLIGHT = r"""
(everywhere preflight) || stop 'preflight: this job would fail, see above; nothing was trained' 5
"""

_EXCLUDE = r"""
# Requeues the job without the nodes that the preflight reports as slow, three times at most. Slurm ends this script
# when the job is requeued, and accepts a new list of excluded nodes only after that.
leave_out_slow() {
    local names
    names=$(cat "$ENVBUILD_RUN"/slow.* | sort -u | paste -sd, -)
    printf 'envbuild: the job starts again without %s\n' "$names" >&2
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID" || return 0
    until scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$names"; do sleep 1; done
    exit 5
}
(everywhere preflight) || {
    ! compgen -G "$ENVBUILD_RUN/slow.*-$restarts" >/dev/null || [ "$restarts" -ge 3 ] || leave_out_slow
    stop 'preflight: this job would fail, see above; nothing was trained' 5
}
"""

_TIMER = r"""# Stop the training before the time limit: at the limit, the scheduler also stops the processes that serve
# a container's files, and ranks cannot save their state.
(
    trap 'kill "$!"; exit' TERM
    sleep $((@LEFT@ > SECONDS ? @LEFT@ - SECONDS : 0)) &
    wait "$!" && kill -USR1 $$
) >/dev/null 2>&1 &
timer=$!
"""
_NO_TIMER = 'kill "$timer" 2>/dev/null || true\n'

_TRAINING = r"""
everywhere training &
launched=$!
# At the time limit, and when the job is cancelled: torchrun stops its workers, which save their state.@NOTE@
trap '@END@ 2>/dev/null || true' @SIGNALS@
@TIMER@while :; do
    code=0
    wait "$launched" || code=$?
    kill -0 "$launched" 2>/dev/null || break # still running: a signal ended the wait
done
@ENDED@[ "$code" -eq 0 ] || stop "the job failed with exit code $code: envbuild diagnose $log $ENVBUILD_RUN" "$code"
"""

_TIDY = r"""chmod +x "$ENVBUILD_RUN/tidy-$restarts.sh"
# Remove this job's containers whenever this script ends, within a minute; a later job of this user removes the rest.
# If the job is cancelled, the epilogs of its steps do that, within five seconds.
trap '(SLURM_IMMEDIATE=60 everywhere own) >/dev/null 2>&1 || true' EXIT
# Meanwhile, remove containers of this user's ended jobs, and of this job before it was requeued.
(everywhere earlier) &"""

_END = 'kill -TERM "$launched"'
# The file informs a node whose container is still starting.
_TOLD = ': >"$ENVBUILD_RUN/told-$restarts" || true'
_FAILED = r"""# The launcher may report the code of a node that it killed. The node that failed first wrote its own.
[ "$code" -eq 0 ] || code=$(cat "$ENVBUILD_RUN/failed-$restarts" 2>/dev/null || echo "$code")
"""
_ENDED = r"""# Nodes that were asked to stop wrote their codes: an error exit would make @LAUNCHER@ kill the others.
[ "$code" -ne 0 ] || code=$(cat "$ENVBUILD_RUN/ended-$restarts".* 2>/dev/null | sort -n | tail -n 1) || code=0
"""


def render_script(
    plan: JobPlan,
    launchers: Mapping[str, Launcher],
    directives: list[str],
    job: str,
    hosts: str,
    signals: str = "TERM USR1",
    left: int | None = None,
) -> str:
    """Return the script of a job.

    `job` is the template of the lines with the job's values, see `_known`, and `hosts` are the lines that set the
    array `hosts` and `peer`, the second host. `signals` are those by which the scheduler tells the script to end.
    After `left` seconds, the script itself tells the training to end; None if the scheduler does that in time.
    Raises UsageError for a plan that a batch script cannot run.
    """
    _check(plan)
    launcher = launchers[plan.launcher]
    first = f"{opening(plan, directives, _about(plan))}\n\n{_known(plan, job)}"
    return "\n".join([first, hosts, f"{_programs(plan, launcher)}\n", _steps(plan, launcher, signals, left)])


def _check(plan: JobPlan) -> None:
    """Raise UsageError for a plan that a batch script cannot run."""
    launchers = LAUNCHERS[plan.scheduler]
    if plan.launcher not in launchers:
        raise UsageError(
            f"{plan.launcher} does not start processes under {plan.scheduler}",
            f"set [scheduler] launcher to one of {', '.join(launchers)}",
        )
    if not _NAME.fullmatch(plan.name):
        raise UsageError(
            f"{plan.name!r} cannot be a job's name", "letters, digits, dots, dashes and underscores; say --name"
        )
    if plan.runtime == "pyxis" and plan.launcher != "srun":
        raise UsageError(
            f"pyxis is a plugin of srun, and the launcher is {plan.launcher}",
            'set [scheduler] launcher = "srun", or another [container] runtime',
        )
    if plan.strategy == "horovod" and plan.launcher not in ("mpirun", "mpiexec"):
        raise UsageError(
            f"Horovod's ranks are started by Open MPI, not by {plan.launcher}", 'set [scheduler] launcher = "mpirun"'
        )
    if plan.strategy == "single" and plan.world_size != 1:
        raise UsageError("strategy single is one process on one node")
    if plan.runtime == "pod":
        raise UsageError(f"{plan.scheduler} has no pods", "give an artifact that is not an image")


def _about(plan: JobPlan) -> str:
    """Return one line that describes the artifact of the job."""
    artifact = plan.artifact
    verified = f"verified {artifact.verified_at}" if artifact.verified_at else "NOT VERIFIED"
    return (
        f"{artifact.recipe} for {artifact.target}, {artifact.kind} {artifact.digest}, {verified}; site {plan.site.name}"
    )


def opening(plan: JobPlan, directives: list[str], about: str, modules: str = "Load the site's modules.") -> str:
    """Return the first lines, up to the loaded modules; `about` and `modules` are texts of comments."""
    shown = bool(plan.modules) or purged(plan)
    login = " -l" if shown and not plan.site.modules.init else ""
    comment = _comment(f"# envbuild {envbuild.__version__}: {about}")
    lines = [f"#!/bin/bash{login}", *directives, comment, _STOP]
    if shown:
        why = modules if plan.modules else "Unload all modules, because the site file sets [modules] purge."
        lines += [f"# {why}", module_lines(plan)]
    lines.append("set -euo pipefail")
    return "\n".join(lines)


def _comment(line: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in line)


def _known(plan: JobPlan, template: str) -> str:
    """Return `template`, the job's values, with @NODES@ and with @RUN@, @WORK@, @LOGS@ and @LOG@ as words."""
    logs = posixpath.join(plan.work, plan.logs)
    return fill(
        template,
        nodes=plan.nodes,
        run=path_word(posixpath.join(plan.work, plan.name), work_key(plan)),
        work=path_word(plan.work, work_key(plan)),
        logs=path_word(logs, "[paths] logs"),
        log=path_word(posixpath.join(logs, plan.name), "[paths] logs"),
    )


def _programs(plan: JobPlan, launcher: Launcher) -> str:
    """Return the lines that write the nodes' files, read the settings, and define `everywhere`."""
    files = [heredoc('cat >"$ENVBUILD_RUN/settings-$restarts.sh"', settings(plan, launcher), "SETTINGS")]
    if runs_shell(plan, launcher):
        files.append(heredoc('cat >"$ENVBUILD_RUN/node-$restarts.sh"', node_program(plan, launcher), "NODE"))
    if tidies(plan):
        files.append(heredoc('cat >"$ENVBUILD_RUN/tidy-$restarts.sh"', TIDY, "TIDY"))
    return "\n".join(
        [
            "# Settings for ddp_train.launch, the program in the artifact that starts the training on each node.",
            *files,
            "# shellcheck disable=SC1090,SC1091\n"
            '. "$ENVBUILD_RUN/settings-$restarts.sh"\n'
            "# XDG_RUNTIME_DIR belongs to the submit host and may not exist on this node.\n"
            f"unset XDG_RUNTIME_DIR\n{staged_image(plan)}{launch(plan, launcher)}\n",
            launcher.everywhere(plan),
            *([_TIDY] if plan.runtime == "pyxis" else []),
        ]
    )


def _steps(plan: JobPlan, launcher: Launcher, signals: str, left: int | None) -> str:
    """Return the list of nodes, the preflight and the training; without a command, the preflight alone.

    `signals` and `left` are those of `render_script`.
    """
    text = _NODES + _trust(plan) + stage_lines(plan, launcher)
    if plan.preflight:
        text += _EXCLUDE if plan.exclude_slow else _PREFLIGHT
    elif plan.strategy == "horovod":  # mpirun's options depend on the nodes' interfaces
        text += _FIND
    if plan.command:
        text += fill(
            _TRAINING,
            end=f"{_TOLD}; {launcher.signal}" if launcher.signal else _END,
            note=launcher.signal_note,
            signals=signals,
            timer="" if left is None else fill(_TIMER, left=left),
            ended=("" if left is None else _NO_TIMER)
            + (_FAILED if keeps_first_code(plan) else "")
            + (fill(_ENDED, launcher=plan.launcher) if records_exit_codes(plan, launcher) else ""),
        )
    return text


def _trust(plan: JobPlan) -> str:
    """Return the lines that let envbuild compare the artifact with its attestation, outside of the artifact."""
    if not plan.site.trust.restricts:
        return ""
    # Of several files, which a job finds as its submission did, the later ones replace tables of the earlier.
    site = f"--site {path_word(str(plan.site.files[0]), 'the site file')} " if len(plan.site.files) == 1 else ""
    recipe = path_word(plan.artifact.recipe, "the name of the artifact's recipe")
    return fill(
        _TRUST,
        envbuild=path_word(plan.envbuild, "the command envbuild"),
        site=site,
        recipe=f"--recipe {recipe} ",
        artifact=path_word(plan.artifact.path, "the artifact's path"),
    )
