"""`envbuild matrix`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from envbuild import matrix
from envbuild.base.errors import EnvbuildError, LockError, RecipeError, UsageError, joined
from envbuild.base.progress import log
from envbuild.base.toml import nearest
from envbuild.cli import complete, layout
from envbuild.cli.common import open_recipe
from envbuild.cli.options import Names
from envbuild.contract.kinds import ARTIFACTS
from envbuild.data import load_table
from envbuild.environment import Environment, load_environment
from envbuild.recipe.find import list_recipes, search_folders


@click.command("matrix")
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete.recipes)
@click.option(
    "--artifact",
    "artifacts",
    multiple=True,
    metavar="KIND",
    help=f"Only this kind ({', '.join(ARTIFACTS)}); repeatable.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="TARGET",
    shell_complete=complete.targets,
    help="Only this target; repeatable.",
)
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
@click.option("--strict", is_flag=True, help="Exit 3 where a build is left out for want of a current lock.")
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

    Without RECIPE, all that `envbuild list` shows. A build that `envbuild plan --locked` refuses is left out, and
    standard error says why.

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
    unlocked = [one for one in omitted if strict and isinstance(one.error, LockError)]
    for one in omitted:
        if one not in unlocked:
            log(str(one))
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
    for one in chosen:
        folders = [one.loaded.folder, *([one.loaded.code.root] if one.loaded.code else [])]
        for folder in (one.resolve() for one in folders):
            if not folder.is_relative_to(top.resolve()):
                log(f"{one.name}: {folder} is not in this checkout, so nothing in it counts as changed")
    return matrix.changed_recipes(chosen, top.resolve(), files)
