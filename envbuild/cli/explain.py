"""`envbuild explain`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.common import json_option, open_recipe, open_target, print_json
from envbuild.environment import load_environment

if TYPE_CHECKING:
    from envbuild.compat.rows import CompatFinding
    from envbuild.compat.stack import Stack
    from envbuild.recipe.load import LoadedRecipe
    from envbuild.recipe.targets import Target

_COLOURS = {"good": "green", "bad": "red", "unknown": "yellow", "note": "cyan"}
_WIDTH = 100
_INDENT = " " * 21


@click.command("explain")
@click.argument("recipe")
@click.option("--target", metavar="TARGET", help="ACCELERATOR-ARCH, such as cu126-x86_64. Default: all.")
@click.option("--driver", metavar="VERSION", help="Judge this driver of the nodes, as nvidia-smi prints it.")
@json_option
def explain_command(recipe: str, target: str | None, driver: str | None, as_json: bool) -> None:
    """Say whether what RECIPE is made of goes together, link by link, each with its source.

    From glibc and driver over CUDA, torch and NCCL to the plugin, libfabric and the network. What is locked is judged,
    or else what the recipe pins. Needs no network. Exit code 3 when something is known not to work.

    \b
    Examples:
      envbuild explain pt_cu126
      envbuild explain gh200_cu126 --target cu126-aarch64 --driver 550.54.15
      envbuild explain ./recipe.toml --json
    """
    from envbuild.compat.judge import judge

    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    names = [target] if target is not None else list(loaded.recipe.targets)
    told: list[dict[str, Any]] = []
    for name in names:
        wanted = open_target(loaded, name, environment)
        stack, basis = _stack(loaded, wanted)
        stack = replace(stack, driver=driver)
        findings = judge(stack)
        told.append(_as_json(wanted, stack, basis, findings))
        if not as_json:
            _print(loaded, wanted, basis, findings, first=name == names[0])
    if as_json:
        print_json({"recipe": loaded.recipe.name, "targets": told})
    if any(one["verdict"] == "bad" for one in told):
        sys.exit(3)


def _stack(loaded: LoadedRecipe, target: Target) -> tuple[Stack, str]:
    """Return the stack of `target`, and a description of its source."""
    from envbuild.compat.stack import stack_of

    conda = loaded.recipe.environment == "conda"
    fault, versions = _locked(loaded, target, conda)
    if versions is not None:
        return stack_of(loaded, target, versions, conda=conda), "as locked"
    return stack_of(loaded, target, None), f"as the recipe pins it: {fault}"


def _locked(loaded: LoadedRecipe, target: Target, conda: bool) -> tuple[str, Mapping[str, str] | None]:
    """Return name → version of the current lock, or the reason why there is none."""
    from envbuild.errors import LockError

    try:
        if conda:
            from envbuild.lock.conda_kind import conda_lock

            of_conda = conda_lock(loaded, target).inspect()
            if of_conda.fault is None and of_conda.lock is not None:
                return "", of_conda.lock.versions
            return f"{of_conda.path.name}: {of_conda.fault}", None
        from envbuild.lock.wheels import wheel_lock

        state = wheel_lock(loaded, target).inspect()
        if state.fault is None and state.lock is not None:
            return "", {package.name: package.version for package in state.lock.packages}
        return f"{state.path.name}: {state.fault}", None
    except LockError as error:
        return error.message, None


def _verdict(findings: list[CompatFinding]) -> str:
    statuses = {finding.status for finding in findings}
    return next((one for one in ("bad", "unknown") if one in statuses), "good")


def _as_json(target: Target, stack: Stack, basis: str, findings: list[CompatFinding]) -> dict[str, Any]:
    # `rocm` is shown only for targets that have it, so that the output for others does not change.
    names = [name for name in stack.__slots__ if name != "packages" and (name != "rocm" or stack.rocm)]
    return {
        "target": target.name,
        "basis": basis,
        "verdict": _verdict(findings),
        "stack": {name: getattr(stack, name) for name in names},
        "findings": [finding.as_json() for finding in findings],
    }


def _print(loaded: LoadedRecipe, target: Target, basis: str, findings: list[CompatFinding], *, first: bool) -> None:
    if not first:
        click.echo()
    click.echo(click.style(f"{loaded.recipe.name} for {target.name}", bold=True) + f", {basis}")
    for finding in findings:
        status = click.style(f"{finding.status:7}", fg=_COLOURS[finding.status])
        lines = wrap(finding.text, _WIDTH - len(_INDENT), break_on_hyphens=False)
        click.echo(f"  {status}  {finding.subject:10}{lines[0] if lines else ''}")
        for line in lines[1:]:
            click.echo(_INDENT + line)
        if finding.fix and finding.status != "good":
            _say("fix: ", finding.fix)
        if finding.source:
            _say("source: ", f"{finding.source} ({finding.date})")
    bad, unknown = (sum(finding.status == status for finding in findings) for status in ("bad", "unknown"))
    click.echo(_summary(bad, unknown, len(findings)))


def _say(label: str, text: str) -> None:
    for line in wrap(label + text, _WIDTH - len(_INDENT), break_long_words=False, break_on_hyphens=False):
        click.echo(_INDENT + click.style(line, dim=True))


def _summary(bad: int, unknown: int, all_of_them: int) -> str:
    if not all_of_them:
        return "  nothing to judge: no CUDA, no layers"
    parts = [f"{bad} known not to work" if bad else "nothing is known not to work"]
    if unknown:
        parts.append(f"{unknown} not known")
    return "  " + ", ".join(parts)
