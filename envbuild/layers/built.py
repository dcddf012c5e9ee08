"""Packages of a lock whose wheels envbuild builds, as source layers."""

from __future__ import annotations

from dataclasses import replace

from envbuild.layers.source_known import compilers, front_end, patches_of
from envbuild.lock.built import build_variables
from envbuild.lock.conda import CondaLock
from envbuild.lock.format import Lock
from envbuild.recipe.checks import references
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import BuildTable
from envbuild.recipe.sources import SourceLayer
from envbuild.recipe.targets import Target


def expected_layers(loaded: LoadedRecipe, target: Target) -> tuple[SourceLayer, ...]:
    """Return the layers of the packages that `target` may need built, without what only a lock knows."""
    names = {**loaded.builds(target)}
    for conda in (False, True):
        direct = references(loaded.requirements(target, conda))
        names |= {name: loaded.build_table(name) for name, one in direct.items() if not one.is_wheel}
    return tuple(_layer(name, target, table) for name, table in sorted(names.items()))


def built_layers(loaded: LoadedRecipe, target: Target, lock: Lock | CondaLock) -> tuple[SourceLayer, ...]:
    """Return a layer for each package that `lock` has from source. Raises RecipeError for an unreadable patch."""
    conda = isinstance(lock, CondaLock)
    direct = references(loaded.requirements(target, conda))
    found = []
    for one in (lock.pip if isinstance(lock, CondaLock) else lock).built:
        table, reference = loaded.build_table(one.name), direct.get(one.name)
        variables = build_variables(table, one.version, git=bool(one.commit))
        wheels = {pip.name: pip for pip in front_end()}
        wheels |= {wheel.name: wheel for wheel in one.build}
        found.append(
            replace(
                _layer(one.name, target, table),
                version=one.version,
                url=reference.source(loaded.folder, one.commit) if reference else f"index:{one.name}",
                sha256=one.sha256,
                configure=tuple(f"{name}={value}" for name, value in variables.items()),
                patches=patches_of(loaded, ("build", one.name), table.patches),
                build=tuple(wheels.values()),
                indexes=loaded.recipe.targets[target.name].indexes,
            )
        )
    return tuple(found)


def _layer(name: str, target: Target, table: BuildTable) -> SourceLayer:
    return SourceLayer(
        name,
        "",
        target.name,
        "wheel",
        "",
        "",
        packages=(*compilers(), *table.packages),
        isolated=table.isolation,
        locked=True,
    )
