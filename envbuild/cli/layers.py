"""`envbuild layers`."""

from __future__ import annotations

import click

from envbuild.cli.common import (
    json_option,
    locked_option,
    log,
    offline_option,
    open_recipe,
    open_target,
    print_json,
    target_option,
)
from envbuild.environment import load_environment


@click.command("layers")
@click.argument("recipe")
@target_option
@click.option(
    "--for", "place", type=click.Choice(["image", "host"]), default="image", show_default=True,
    help="image: in the image with compilers that images' layers are built in; host: by this host's compilers, for "
    "venv and conda.",
)  # fmt: skip
@locked_option
@offline_option
@json_option
def layers_command(recipe: str, target: str | None, place: str, locked: bool, offline: bool, as_json: bool) -> None:
    """Build the source-built layers of RECIPE ([layers]) alone, into the store, and print their folders.

    Builds of artifacts do this by themselves. Layers for another architecture are built on a node that has it; where
    the store is shared, images are then assembled anywhere.

    \b
    Examples:
      envbuild layers pt_efa
      srun -p arm envbuild layers pt_efa --target cu130-aarch64
      envbuild layers pt_efa --for host --json
    """
    from envbuild.kinds.prepare import build_layers
    from envbuild.layers.requested import before_environment, for_host, for_image

    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    wanted = open_target(loaded, target, environment)
    if place == "image":
        found = for_image(loaded, wanted, environment, locked=locked, offline=offline, log=log)
    else:
        every = for_host(loaded, wanted, environment)
        found = before_environment(every)
        for late in (one for one in every.sources if one not in found.sources):
            log(f"{late.name} {late.version} is compiled with its environment: envbuild venv")
    built = build_layers(found, loaded.folder, environment, offline=offline)
    if as_json:
        layers = [
            {
                "name": one.source.name,
                "version": one.source.version,
                "digest": one.source.digest,
                "files": one.listed.digest,
                "path": str(one.folder),
            }
            for one in built
        ]
        print_json({"recipe": loaded.recipe.name, "target": wanted.name, "layers": layers})
        return
    if not built:
        log(f"{loaded.recipe.name} builds nothing from source for {wanted.name}")
    for one in built:
        click.echo(one.folder)
