"""`envbuild init`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from envbuild.atomic import exclusive, replace, staged
from envbuild.cli.common import log, show
from envbuild.cli.options import PATH, with_options
from envbuild.debian.defaults import suites_by_python
from envbuild.environment import load_environment
from envbuild.errors import UsageError
from envbuild.imports import read_source
from envbuild.imports.draft import Draft, recipe_name
from envbuild.imports.host_python import compose_here
from envbuild.imports.statement import Statement
from envbuild.kinds import ARTIFACTS
from envbuild.recipe.accelerators import CUDA, ROCM
from envbuild.recipe.targets import Target, host_arch

_SHOWN = 3


@click.command("init")
@click.argument("name", required=False)
@with_options(
    click.option("--from", "sources", multiple=True, type=PATH, metavar="PATH",
                 help="A file, a project's folder, or an environment. Repeatable."),
    click.option("--extra", "groups", multiple=True, metavar="NAME",
                 help="Carry this extra, dependency group, feature or category too. Repeatable."),
    "target", "dry-run", "json",
)  # fmt: skip
def init_command(
    name: str | None, sources: Sequence[Path], groups: Sequence[str], target: str | None, dry_run: bool, as_json: bool
) -> None:
    """Write recipes/NAME/recipe.toml from the files that a project has; without --from, ask for the packages.

    Reads requirements.txt, pyproject.toml, uv.lock, pylock.toml, poetry.lock, Pipfile.lock, environment.yml,
    conda-lock.yml, pixi.toml, pixi.lock, Dockerfiles, venvs and conda environments. The versions of locks become
    constraints. Each statement that the recipe does not have is listed with its place and the reason.

    \b
    Examples:
      envbuild init --from requirements.txt
      envbuild init my_train --from pyproject.toml --from uv.lock --extra gpu
      envbuild init --from environment.yml --dry-run
    """
    artifact = ""
    if sources:
        statements = [statement for path in sources for statement in read_source(path, groups)]
    elif sys.stdin.isatty():
        name, target, artifact, statements = _dialogue(name, target)
    else:
        raise UsageError(
            "no source, and no terminal to ask on", "name the files: envbuild init --from requirements.txt"
        )
    if name is not None and recipe_name(name) != name:
        raise UsageError(f"{name!r} is not the name of a recipe", f"choose for example {recipe_name(name)!r}")
    named = next((statement.text for statement in statements if statement.kind == "name"), "")
    name = name or recipe_name(named or sources[0].absolute().stem)
    draft = compose_here(name, statements, groups, target, load_environment())
    path = Path("recipes", name, "recipe.toml")
    draft.loaded(path)
    with contextlib.nullcontext() if dry_run else exclusive(path.parent, log):
        if os.path.lexists(path.parent):
            raise UsageError(f"{path.parent} exists already", "choose another name: envbuild init NAME --from …")
        if not dry_run:
            with staged(path.parent) as folder:
                (folder / path.name).write_text(draft.text, encoding="utf-8")
                replace(folder, path.parent)
    artifact = artifact or str(draft.data.get("environment", "venv"))
    following = [f"envbuild show {name}", f"envbuild lock {name}", f"envbuild {artifact} {name}"]
    left = [{"place": one.place, "text": one.text, "reason": one.reason} for one in draft.lost]
    carried = [asdict(one) for one in draft.carried]
    about = {"path": str(path), "recipe": draft.text, "next": following, "carried": carried, "not_carried": left}
    if draft.warning:
        about["warning"] = draft.warning
    for line in [] if as_json else [*_report(draft), f"next: {' · '.join(following)}"]:
        log(line)
    show(as_json, about, *([draft.text] if dry_run else []), path)


def _report(draft: Draft) -> Iterator[str]:
    count = f"{len(draft.carried)} statement{'s' * (len(draft.carried) != 1)}"
    yield f"carried: {count} into {', '.join(draft.data['targets'])}"
    reasons: dict[str, list[Statement]] = {}
    for statement in draft.lost:
        reasons.setdefault(statement.reason, []).append(statement)
    if draft.lost:
        yield f"not carried: {len(draft.lost)}"
    for reason, statements in reasons.items():
        yield f"  {reason}:"
        yield from (f"    {one.place}: {one.text}" for one in statements[:_SHOWN])
        if len(statements) > _SHOWN:
            yield f"    and {len(statements) - _SHOWN} more; --json lists all"
    if "project" in draft.data:
        folder = draft.data["project"]["path"]
        yield (
            f"note: [project] path = {folder!r}: every artifact holds the package of that folder, and its requirements"
            " join the lock; for the dependencies alone, remove [project]"
        )
    python, debian = str(draft.data["python"]), suites_by_python()
    if python not in debian and draft.data.get("environment") != "conda" and "base" not in draft.data.get("image", {}):
        yield (
            f"note: Debian has no Python {python} for images: `envbuild lock {draft.name} --wheels` locks all that"
            f" `envbuild venv` needs; for images choose {' or '.join(debian)}, or a `base` in [image]"
        )
    packages = [one.text for one in draft.carried if one.kind in ("requirement", "pin", "conda", "conda-pin")]
    if not packages:
        yield "note: the sources name no package that the recipe can have: add `requirements`"
    elif not any(re.match(r"(\S*::)?(py)?torch(?![\w.-])", text) for text in packages):
        yield (
            "note: torch is in no source, and verification trains with it: add it, unless another package requires it;"
            " without it: `trainer = false` in [verify]"
        )
    if draft.warning:
        yield f"warning: {draft.warning}"


def _dialogue(name: str | None, target: str | None) -> tuple[str, str, str, list[Statement]]:
    """Ask for name, packages, target, fabric and artifact of a recipe; the defaults come from site and host."""
    from envbuild.doctor.fabric import adapters
    from envbuild.doctor.machine import gpus
    from envbuild.doctor.probe import Host
    from envbuild.fabrics import fabric_names
    from envbuild.site.settings import load_site

    name = name or click.prompt("Name of the recipe", default=recipe_name(Path.cwd().name), err=True)
    packages = click.prompt("Packages, separated by blanks", default="torch", err=True).split()
    host = Host(os.environ)
    facts = gpus(host)[0].facts
    majors = [one.partition(".")[0] for one in facts.get("cuda", [])]
    amd = ROCM.usual if "AMD" in facts.get("gpus", []) else ()
    usual = [*(tag for tag in CUDA.usual if tag[2:4] in majors), *amd] or ["cpu"]
    target = target or click.prompt("Target", default=f"{usual[-1]}-{host_arch()}", err=True)
    statements = [Statement("requirement", one, "the terminal") for one in packages]
    if Target.parse(target).family.gpu:
        # A site with a floor has measured that network; "roce" of an adapter is the fabric ib.
        known = [*load_site(os.environ).fabric.busbw_floor, *adapters(host)[0].facts["kinds"], "any"]
        usual = ["ib" if one == "roce" else one for one in known]
        fabric = click.prompt("Fabric", type=click.Choice(fabric_names()), default=usual[0], err=True)
        statements += [Statement("fabric", fabric, "the terminal")] if fabric != "any" else []
    artifact = click.prompt("Artifact", type=click.Choice(list(ARTIFACTS)), default="venv", err=True)
    return name, target, artifact, statements
