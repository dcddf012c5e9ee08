"""The Python of an imported recipe: one that this host has, if the sources accept it and its packages have wheels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from envbuild.base.errors import EnvbuildError
from envbuild.environment import Environment
from envbuild.imports.compose import compose, pythons
from envbuild.imports.draft import Draft
from envbuild.imports.statement import Statement
from envbuild.interpreter import HostPython
from envbuild.lock.indexes import reachable
from envbuild.lock.offers import Offers, allowed_releases, applicable
from envbuild.pythons import choose_python
from envbuild.recipe.load import LoadedRecipe


def compose_here(
    name: str, statements: Sequence[Statement], groups: Collection[str], target: str | None, environment: Environment
) -> Draft:
    """Return the draft of `compose`, for a Python that this host has where one suits.

    The usual Python comes first. Indexes are asked only if this host lacks it and has another one that the sources
    accept; one that does not answer is no reason against a Python.
    """
    usual = compose(name, statements, groups, target)
    if usual.data.get("environment") == "conda" or _is_here(str(usual.data["python"]), environment):
        return usual  # conda brings its Python
    for python in pythons():
        draft = compose(name, statements, groups, target, python)
        other = draft.data["python"] == python != usual.data["python"]
        if other and _is_here(python, environment) and _has_wheels(draft.loaded(Path(name)), environment):
            return draft
    return usual


def _is_here(python: str, environment: Environment) -> bool:
    try:
        return isinstance(choose_python(python, environment, offline=True), HostPython)
    except EnvbuildError:
        return False


def _has_wheels(loaded: LoadedRecipe, environment: Environment) -> bool:
    """Return whether each requirement that the indexes know has an allowed release with a wheel, for each target."""
    recipe = loaded.recipe
    for name, table in recipe.targets.items():
        target, _ = loaded.target(name)
        platform = target.platform(table.glibc)
        wanted = applicable((*recipe.requirements, *table.requirements), recipe.python, platform)
        wanted = {one: lines for one, lines in wanted.items() if not any(line.url for line in lines)}
        limits = applicable(recipe.constraints, recipe.python, platform)
        indexes, unreached = reachable(table.indexes, environment, False)
        releases = Offers(environment, indexes, False).releases(wanted)
        for one, lines in wanted.items():
            found = allowed_releases(releases[one], [*lines, *limits.get(one, ())], recipe.python)
            unknown = not found and (unreached or not releases[one])
            if not unknown and not any(release.fits(recipe.python, platform) for release in found):
                return False
    return True
