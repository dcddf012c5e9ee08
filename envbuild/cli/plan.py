"""`envbuild plan`."""

from __future__ import annotations

import click

from envbuild.cli.common import (
    json_option,
    locked_option,
    offline_option,
    open_recipe,
    open_target,
    print_json,
    print_plan,
    say,
    target_option,
)
from envbuild.environment import load_environment
from envbuild.make import prepare

IMAGES = ("docker", "enroot", "apptainer")


@click.command("plan")
@click.argument("recipe")
@target_option
@click.option(
    "--artifact",
    type=click.Choice(["conda", "venv", *IMAGES]),
    default="venv",
    show_default=True,
)
@locked_option
@offline_option
@json_option
def plan_command(
    recipe: str, target: str | None, artifact: str, locked: bool, offline: bool, as_json: bool
) -> None:
    """Show what building RECIPE would do: ordered layers, each with a digest of all that decides it.

    \b
    Examples:
      envbuild plan pt_cpu
      envbuild plan pt_cpu --target cpu-aarch64 --artifact docker --json
    """
    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    wanted = open_target(loaded, target, environment)
    if artifact in IMAGES:
        from envbuild.make_image import prepare_image

        plan = prepare_image(
            loaded, wanted, environment, locked=locked, offline=offline, bytecode=True, say=say
        ).plan
    else:
        plan, _ = prepare(
            loaded, wanted, environment, artifact=artifact, locked=locked, offline=offline, say=say,
            conda=artifact == "conda",
        )  # fmt: skip
    if as_json:
        print_json(plan.as_json())
        return
    print_plan(plan)
