"""`envbuild layers`."""

from __future__ import annotations

import click

from envbuild.cli.common import log, open_build, show
from envbuild.cli.options import BuildOptions, build_options


@click.command("layers")
@click.argument("recipe")
@build_options(
    "target",
    click.option(
        "--for", "place", type=click.Choice(["image", "host"]), default="image", show_default=True,
        help="image: in the image with compilers that images' layers are built in; host: by this host's compilers, for "
        "venv and conda.",
    ),
    "locked", "offline", "json",
)  # fmt: skip
def layers_command(recipe: str, place: str, options: BuildOptions) -> None:
    """Build the source-built layers of RECIPE ([layers]) alone, into the store, and print their folders.

    Builds of artifacts do this by themselves. Layers for another architecture are built on a node that has it; where
    the store is shared, images are then assembled anywhere.

    \b
    Examples:
      envbuild layers pt_efa
      srun -p arm envbuild layers pt_efa --target cu130-aarch64
      envbuild layers pt_efa --for host --json
    """
    from envbuild.kinds.source_layers import build_layers
    from envbuild.layers.requested import before_environment, for_host, for_image

    environment, loaded, target = open_build(recipe, options.target)
    if place == "image":
        found = for_image(loaded, target, environment, **options.lock_use)
    else:
        every = for_host(loaded, target, environment)
        found = before_environment(every)
        for late in (one for one in every.sources if one not in found.sources):
            log(f"{late.name} {late.version} is compiled with its environment: envbuild venv")
    built = build_layers(found, loaded.folder, environment, log, offline=options.offline)
    if not built and not options.as_json:
        log(f"{loaded.recipe.name} builds nothing from source for {target.name}")
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
    about = {"recipe": loaded.recipe.name, "target": target.name, "layers": layers}
    show(options.as_json, about, *(one.folder for one in built))
