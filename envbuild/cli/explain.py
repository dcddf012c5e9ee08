"""`envbuild explain`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.common import open_recipe, open_target, print_json
from envbuild.cli.options import with_options
from envbuild.environment import load_environment
from envbuild.errors import LockError

if TYPE_CHECKING:
    from envbuild.compat.finding import CompatFinding
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
@with_options("json")
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
        statuses = {finding.status for finding in findings}
        # `rocm` is shown only for targets that have it, so that the output for others does not change.
        shown = [field for field in stack.__slots__ if field != "packages" and (field != "rocm" or stack.rocm)]
        told.append(
            {
                "target": wanted.name,
                "basis": basis,
                "verdict": next((one for one in ("bad", "unknown") if one in statuses), "good"),
                "stack": {field: getattr(stack, field) for field in shown},
                "findings": [finding.as_json() for finding in findings],
            }
        )
        if not as_json:
            if name != names[0]:
                click.echo()
            click.echo(click.style(f"{loaded.recipe.name} for {wanted.name}", bold=True) + f", {basis}")
            _print(findings)
    if as_json:
        print_json({"recipe": loaded.recipe.name, "targets": told})
    if any(one["verdict"] == "bad" for one in told):
        sys.exit(3)


def _stack(loaded: LoadedRecipe, target: Target) -> tuple[Stack, str]:
    """Return the stack of `target`, and a description of its source."""
    from envbuild.compat.stack import stack_of

    conda = loaded.recipe.environment == "conda"
    try:
        state = _lock_state(loaded, target, conda)
    except LockError as error:
        state = error.message
    if isinstance(state, str):
        return stack_of(loaded, target, None), f"as the recipe pins it: {state}"
    return stack_of(loaded, target, state, conda=conda), "as locked"


def _lock_state(loaded: LoadedRecipe, target: Target, conda: bool) -> Mapping[str, str] | str:
    """Return name → version of the current lock, or the reason why there is none. Raises LockError."""
    from envbuild.lock.conda_kind import conda_lock, conda_versions
    from envbuild.lock.wheels import wheel_lock

    if conda:
        of_conda = conda_lock(loaded, target).inspect()
        if of_conda.fault is None and of_conda.lock is not None:
            return conda_versions(of_conda.lock)
        return f"{of_conda.path.name}: {of_conda.fault}"
    state = wheel_lock(loaded, target).inspect()
    if state.fault is None and state.lock is not None:
        return {package.name: package.version for package in state.lock.packages}
    return f"{state.path.name}: {state.fault}"


def _print(findings: Sequence[CompatFinding]) -> None:
    for finding in findings:
        status = click.style(f"{finding.status:7}", fg=_COLOURS[finding.status])
        lines = wrap(finding.text, _WIDTH - len(_INDENT), break_on_hyphens=False)
        click.echo(f"  {status}  {finding.subject:10}{lines[0] if lines else ''}")
        for line in lines[1:]:
            click.echo(_INDENT + line)
        notes = [f"fix: {finding.fix}"] if finding.fix and finding.status != "good" else []
        notes += [f"source: {finding.source} ({finding.date})"] if finding.source else []
        for note in notes:
            for line in wrap(note, _WIDTH - len(_INDENT), break_long_words=False, break_on_hyphens=False):
                click.echo(_INDENT + click.style(line, dim=True))
    if not findings:
        click.echo("  nothing to judge: no CUDA, no layers")
        return
    bad, unknown = (sum(finding.status == status for finding in findings) for status in ("bad", "unknown"))
    known = f"{bad} known not to work" if bad else "nothing is known not to work"
    click.echo(f"  {known}, {unknown} not known" if unknown else f"  {known}")
