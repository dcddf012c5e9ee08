"""The files that builds of environments read: for bundles, and for environments in registries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from envbuild.environment import Environment
from envbuild.errors import UsageError
from envbuild.plan.plan import Plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.store.archives import KIND as SOURCES

WHEELS, CONDA = "wheels", "conda/archives"
# The folders of a store that have a file as SHA256/NAME.
BY_DIGEST = (WHEELS, CONDA, SOURCES)


def check_portable(loaded: LoadedRecipe, what: str) -> None:
    """Raise UsageError when a build of `loaded` reads own code, or a script outside of its folder; `what` says why."""
    if loaded.code is not None:
        raise UsageError(
            f"{loaded.code.where}: {what} has no [project]",
            "publish the project on an index that every host reaches, and name it in `requirements`",
        )
    if loaded.script is not None and not loaded.script[0].resolve().is_relative_to(loaded.folder.resolve()):
        raise UsageError(
            f"{loaded.where('verify', 'script')}: {loaded.script[0]} is outside of the recipe's folder",
            "move the script into the folder of the recipe",
        )


def recipe_files(folder: Path) -> list[Path]:
    """Return the files below `folder` in order, without caches of Python."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def read_by(plans: Sequence[Plan], environment: Environment, *, offline: bool) -> Iterator[tuple[Path, str]]:
    """Yield each file that builds of `plans` read, and its path in a store. Raises BuildError for what is not there."""
    from envbuild.layers.conda_package import locate_conda
    from envbuild.layers.source_build import fetch_source
    from envbuild.layers.wheels import fetch_wheels, published_wheels

    for plan in plans:
        for wheel in published_wheels(plan, environment, offline):
            yield wheel.path, f"{WHEELS}/{wheel.sha256}/{wheel.path.name}"
        for package, archive in locate_conda(plan.conda, environment, offline=offline):
            yield archive, f"{CONDA}/{package.sha256}/{archive.name}"
    for layer in {layer.digest: layer for plan in plans for layer in plan.sources}.values():
        archive = fetch_source(layer, environment, offline=offline)
        yield archive, f"{SOURCES}/{layer.sha256}/{archive.name}"
        for path in fetch_wheels((*layer.wheels, *layer.build), environment, layer.indexes, offline=offline):
            yield path, f"{WHEELS}/{environment.store.file_digest(path)}/{path.name}"
