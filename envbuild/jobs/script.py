"""The common parts of the scripts of all schedulers except Kubernetes, in the order of the file.

Directives, modules, the job's values, the settings and programs for the nodes, the preflight, the training.

On every node, the script starts ddp_train.launch in the artifact. It finds the other nodes and starts the preflight or
the training. It reads the settings from the run's folder, which every node and container sees: so an image's variables
cannot override them, and launchers need not pass them on. If the node itself must load modules or unpack an image
first, a shell script does that.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any

import envbuild
from envbuild.base.errors import UsageError
from envbuild.data.schedulers import LAUNCHERS
from envbuild.fabrics import preflight_devices
from envbuild.jobs.model import JobPlan, Launcher, runtime_of, work_key
from envbuild.jobs.staging import (
    container_of,
    container_words,
    interpreter_word,
    shared_unless_staged,
    stage_lines,
    staged_image,
    tidies,
)
from envbuild.runtimes.base import fill, heredoc, inside, path_word, word

_WIDTH = 110
# Time for nodes to read a whole environment, in seconds.
_READING_S = "300"

_NODE = r"""#!/bin/sh
# Starts ddp_train.launch on one node: sh node-RESTARTS.sh STEP SETTINGS [NODE-NUMBER].
set -eu
ENVBUILD_RUN=${0%/*}
restarts=${0##*-} restarts=${restarts%.sh}
name=${SLURMD_NODENAME:-$(uname -n)}

stop() {
    printf 'envbuild: node %s: %s\n' "$name" "$1" >&2
    exit 5
}
@FAILED@
@LINES@# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/settings-$restarts.sh"
# XDG_RUNTIME_DIR belongs to the submit host and may not exist on this node.
unset XDG_RUNTIME_DIR
@NUMBER@@MODULES@@START@"""

_NODE_FAILED = r"""# The first node that fails writes its exit code to a file, which the job's script reads.
trap 'set -- $?; [ "$1" -eq 0 ] || (set -C; echo "$1" >"$ENVBUILD_RUN/failed-$restarts") 2>/dev/null || true' EXIT
"""


def settings(plan: JobPlan, launcher: Launcher) -> str:
    """Return the text of settings-RESTARTS.sh: variables, and ENVBUILD_JOB, the fields of ddp_train.launch's Job.

    Raises UsageError for values that no script can contain.
    """
    artifact = plan.artifact
    for value in (*plan.command, *(text for pair in plan.run_files for text in pair)):
        word(value, "an argument of the command")
    folder = runtime_of(plan).host_files
    interface = plan.site.fabric.interface.split(",")[0]
    fields: dict[str, Any] = {
        "name": plan.name,
        "nodes": plan.nodes,
        "nproc_per_node": plan.nproc_per_node,
        "strategy": plan.strategy if plan.strategy != "ddp" else None,
        "max_restarts": plan.max_restarts,
        "join_timeout_s": plan.join_timeout_s,
        "read_timeout_s": plan.read_timeout_s,
        "endpoint": plan.rendezvous_endpoint if plan.rendezvous != "c10d" else None,
        "launcher": plan.launcher,
        "number": launcher.number,
        "auto_resume": plan.site.scheduler.auto_resume,
        "signalled": bool(launcher.signal),
        "exit_codes": records_exit_codes(plan, launcher),
        # NCCL's syntax: ^ excludes interfaces, = requires an exact name.
        "interface": "" if interface.startswith("^") else interface.removeprefix("="),
        "gpu": artifact.accelerator.gpu,
        "chips": artifact.chips,
        "library_path": ":".join(plan.library_path),
        "check": _checks(plan) if plan.preflight else None,
        "python": artifact.python,
        "environment": artifact.path if folder else None,
        "conda": folder and artifact.of_kind.of_conda,
        "command": plan.command,
        "run_files": dict(plan.run_files),
    }
    pieces = [
        f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
        for name, value in fields.items()
        if value or type(value) is int  # 0 restarts
    ]
    lines = ["# Variables of every process of the job."]
    if plan.preflight and (devices := preflight_devices(artifact.provider)):
        lines.append(f"export ENVBUILD_DEVICES={word(devices)}")
    lines += [f"export ENVBUILD_IMEX={plan.imex()}"] if plan.preflight and plan.imex() else []
    if plan.preflight and (places := plan.site.host_stack.places):
        plugin = dict(plan.variables).get("NCCL_NET_PLUGIN", "")
        stack = {
            "mode": plan.site.host_stack.mode,
            "places": places,
            "plugin": plugin if plugin.startswith("/") else "",
            "mpi": plan.site.host_stack.mpi,
            "alone": not folder,
        }
        lines.append(f"export ENVBUILD_STACK={word(json.dumps(stack, ensure_ascii=False), '[host_stack]')}")
    lines += [f"export {name}={word(value, f'variable {name}')}" for name, value in plan.variables]
    job = "{\n" + ",\n".join(f"  {line}" for line in _filled(pieces)) + "\n}"
    return "\n".join([*lines, "# Input of ddp_train.launch, as JSON.", f"ENVBUILD_JOB={word(job, 'the job')}"])


def _checks(plan: JobPlan) -> list[str]:
    """Return the preflight's options."""
    artifact = plan.artifact
    given = ["--arch", artifact.arch]
    if runtime_of(plan).host_files:  # an image's digest is not visible from inside
        given += ["--digest", artifact.digest]
        if artifact.manifest:
            given += ["--manifest", artifact.manifest, *(["--exact", "--wait", _READING_S] if plan.exact else [])]
    if plan.speed:
        given.append("--exclude-slow" if plan.exclude_slow else "--speed")
    if plan.gpus_per_node:
        given += ["--gpus", str(plan.gpus_per_node)]
    return given + (["--provider", artifact.provider] if artifact.provider else [])


def _filled(pieces: Iterable[str]) -> list[str]:
    """Return the pieces of a list, joined into lines of readable length."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + len(piece) < _WIDTH:
            lines[-1] += f", {piece}"
        else:
            lines.append(piece)
    return lines


def records_exit_codes(plan: JobPlan, launcher: Launcher) -> bool:
    """Return whether nodes that are asked to end write their exit codes into files for the batch script.

    After an error exit of one node, the launcher would kill the others, which may still be saving their state. With
    --auto-resume, srun handles every exit.
    """
    return launcher.signal != "" and keeps_first_code(plan)


def keeps_first_code(plan: JobPlan) -> bool:
    """Return whether the first node that fails leaves its exit code for the batch script; see `records_exit_codes`."""
    return plan.nodes > 1 and not plan.site.scheduler.auto_resume


def launch(plan: JobPlan, launcher: Launcher) -> str:
    """Return the bash array `launch`, the command for every node, and `settings`, the path of the settings there."""
    run = "$ENVBUILD_RUN"
    if not runtime_of(plan).host_files:
        run = f"{path_word(inside(plan.work, plan.mounts), work_key(plan))}/${{ENVBUILD_RUN##*/}}"
    if runs_shell(plan, launcher):
        words = [f'{module_shell(plan, "sh")} "$ENVBUILD_RUN/node-$restarts.sh"']
    else:
        words = [*container_words(plan), _program(plan)]
    line = f"launch=({' '.join(words)})"
    if len(line) > _WIDTH:
        line = "\n".join(["launch=(", *(f"    {part}" for part in words), ")"])
    return f"{line}\nsettings={run}/settings-$restarts.sh"


def runs_shell(plan: JobPlan, launcher: Launcher) -> bool:
    """Return whether a node needs the shell script `node_program` before ddp_train.launch."""
    runtime = runtime_of(plan)
    bare = runtime.words is None and not plan.modules
    return bool(launcher.node_lines or runtime.start) or not (launcher.carries_environment or bare)


def node_program(plan: JobPlan, launcher: Launcher) -> str:
    """Return the text of node-RESTARTS.sh."""
    number = ""
    if launcher.number:
        expression = ""
        for name in reversed(launcher.number):
            expression = f"${{{name}-{expression}}}"
        number = f'[ "${{3-}}" ] || set -- "$1" "$2" "{expression}"\n'
    modules = "" if launcher.carries_environment or not plan.modules else f"{module_lines(plan)}\n"
    program = _program(plan)
    if lines_of := runtime_of(plan).start:
        start = lines_of(container_of(plan), program)
    else:
        words = " \\\n    ".join([*container_words(plan), program])
        start = f'exec {words} "$@"\n'
    lines = f"{launcher.node_lines}{staged_image(plan)}{shared_unless_staged(plan)}"
    failed = _NODE_FAILED if keeps_first_code(plan) else ""
    return fill(_NODE, failed=failed, lines=lines, number=number, modules=modules, start=start)


def _program(plan: JobPlan) -> str:
    """Return the command that starts ddp_train.launch by the artifact's interpreter, whatever the host's variables."""
    return f"{interpreter_word(plan)} -I -X utf8 -m ddp_train.launch"


def module_lines(plan: JobPlan) -> str:
    """Return lines that load the plan's modules, or unload all modules if the plan has none.

    They need `stop`, and turn the shell's -e and -u off and on: the files of Lmod and of Environment Modules
    read unset variables.
    """
    site = plan.site.modules
    lines = ["set +eu"]
    if site.init:
        lines.append("# shellcheck disable=SC1090,SC1091")
        lines.append(f". {path_word(site.init, '[modules] init')}")
    if not plan.modules:
        lines.append("! type module >/dev/null 2>&1 || module purge")
        return "\n".join([*lines, "set -eu"])
    lines.append("type module >/dev/null 2>&1 || stop 'there is no module command; say [modules] init of the site'")
    if site.purge:
        lines.append("module purge")
    for module in plan.modules:
        problem = f"module {module} cannot be loaded; change [modules] of the site"
        lines.append(f"module load {word(module, '[modules]')} || stop {word(problem)}")
    lines.append("set -eu")
    return "\n".join(lines)


def module_shell(plan: JobPlan, shell: str) -> str:
    """Return the shell for a program that loads modules: a login shell unless the site sets [modules] init."""
    if not plan.modules:
        return shell
    return "bash" if plan.site.modules.init else "bash -l"


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

    `job` is the template of the lines with the job's values, see `_known`, and `hosts` are the lines that set the array
    `hosts` and `peer`, the second host. `signals` are the scheduler's signals that ask the script to end. After `left`
    seconds, the script itself asks the training to end; None if the scheduler does that in time. Raises UsageError for
    a plan that a batch script cannot run.
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
            f"{plan.name!r} is not a valid job name",
            "letters, digits, dots, dashes and underscores; choose another --name",
        )
    if (only := runtime_of(plan).launcher) and plan.launcher != only:
        raise UsageError(
            f"{plan.runtime} is a plugin of {only}, and the launcher is {plan.launcher}",
            f'set [scheduler] launcher = "{only}", or another [container] runtime',
        )
    if plan.strategy == "horovod" and plan.launcher not in ("mpirun", "mpiexec"):
        raise UsageError(
            f"Horovod's ranks are started by Open MPI, not by {plan.launcher}", 'set [scheduler] launcher = "mpirun"'
        )
    if plan.strategy == "single" and plan.world_size != 1:
        raise UsageError("strategy single starts one process on one node")
    if runtime_of(plan).pods:
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
    # Modules are also unloaded if the site file itself sets [modules] purge, whether or not it lists modules to load.
    shown = bool(plan.modules) or (plan.site.modules.purge and "[modules] purge" in plan.site.origins)
    login = " -l" if shown and not plan.site.modules.init else ""
    line = f"# envbuild {envbuild.__version__}: {about}"
    comment = "".join(character if character.isprintable() else "?" for character in line)
    lines = [f"#!/bin/bash{login}", *directives, comment, _STOP]
    if shown:
        why = modules if plan.modules else "Unload all modules, because the site file sets [modules] purge."
        lines += [f"# {why}", module_lines(plan)]
    lines.append("set -euo pipefail")
    return "\n".join(lines)


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
        files.append(heredoc('cat >"$ENVBUILD_RUN/tidy-$restarts.sh"', runtime_of(plan).tidy, "TIDY"))
    return "\n".join(
        [
            "# Settings for ddp_train.launch, the program in the artifact that starts the training on each node.",
            *files,
            "# shellcheck disable=SC1090,SC1091\n"
            '. "$ENVBUILD_RUN/settings-$restarts.sh"\n'
            "# XDG_RUNTIME_DIR belongs to the submit host and may not exist on this node.\n"
            f"unset XDG_RUNTIME_DIR\n{staged_image(plan)}{launch(plan, launcher)}\n",
            launcher.everywhere(plan),
            *([_TIDY] if runtime_of(plan).step_options else []),
        ]
    )


def _steps(plan: JobPlan, launcher: Launcher, signals: str, left: int | None) -> str:
    """Return the list of nodes, the preflight and the training; without a command, the preflight alone.

    `signals` and `left` are as in `render_script`.
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
