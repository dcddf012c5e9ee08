"""Environment modules in scripts: exactly the site's, or the job stops."""

from __future__ import annotations

from envbuild.jobs.model import JobPlan
from envbuild.jobs.quote import path_word, word


def module_lines(plan: JobPlan) -> str:
    """Lines that load the plan's modules, or unload all where it has none; `stop` must be defined, and -u of the shell
    may be set.

    The files of Lmod and of Environment Modules read variables that are not set.
    """
    site = plan.site.modules
    lines = ["set +eu"]
    if site.init:
        lines.append("# shellcheck disable=SC1090,SC1091")
        lines.append(f". {path_word(site.init, '[modules] init')}")
    if not plan.modules:
        lines.append("! type module >/dev/null 2>&1 || module purge")
        return "\n".join([*lines, "set -eu"])
    lines.append(
        "type module >/dev/null 2>&1 || stop 'there is no module command; say [modules] init of the site'"
    )
    if site.purge:
        lines.append("module purge")
    for module in plan.modules:
        problem = f"module {module} cannot be loaded; change [modules] of the site"
        lines.append(f"module load {word(module, '[modules]')} || stop {word(problem)}")
    lines.append("set -eu")
    return "\n".join(lines)


def purged(plan: JobPlan) -> bool:
    """Whether the site file itself asks to unload what is loaded, be there modules to load or not."""
    return plan.site.modules.purge and "[modules] purge" in plan.site.said


def module_shell(plan: JobPlan, shell: str) -> str:
    """The shell of a program that loads modules: a login shell where the site names no file that defines `module`."""
    if not plan.modules:
        return shell
    return "bash" if plan.site.modules.init else "bash -l"
