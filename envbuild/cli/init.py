"""`envbuild init`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from envbuild.base.errors import UsageError
from envbuild.base.progress import log
from envbuild.cli.common import PATH, open_own_recipe, run_environment, show, with_options
from envbuild.contract.kinds import ARTIFACTS
from envbuild.debian.lock import suites_by_python
from envbuild.fabrics import fabric_names
from envbuild.imports.origin import ImportedRecipe, Origin, new_recipe, read_sources, updated_recipe
from envbuild.imports.statement import Statement, recipe_name
from envbuild.recipe.find import command_word
from envbuild.recipe.targets import CUDA, ROCM, Target, host_arch
from envbuild.site.settings import load_site

_SHOWN = 3


@click.command("init")
@click.argument("name", required=False)
@with_options(
    click.option(
        "--from",
        "sources",
        multiple=True,
        type=PATH,
        metavar="PATH",
        help="A file, a project's folder, or an environment. Repeatable.",
    ),
    click.option("--update", is_flag=True, help="Update the recipe from its changed sources, and show the changes."),
    click.option(
        "--extra",
        "groups",
        multiple=True,
        metavar="NAME",
        help="Carry this extra, dependency group, feature or category too. Repeatable.",
    ),
    "target",
    "dry-run",
    "json",
)
def init_command(
    name: str | None,
    sources: Sequence[Path],
    update: bool,
    groups: Sequence[str],
    target: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write recipes/NAME/recipe.toml from the files that a project has; without --from, ask for the packages.

    Reads requirements.txt, pyproject.toml, uv.lock, pylock.toml, poetry.lock, Pipfile.lock, environment.yml,
    conda-lock.yml, pixi.toml, pixi.lock, Dockerfiles, venvs and conda environments. The versions of locks become
    constraints. Each statement that the recipe does not have is listed with its place and the reason.

    With --update, an existing recipe takes the changes of its sources, and keeps your edits. A value that changed in
    both stays as in the recipe, and is listed.

    \b
    Examples:
      envbuild init --from requirements.txt
      envbuild init my_train --from pyproject.toml --from uv.lock --extra gpu
      envbuild init --from environment.yml --dry-run
      envbuild init --update
    """
    artifact = ""
    environment = run_environment()
    if update:
        loaded = open_own_recipe(name, environment)
        made = updated_recipe(loaded, sources, groups, target)
    elif sources:
        origin = Origin(tuple(sources), tuple(groups), target)
        made = new_recipe(name, read_sources(origin), origin, environment)
    elif sys.stdin.isatty():
        name, target, artifact, statements = _dialogue(name, target)
        made = new_recipe(name, statements, Origin((), (), target), environment)
    else:
        raise UsageError(
            "no source, and no terminal to ask on", "name the files: envbuild init --from requirements.txt"
        )
    if not dry_run:
        made.write()
    draft, word = made.draft, command_word(made.loaded)
    artifact = artifact or made.loaded.recipe.environment
    following = [f"envbuild show {word}", f"envbuild lock {word}", f"envbuild {artifact} {word}"]
    left = [{"place": statement.place, "text": statement.text, "reason": statement.reason} for statement in draft.lost]
    carried = [asdict(statement) for statement in draft.carried]
    about = {"path": str(made.path), "recipe": made.text, "next": following, "carried": carried, "not_carried": left}
    if draft.warning:
        about["warning"] = draft.warning
    if update:
        about |= {"diff": made.diff, "conflicts": list(made.conflicts)}
    for line in [] if as_json else [*report_import(made), f"next: {' · '.join(following)}"]:
        log(line)
    shown = [] if not dry_run else made.diff if update else [made.text]
    show(as_json, about, *shown, made.path)


def report_import(made: ImportedRecipe) -> Iterator[str]:
    """Yield the result of an import as lines: imported statements, statements without an equivalent, changes."""
    draft = made.draft
    count = f"{len(draft.carried)} statement{'s' * (len(draft.carried) != 1)}"
    yield f"carried: {count} into {', '.join(draft.data['targets'])}"
    reasons: dict[str, list[Statement]] = {}
    for statement in draft.lost:
        reasons.setdefault(statement.reason, []).append(statement)
    if draft.lost:
        yield f"not carried: {len(draft.lost)}"
    for reason, statements in reasons.items():
        yield f"  {reason}:"
        yield from (f"    {statement.place}: {statement.text}" for statement in statements[:_SHOWN])
        if len(statements) > _SHOWN:
            yield f"    and {len(statements) - _SHOWN} more; --json lists all"
    if made.before is not None:
        if not made.changed:
            yield f"{made.path}: nothing changed"
        yield from made.diff
        yield from (f"kept as you edited it: {conflict}" for conflict in made.conflicts)
    if "project" in draft.data:
        folder = draft.data["project"]["path"]
        yield (
            f"note: [project] path = {folder!r}: every artifact holds the package of that folder, and its requirements"
            " join the lock; for the dependencies alone, remove [project]"
        )
    python, debian = str(draft.data["python"]), suites_by_python()
    if python not in debian and draft.data.get("environment") != "conda" and "base" not in draft.data.get("image", {}):
        yield (
            f"note: Debian has no Python {python} for images: `envbuild venv` needs none; for images choose"
            f" {' or '.join(debian)}, or a `base` in [image]"
        )
    packages = [
        statement.text for statement in draft.carried if statement.kind in ("requirement", "pin", "conda", "conda-pin")
    ]
    if not packages:
        yield (
            "note: the recipe has no package: name other files of the project with --from, its extras with --extra, or"
            " add `requirements`"
        )
    elif not any(re.match(r"(\S*::)?((py|lib)?torch|pytorch-(gpu|cpu))(?![\w.-])", text) for text in packages):
        yield (
            "note: the recipe does not name torch, and verification trains with it: add it, unless another package"
            " requires it; without it: `trainer = false` in [verify]"
        )
    if draft.warning:
        yield f"warning: {draft.warning}"


def _dialogue(name: str | None, target: str | None) -> tuple[str, str, str, list[Statement]]:
    """Ask for name, packages, target, fabric and artifact of a recipe; the defaults come from site and host."""
    from envbuild.doctor.machine import gpus
    from envbuild.doctor.network import adapters
    from envbuild.doctor.probe import Host

    name = name or click.prompt("Name of the recipe", default=recipe_name(Path.cwd().name), err=True)
    packages = click.prompt("Packages, separated by blanks", default="torch", err=True).split()
    host = Host(os.environ)
    facts = gpus(host)[0].facts
    majors = [version.partition(".")[0] for version in facts.get("cuda", [])]
    amd = ROCM.usual if "AMD" in facts.get("gpus", []) else ()
    usual = [*(tag for tag in CUDA.usual if tag[2:4] in majors), *amd] or ["cpu"]
    target = target or click.prompt("Target", default=f"{usual[-1]}-{host_arch()}", err=True)
    statements = [Statement("requirement", package, "the terminal") for package in packages]
    if Target.parse(target).family.gpu:
        # A site with a floor has measured that network; "roce" of an adapter is the fabric ib.
        known = [*load_site(os.environ).fabric.busbw_floor, *adapters(host)[0].facts["kinds"], "any"]
        usual = ["ib" if name == "roce" else name for name in known]
        fabric = click.prompt("Fabric", type=click.Choice(fabric_names()), default=usual[0], err=True)
        statements += [Statement("fabric", fabric, "the terminal")] if fabric != "any" else []
    artifact = click.prompt("Artifact", type=click.Choice(list(ARTIFACTS)), default="venv", err=True)
    return name, target, artifact, statements
