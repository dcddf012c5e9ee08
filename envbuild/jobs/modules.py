"""Environment modules in scripts: load exactly the site's modules, or stop the job."""

from __future__ import annotations

from envbuild.jobs.model import JobPlan
from envbuild.jobs.quote import path_word, word


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
