"""`envbuild plan`."""

from __future__ import annotations

import click

from envbuild.cli.common import (
    json_option,
    locked_option,
    log,
    offline_option,
    open_recipe,
    open_target,
    show_plan,
    target_option,
)
from envbuild.environment import load_environment
from envbuild.kinds import ARTIFACTS, plan_of


@click.command("plan")
@click.argument("recipe")
@target_option
@click.option("--artifact", type=click.Choice(list(ARTIFACTS)), default="venv", show_default=True)
@click.option(
    "--elsewhere", is_flag=True,
    help="Plan a build on another host: accept what this one cannot build, such as a venv of another architecture.",
)  # fmt: skip
@click.option("--no-verify", is_flag=True, help="Plan a build that is not verified and needs no torch.")
@locked_option
@offline_option
@json_option
def plan_command(
    recipe: str,
    target: str | None,
    artifact: str,
    elsewhere: bool,
    no_verify: bool,
    locked: bool,
    offline: bool,
    as_json: bool,
) -> None:
    """Show what building RECIPE would do: ordered layers, each with a digest of all that decides it.

    What the build would refuse is refused here, with the same error and exit code. Nothing is written: a lock that is
    missing or stale is resolved in memory.

    \b
    Examples:
      envbuild plan pt_cpu
      envbuild plan pt_cpu --target cpu-aarch64 --artifact docker --json
      envbuild plan pt_cpu --target cpu-aarch64 --elsewhere
    """
    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    plan = plan_of(
        ARTIFACTS[artifact], loaded, open_target(loaded, target, environment), environment,
        locked=locked, offline=offline, log=log, write=False, here=not elsewhere, verify=not no_verify,
    )  # fmt: skip
    show_plan(plan, as_json)
