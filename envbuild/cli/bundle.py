"""`envbuild bundle`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.common import (
    check_out,
    json_option,
    log,
    offline_option,
    open_recipe,
    open_target,
    print_json,
    target_option,
)
from envbuild.environment import load_environment
from envbuild.kinds import kinds_of


@click.command("bundle")
@click.argument("recipe")
@target_option
@click.option(
    "--kind", "kinds", type=click.Choice(kinds_of("folder")), multiple=True, default=("venv",), show_default=True,
    help="What is to be built from it; repeatable.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Default: build/RECIPE/TARGET/bundle.")
@click.option("--no-tools", is_flag=True, help="Leave envbuild itself out: the nodes have it.")
@offline_option
@json_option
def bundle_command(
    recipe: str,
    target: str | None,
    kinds: tuple[str, ...],
    out: Path | None,
    no_tools: bool,
    offline: bool,
    as_json: bool,
) -> None:
    """Collect all that building RECIPE reads into a folder, for nodes without a network.

    It holds the recipe with its locks, the locked wheels and packages, sources of layers, and envbuild itself for
    the target's platform. Put it on a file system that the nodes see.

    \b
    Examples:
      envbuild bundle pt_cpu --target cpu-aarch64 --out /fsx/bundles/pt_cpu-arm
      envbuild venv pt_cpu --job --site slurm-modules --bundle /fsx/bundles/pt_cpu --submit
      ENVBUILD_STORE=B/store PYTHONPATH=B/envbuild python3.11 -m envbuild venv B/recipes/pt_cpu --offline
    """
    from envbuild.bundle import make_bundle

    check_out(out)
    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    wanted = open_target(loaded, target, environment)
    path = out or Path("build") / loaded.recipe.name / wanted.name / "bundle"
    about = make_bundle(loaded, wanted, environment, path, log, kinds=kinds, tools=not no_tools, offline=offline)
    if as_json:
        print_json({"path": str(path.absolute()), **about})
    else:
        click.echo(path)
