"""The programs that a job's script starts on every node: ddp_train.launch in the artifact, and what must run before it.

ddp_train.launch finds the other nodes and starts the preflight or the training. It reads the settings from the run's
folder, which every node and container sees: so an image's variables cannot override them, and launchers need not pass
them on. Where the node itself must load modules or unpack an image first, a shell script does that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from envbuild.fabrics import preflight_devices
from envbuild.jobs.containers import container_words, start_enroot, work_key
from envbuild.jobs.model import JobPlan, Launcher
from envbuild.jobs.quote import fill, inside, path_word, word
from envbuild.jobs.stage import interpreter_word, shared_unless_staged, staged_image

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

_FAILED = r"""# The first node that fails writes its exit code to a file, which the job's script reads.
trap 'set -- $?; [ "$1" -eq 0 ] || (set -C; echo "$1" >"$ENVBUILD_RUN/failed-$restarts") 2>/dev/null || true' EXIT
"""


def settings(plan: JobPlan, launcher: Launcher) -> str:
    """Return the text of settings-RESTARTS.sh: variables, and ENVBUILD_JOB, the fields of ddp_train.launch's Job.

    Raises UsageError for values that no script can contain.
    """
    artifact = plan.artifact
    for value in (*plan.command, *(text for pair in plan.run_files for text in pair)):
        word(value, "an argument of the command")
    folder = plan.runtime == "folder"
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
    pieces = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items() if value]
    lines = ["# Variables of every process of the job."]
    if plan.preflight and (devices := preflight_devices(artifact.provider)):
        lines.append(f"export ENVBUILD_DEVICES={word(devices)}")
    lines += [f"export {name}={word(value, f'variable {name}')}" for name, value in plan.variables]
    job = "{\n" + ",\n".join(f"  {line}" for line in _filled(pieces)) + "\n}"
    return "\n".join([*lines, "# Input of ddp_train.launch, as JSON.", f"ENVBUILD_JOB={word(job, 'the job')}"])


def _checks(plan: JobPlan) -> list[str]:
    """Return the preflight's options."""
    artifact = plan.artifact
    given = ["--arch", artifact.arch]
    if plan.runtime == "folder":  # an image's digest is not visible from inside
        given += ["--digest", artifact.digest]
        if artifact.manifest:
            given += ["--manifest", artifact.manifest, *(["--exact", "--wait", _READING_S] if plan.exact else [])]
    if plan.speed:
        given.append("--exclude-slow" if plan.exclude_slow else "--speed")
    if plan.gpus_per_node:
        given += ["--gpus", str(plan.gpus_per_node)]
    return given + (["--provider", artifact.provider] if artifact.provider else [])


def _filled(pieces: Iterable[str]) -> list[str]:
    """Return the pieces of a list, joined into lines that are not too long to read."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + len(piece) < _WIDTH:
            lines[-1] += f", {piece}"
        else:
            lines.append(piece)
    return lines


def records_exit_codes(plan: JobPlan, launcher: Launcher) -> bool:
    """Return whether nodes that are told to end write their exit codes into files for the batch script.

    The launcher would end all nodes after one exits with an error, and one may need more time than another to save
    its state. With --auto-resume, srun handles every exit.
    """
    return launcher.signal != "" and keeps_first_code(plan)


def keeps_first_code(plan: JobPlan) -> bool:
    """Return whether the first node that fails leaves its exit code for the batch script; see `records_exit_codes`."""
    return plan.nodes > 1 and not plan.site.scheduler.auto_resume


def launch(plan: JobPlan, launcher: Launcher) -> str:
    """Return the bash array `launch`, the command for every node, and `settings`, the path of the settings there."""
    run = "$ENVBUILD_RUN"
    if plan.runtime != "folder":
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
    bare = plan.runtime in ("folder", "pyxis") and not plan.modules
    return bool(launcher.node_lines) or plan.runtime == "enroot" or not (launcher.carries_environment or bare)


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
    if plan.runtime == "enroot":
        start = start_enroot(plan, program)
    else:
        words = " \\\n    ".join([*container_words(plan), program])
        start = f'exec {words} "$@"\n'
    lines = f"{launcher.node_lines}{staged_image(plan)}{shared_unless_staged(plan)}"
    failed = _FAILED if keeps_first_code(plan) else ""
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


def purged(plan: JobPlan) -> bool:
    """Return whether the site file itself sets [modules] purge, whether or not it lists modules to load."""
    return plan.site.modules.purge and "[modules] purge" in plan.site.said


def module_shell(plan: JobPlan, shell: str) -> str:
    """Return the shell for a program that loads modules: a login shell unless the site sets [modules] init."""
    if not plan.modules:
        return shell
    return "bash" if plan.site.modules.init else "bash -l"
