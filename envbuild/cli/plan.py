"""`envbuild plan`."""

from __future__ import annotations

import click

from envbuild.cli.common import open_build, show_plan
from envbuild.cli.options import BuildOptions, build_options
from envbuild.kinds import ARTIFACTS, plan_of


@click.command("plan")
@click.argument("recipe")
@build_options(
    "target",
    click.option("--artifact", type=click.Choice(list(ARTIFACTS)), default="venv", show_default=True),
    click.option(
        "--elsewhere", is_flag=True,
        help="Plan a build on another host: accept what this one cannot build, such as a venv of another architecture.",
    ),
    click.option("--no-verify", is_flag=True, help="Plan a build that is not verified and needs no torch."),
    "locked", "offline", "json",
)  # fmt: skip
def plan_command(recipe: str, artifact: str, elsewhere: bool, options: BuildOptions) -> None:
    """Show what building RECIPE would do: ordered layers, each with a digest of all that decides it.

    What the build would refuse is refused here, with the same error and exit code. Nothing is written: a lock that is
    missing or stale is resolved in memory.

    \b
    Examples:
      envbuild plan pt_cpu
      envbuild plan pt_cpu --target cpu-aarch64 --artifact docker --json
      envbuild plan pt_cpu --target cpu-aarch64 --elsewhere
    """
    environment, loaded, target = open_build(recipe, options.target)
    plan = plan_of(
        ARTIFACTS[artifact], loaded, target, environment,
        here=not elsewhere, verify=not options.no_verify, **options.lock_use | {"write": False},
    )  # fmt: skip
    show_plan(plan, options.as_json)
