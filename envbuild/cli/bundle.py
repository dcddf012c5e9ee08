"""`envbuild bundle`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.common import check_out, log, open_build, show
from envbuild.cli.options import PATH, BuildOptions, build_options
from envbuild.kinds import kinds_of


@click.command("bundle")
@click.argument("recipe")
@build_options(
    "target",
    click.option(
        "--kind", "kinds", type=click.Choice(kinds_of("folder")), multiple=True, default=("venv",), show_default=True,
        help="What is to be built from it; repeatable.",
    ),
    click.option("--out", type=PATH, metavar="DIR", help="Default: build/RECIPE/TARGET/bundle."),
    click.option("--no-tools", is_flag=True, help="Leave envbuild itself out: the nodes have it."),
    "offline", "json",
)  # fmt: skip
def bundle_command(recipe: str, kinds: tuple[str, ...], no_tools: bool, options: BuildOptions) -> None:
    """Collect all that building RECIPE reads into a folder, for nodes without a network.

    It holds the recipe with its locks, the locked wheels and packages, sources of layers, and envbuild itself for the
    target's platform. Put it on a file system that the nodes see.

    \b
    Examples:
      envbuild bundle pt_cpu --target cpu-aarch64 --out /fsx/bundles/pt_cpu-arm
      envbuild venv pt_cpu --job --site slurm-modules --bundle /fsx/bundles/pt_cpu --submit
      ENVBUILD_STORE=B/store PYTHONPATH=B/envbuild python3.11 -m envbuild venv B/recipes/pt_cpu --offline
    """
    from envbuild.bundle import make_bundle

    check_out(options.out)
    environment, loaded, target = open_build(recipe, options.target)
    path = options.out or Path("build") / loaded.recipe.name / target.name / "bundle"
    about = make_bundle(
        loaded, target, environment, path, log, kinds=kinds, tools=not no_tools, offline=options.offline
    )  # fmt: skip
    show(options.as_json, {"path": str(path.absolute()), **about}, path)
