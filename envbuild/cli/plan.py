"""`envbuild plan`, and two parts of a build alone: `envbuild layers` and `envbuild bundle`."""

from __future__ import annotations

import click

from envbuild.base.files import build_folder
from envbuild.base.progress import log
from envbuild.bundle import make_bundle
from envbuild.cli import complete
from envbuild.cli.common import check_out, open_build, show, show_plan
from envbuild.cli.options import PATH, BuildOptions, build_options
from envbuild.contract.kinds import ARTIFACTS, kinds_of
from envbuild.kinds import plan_of
from envbuild.kinds.image import image_layers, prepare_image
from envbuild.kinds.prepare import build_layers
from envbuild.layers.requested import before_environment, for_host


@click.command("plan")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@build_options(
    "target",
    click.option("--artifact", type=click.Choice(list(ARTIFACTS)), default="venv", show_default=True),
    click.option(
        "--elsewhere",
        is_flag=True,
        help="Plan a build on another host: accept what this one cannot build, such as a venv of another architecture.",
    ),
    click.option("--no-verify", is_flag=True, help="Plan a build that is not verified and needs no torch."),
    "locked",
    "offline",
    "json",
)
def plan_command(recipe: str | None, artifact: str, elsewhere: bool, options: BuildOptions) -> None:
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
        ARTIFACTS[artifact],
        loaded,
        target,
        environment,
        here=not elsewhere,
        verify=not options.no_verify,
        **options.lock_use | {"write": False},
    )
    show_plan(plan, options.as_json)


@click.command("layers")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@build_options(
    "target",
    click.option(
        "--for",
        "place",
        type=click.Choice(["image", "host"]),
        default="image",
        show_default=True,
        help="image: in the image with compilers that images' layers are built in; host: by this host's compilers, for "
        "venv and conda.",
    ),
    "locked",
    "offline",
    "json",
)
def layers_command(recipe: str | None, place: str, options: BuildOptions) -> None:
    """Build the source-built layers of RECIPE ([layers]) alone, into the store, and print their folders.

    Builds of artifacts do this by themselves. Layers for another architecture are built on a node that has it; where
    the store is shared, images are then assembled anywhere.

    \b
    Examples:
      envbuild layers pt_efa
      srun -p arm envbuild layers pt_efa --target cu130-aarch64
      envbuild layers pt_efa --for host --json
    """
    environment, loaded, target = open_build(recipe, options.target)
    if place == "image":
        image = prepare_image(loaded, target, environment, bytecode=False, **options.lock_use)
        built = image_layers(image, environment, offline=options.offline)
    else:
        every = for_host(loaded, target, environment)
        found = before_environment(every)
        for late in (one for one in every.every if one not in found.sources):
            log(f"{late.name} is compiled with its environment: envbuild venv")
        built = build_layers(found, loaded.folder, environment, offline=options.offline)
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


@click.command("bundle")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@build_options(
    "target",
    click.option(
        "--kind",
        "kinds",
        type=click.Choice(kinds_of("folder")),
        multiple=True,
        default=("venv",),
        show_default=True,
        help="What is to be built from it; repeatable.",
    ),
    click.option("--out", type=PATH, metavar="DIR", help="Default: build/RECIPE/TARGET/bundle."),
    click.option("--no-tools", is_flag=True, help="Leave envbuild itself out: the nodes have it."),
    "offline",
    "json",
)
def bundle_command(recipe: str | None, kinds: tuple[str, ...], no_tools: bool, options: BuildOptions) -> None:
    """Collect all that building RECIPE reads into a folder, for nodes without a network.

    It holds the recipe with its locks, the locked wheels and packages, sources of layers, and envbuild itself for the
    target's platform. Put it on a file system that the nodes see.

    \b
    Examples:
      envbuild bundle pt_cpu --target cpu-aarch64 --out /fsx/bundles/pt_cpu-arm
      envbuild venv pt_cpu --job --site slurm-modules --bundle /fsx/bundles/pt_cpu --submit
      ENVBUILD_STORE=B/store PYTHONPATH=B/envbuild python3.11 -m envbuild venv B/recipes/pt_cpu --offline
    """
    check_out(options.out)
    environment, loaded, target = open_build(recipe, options.target)
    path = options.out or build_folder() / loaded.recipe.name / target.name / "bundle"
    about = make_bundle(
        loaded, target, environment, path, log, kinds=kinds, tools=not no_tools, offline=options.offline
    )
    show(options.as_json, {"path": str(path.absolute()), **about}, path)
