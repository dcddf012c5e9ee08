"""`envbuild plan`, `layers`, `bundle` and `matrix`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from envbuild import matrix
from envbuild.base.errors import EnvbuildError, LockError, RecipeError, UsageError, joined
from envbuild.base.files import build_folder
from envbuild.base.progress import log
from envbuild.base.toml import nearest
from envbuild.build.bundle import make_bundle
from envbuild.build.image import image_layers, plan_of, prepare_image
from envbuild.build.prepare import build_layers
from envbuild.cli import complete, layout
from envbuild.cli.common import (
    PATH,
    BuildOptions,
    Names,
    build_options,
    check_out,
    open_build,
    open_recipe,
    show,
    show_plan,
    with_options,
)
from envbuild.contract.kinds import ARTIFACTS, kinds_of
from envbuild.data import load_table
from envbuild.environment import Environment
from envbuild.layers.requested import before_environment, for_host
from envbuild.recipe.find import list_recipes, search_folders
from envbuild.run_environment import load_environment


@click.command("plan")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@build_options(
    "target",
    click.option("--artifact", type=click.Choice(list(ARTIFACTS)), default="venv", show_default=True),
    click.option(
        "--elsewhere",
        is_flag=True,
        help="Plan a build for another host: accept builds that this host cannot run, such as another architecture.",
    ),
    click.option("--no-verify", is_flag=True, help="Plan a build that is not verified and needs no torch."),
    "locked",
    "offline",
    "json",
)
def plan_command(recipe: str | None, artifact: str, elsewhere: bool, options: BuildOptions) -> None:
    """Show the steps of a build of RECIPE in order, each with a digest of its inputs.

    The plan fails with the same errors and exit codes as the build would. Nothing is written: a missing or stale lock
    is resolved in memory.

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
        help="image: build in the builder image, for container images; host: with this host's compilers, for "
        "venv and conda.",
    ),
    "locked",
    "offline",
    "json",
)
def layers_command(recipe: str | None, place: str, options: BuildOptions) -> None:
    """Build the source-built layers of RECIPE ([layers]) alone, into the store, and print their folders.

    Builds of artifacts do this by themselves. Build layers for another architecture on a node that has it; if the store
    is shared, images can then be assembled on any host.

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
        requested_layers = before_environment(every)
        for late in (layer for layer in every.every if layer not in requested_layers.sources):
            log(f"{late.name} is compiled with its environment: envbuild venv")
        built = build_layers(requested_layers, loaded.folder, environment, offline=options.offline)
    if not built and not options.as_json:
        log(f"{loaded.recipe.name} builds nothing from source for {target.name}")
    layers = [
        {
            "name": folder.source.name,
            "version": folder.source.version,
            "digest": folder.source.digest,
            "files": folder.listed.digest,
            "path": str(folder.folder),
        }
        for folder in built
    ]
    about = {"recipe": loaded.recipe.name, "target": target.name, "layers": layers}
    show(options.as_json, about, *(folder.folder for folder in built))


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
        help="Kind of artifact to build from it; repeatable.",
    ),
    click.option("--out", type=PATH, metavar="DIR", help="Default: build/RECIPE/TARGET/bundle."),
    click.option("--no-tools", is_flag=True, help="Leave out envbuild itself, which the nodes already have."),
    "offline",
    "json",
)
def bundle_command(recipe: str | None, kinds: tuple[str, ...], no_tools: bool, options: BuildOptions) -> None:
    """Collect all inputs of a build of RECIPE in a folder, for nodes without a network.

    The bundle contains the recipe with its locks, the locked wheels and packages, the sources of layers, and envbuild
    itself for the target's platform. Put it on a file system that the nodes see.

    \b
    Examples:
      envbuild bundle pt_cpu --target cpu-aarch64 --out /fsx/bundles/pt_cpu-arm
      envbuild venv pt_cpu --job --site slurm-modules --bundle /fsx/bundles/pt_cpu --submit
      ENVBUILD_VAULT=oci:B PYTHONPATH=B/envbuild python3.11 -m envbuild venv B/recipes/pt_cpu --offline
    """
    check_out(options.out)
    environment, loaded, target = open_build(recipe, options.target)
    path = options.out or build_folder() / loaded.recipe.name / target.name / "bundle"
    about = make_bundle(
        loaded, target, environment, path, log, kinds=kinds, tools=not no_tools, offline=options.offline
    )
    show(options.as_json, {"path": str(path.absolute()), **about}, path)


@click.command("matrix")
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete.recipes)
@click.option(
    "--artifact",
    "artifacts",
    multiple=True,
    metavar="KIND",
    help=f"Only this kind ({', '.join(ARTIFACTS)}); repeatable.",
)
@with_options("targets")
@click.option(
    "--format",
    "form",
    type=click.Choice(["github", "gitlab", "json", "table"]),
    help="A matrix for GitHub, a child pipeline for GitLab, an array, or a table. Default: table on a terminal, else "
    "json.",
)
@click.option(
    "--changed-since",
    metavar="REV",
    help="Only recipes whose folder changed since this git revision, or all when envbuild did.",
)
@click.option(
    "--runner",
    "runners",
    multiple=True,
    metavar="ARCH=LABEL",
    help="Runner of an architecture, or of one TARGET whose GPUs it has; repeatable.",
)
@click.option("--strict", is_flag=True, help="Exit 3 if a build is left out because its lock is missing or stale.")
def matrix_command(
    recipes: Names,
    artifacts: Names,
    targets: Names,
    form: str | None,
    changed_since: str | None,
    runners: Names,
    strict: bool,
) -> None:
    """List the builds that a CI should run: RECIPE… × targets × artifacts, each with its runner.

    Without RECIPE, all recipes of `envbuild list`. Builds that `envbuild plan --locked` refuses are left out, with the
    reason on standard error.

    \b
    Examples:
      envbuild matrix
      envbuild matrix pt_cpu --artifact docker --format github
      envbuild matrix --changed-since origin/main --format gitlab > child.yml
      envbuild matrix --runner aarch64=my-arm --runner cu126-x86_64=my-gpu
    """
    for name in artifacts:
        if name not in ARTIFACTS:
            raise UsageError(f"no artifact {name!r}{nearest(name, ARTIFACTS)}")
    labels = matrix.parse_runners(runners, load_table("runners")["gitlab" if form == "gitlab" else "github"])
    environment = load_environment()
    chosen = _choose(recipes, environment)
    matrix.check_targets(chosen, targets)
    if changed_since is not None:
        chosen = _changed(chosen, changed_since)
    jobs, omitted = matrix.make_jobs(chosen, labels, environment, artifacts=artifacts, targets=targets)
    unlocked = [item for item in omitted if strict and isinstance(item.error, LockError)]
    for omission in omitted:
        if omission not in unlocked:
            log(str(omission))
    if unlocked:
        raise LockError("\n".join(map(str, unlocked)), "leave --strict out to list the others")
    form = form or ("table" if sys.stdout.isatty() else "json")
    forms = {"github": matrix.as_github, "gitlab": matrix.as_gitlab, "json": matrix.as_json, "table": _table}
    click.echo(forms[form](jobs))


def _table(jobs: Sequence[matrix.MatrixJob]) -> str:
    """Return a line for each job: its build, its runner, and whether it is verified there."""
    rows = [[job.recipe, job.target, job.artifact, job.runner, "verified" if job.verify else "built"] for job in jobs]
    return "\n".join(map(layout.fitted, layout.columns(rows)))


def _choose(names: Names, environment: Environment) -> list[matrix.SelectedRecipe]:
    """Return the recipes called `names`, or all. Raises one RecipeError for the faults of all of them."""
    chosen, errors = [], []
    for name in names or [entry.name for entry in list_recipes(search_folders(environment.site.recipe_folders))]:
        try:
            chosen.append(matrix.SelectedRecipe(name, open_recipe(name, environment)))
        except EnvbuildError as error:
            errors.append(error)
    if errors:
        raise joined(RecipeError, errors)
    if not chosen:
        raise UsageError("there are no recipes", "name a recipe, or write recipes/NAME/recipe.toml")
    return chosen


def _changed(chosen: list[matrix.SelectedRecipe], revision: str) -> list[matrix.SelectedRecipe]:
    top, files = matrix.changes_since(revision, Path())
    for recipe in chosen:
        folders = [recipe.loaded.folder, *([recipe.loaded.code.root] if recipe.loaded.code else [])]
        for folder in (path.resolve() for path in folders):
            if not folder.is_relative_to(top.resolve()):
                log(f"{recipe.name}: {folder} is not in this checkout, so nothing in it counts as changed")
    return matrix.changed_recipes(chosen, top.resolve(), files)
