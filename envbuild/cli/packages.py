"""`envbuild add` and `envbuild remove`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from envbuild.base.progress import log
from envbuild.cli import complete
from envbuild.cli.common import open_own_recipe, run_environment, show
from envbuild.cli.options import Decorator, Names, with_options

if TYPE_CHECKING:
    from envbuild.environment import Environment
    from envbuild.imports.packages import PackageEdit

_PIP_OR_CONDA = click.option(
    "--conda/--pip",
    "conda",
    default=None,
    help="Match specs of [conda], or pip's requirements. Default: as the recipe's `environment`.",
)


def _shared(*own: Decorator) -> Decorator:
    return with_options(
        click.option(
            "--recipe",
            metavar="RECIPE",
            shell_complete=complete.recipes,
            help="The recipe. Default: the project's only one.",
        ),
        click.option(
            "--target", metavar="TARGET", shell_complete=complete.targets, help="Only this target. Default: all."
        ),
        *own,
        "dry-run",
        "json",
    )


@click.command("add")
@click.argument("packages", nargs=-1, required=True, metavar="PACKAGE…")
@_shared(_PIP_OR_CONDA)
def add_command(
    packages: Names, recipe: str | None, target: str | None, conda: bool | None, dry_run: bool, as_json: bool
) -> None:
    """Add packages to the recipe, and lock it again.

    PACKAGE is a pip requirement, such as numpy, 'numpy>=2' or 'pkg @ git+https://…', for a recipe of conda packages a
    match spec. A package that the recipe has gets the new version where it stands; torch gets the build of each target.
    Comments and layout of the recipe stay. If the packages cannot be locked, nothing is changed.

    \b
    Examples:
      envbuild add rich 'pillow>=11'
      envbuild add torch==2.13.0 --target cpu-x86_64
      envbuild add einops --recipe my_train --dry-run
    """
    from envbuild.imports.packages import add_packages

    environment = run_environment()
    loaded = open_own_recipe(recipe, environment)
    _finish(add_packages(loaded, packages, target=target, conda=conda), environment, dry_run, as_json)


@click.command("remove")
@click.argument("packages", nargs=-1, required=True, metavar="PACKAGE…")
@_shared()
def remove_command(packages: Names, recipe: str | None, target: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove packages from the recipe, and lock it again.

    PACKAGE is a name. It goes from all lists of the recipe, or of --target, with what [indexes] and [build] say of it.
    If the rest cannot be locked, nothing is changed.

    \b
    Examples:
      envbuild remove rich
      envbuild remove einops --recipe my_train --dry-run
    """
    from envbuild.imports.packages import remove_packages

    environment = run_environment()
    loaded = open_own_recipe(recipe, environment)
    _finish(remove_packages(loaded, packages, target=target), environment, dry_run, as_json)


def _finish(edit: PackageEdit, environment: Environment, dry_run: bool, as_json: bool) -> None:
    """Lock and write the recipe, and print what changed."""
    path = edit.before.path
    for place, old, new in edit.changes:
        log(f"{path}: {place}: {f'{old} -> {new}' if old and new else f'+ {new}' if new else f'- {old}'}")
    if not edit.changes:
        log(f"{path}: nothing to change")
    locks = edit.lock(environment, write=not dry_run) if edit.changes else {}
    changes = [{"list": place, "before": old or None, "after": new or None} for place, old, new in edit.changes]
    about = {"path": str(path), "recipe": edit.after.recipe.name, "changes": changes, "locks": locks}
    show(as_json, about, path)
