"""The files that builds of environments read: for bundles, and for environments in registries."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from envbuild.base.errors import BuildError, UsageError
from envbuild.base.text import normalise
from envbuild.environment import Environment
from envbuild.image.limits import Quota
from envbuild.layers.contents import reading
from envbuild.layers.wheel import wheel_title
from envbuild.lock.offers import tag_set
from envbuild.plan import Plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.sources import LockedPackage
from envbuild.store.archives import KIND as SOURCES
from envbuild.store.sources import matches

WHEELS, CONDA = "wheels", "conda/archives"
# The folders of a store that have a file as SHA256/NAME.
BY_DIGEST = (WHEELS, CONDA, SOURCES)


@dataclass(frozen=True, slots=True)
class BuildInput:
    """A file that a build of a plan may read, in `folder` of the store, by its sha256 (hexadecimal).

    `fits` returns whether a file name in the store is this file's. `named` returns the name for the store, derived from
    the lock and the content of the file. It raises BuildError for another package, or for one of another platform.
    """

    folder: str
    sha256: str
    fits: Callable[[str], bool]
    named: Callable[[Path], str]


def build_inputs(plan: Plan) -> Iterator[BuildInput]:
    """Yield the files that builds of `plan` may read; of a wheel, the lock may accept several."""
    run = [wheel for layer in plan.sources for wheel in (*layer.wheels, *layer.build)]
    for locked_package in (*plan.packages, *run):
        fits = partial(matches, name=locked_package.name, version=locked_package.version)
        for sha256 in locked_package.hashes:
            yield BuildInput(WHEELS, sha256, fits, partial(_wheel_name, locked_package, plan))
    for package in plan.conda:
        yield _called(CONDA, package.sha256, package.file_name)
    for layer in plan.sources:
        yield _called(SOURCES, layer.sha256, layer.name)


def _called(folder: str, sha256: str, name: str) -> BuildInput:
    fits = (lambda _: True) if folder == SOURCES else name.__eq__
    return BuildInput(folder, sha256, fits, lambda _: name)


def _wheel_name(package: LockedPackage, plan: Plan, file: Path) -> str:
    name, version, tags = wheel_title(file)
    triples = (tag.split("-") for tag in tags if tag.count("-") == 2)
    parts = [".".join(sorted(set(values))) for values in zip(*triples, strict=True)]
    whole = "-".join([normalise(name).replace("-", "_"), version, *parts]) + ".whl"
    if not matches(whole, package.name, package.version):
        raise BuildError(f"the wheel pulled for {package.name} {package.version} is another one: {whole!r:.120}")
    from packaging.utils import parse_wheel_filename

    if parse_wheel_filename(whole)[3].isdisjoint(tag_set(plan.python, plan.platform)):
        raise BuildError(
            f"the pulled wheel {whole!r:.120} is not for Python {plan.python} on {plan.platform}",
            "build the environment from its recipe",
        )
    return whole


def count_files(file: Path, name: str, quota: Quota) -> None:
    """Subtract the unpacked size of the wheel `name` from `quota`; files that are no wheels count as nothing.

    uv refuses a member that is longer than its wheel says. Raises BuildError.
    """
    if name.endswith(".whl"):
        with reading(name, "wheel"), zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                quota.entry(name)
                quota.content(name, member.file_size)


def check_portable(loaded: LoadedRecipe, kind: str) -> None:
    """Raise UsageError if a build of `loaded` reads own code, or a script outside its folder; `kind` names the use."""
    if loaded.code is not None:
        raise UsageError(
            f"{loaded.code.where}: {kind} has no [project]",
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
    """Yield each file that builds of `plans` read, and its path in a store. Raises BuildError for a missing file."""
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
