"""`[build.NAME]`: how the wheel of a package is built that no index has as a wheel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.base.packages import normalise
from envbuild.base.toml import Document, Keys, Problem, key, list_at, table_at
from envbuild.recipe import checks
from envbuild.recipe.layers import patch_problem
from envbuild.recipe.reference import reference_of
from envbuild.recipe.targets import target_problem


@dataclass(frozen=True)
class BuildTable:
    """`[build.NAME]`: a package whose wheel envbuild builds from its source archive."""

    requires: tuple[str, ...] = key(
        (),
        "Build requirements that the package does not declare.",
        check=checks.constraint_problem,
        example=["setuptools<81"],
    )
    dependencies: tuple[str, ...] | None = key(
        None,
        "Its requirements, for a package whose build back end cannot tell them without the environment's"
        " packages. Default: as it says itself.",
        check=checks.constraint_problem,
        example=["torch", "einops"],
    )
    environment: dict[str, str] = key(
        {}, "Environment variables of its build. Never secrets.", key_check=checks.variable_problem
    )
    packages: tuple[str, ...] = key(
        (),
        "Debian packages that its build in the builder image needs besides compilers.",
        pattern=r"^[a-z0-9][a-z0-9+.-]+$",
        example=["libaio-dev"],
    )
    patches: tuple[str, ...] = key(
        (),
        "Patch files below the recipe's folder, applied in this order with -p1 before the build.",
        check=patch_problem,
        example=["patches/fix.patch"],
    )
    isolation: bool = key(
        True,
        "Whether the build sees only its build requirements. `false`: it also imports the environment's"
        " packages, such as torch, and is built again when one of them changes.",
    )
    targets: tuple[str, ...] = key(
        (), "The targets for which it is built. Default: all.", check=target_problem, example=["cu126-x86_64"]
    )

    def for_target(self, target: str) -> bool:
        """Return whether the package is built for `target`."""
        return not self.targets or target in self.targets


def requirement_entries(document: Document) -> Iterator[tuple[Keys, str]]:
    """Yield each valid requirement of the recipe, of its targets and of [conda], with its keys."""
    tables: list[tuple[str, ...]] = [
        (),
        ("conda",),
        *(("targets", name) for name in table_at(document.data, "targets")),
    ]
    for keys in tables:
        for index, text in enumerate(list_at(document.data, *keys, "requirements")):
            if isinstance(text, str) and checks.requirement_problem(text) is None:
                yield (*keys, "requirements", index), text


def build_mistakes(document: Document) -> Iterator[Problem]:
    """Yield direct references to files that do not exist, and tables of [build] that conflict with others."""
    direct: dict[str, str] = {}
    for keys, text in requirement_entries(document):
        reference = reference_of(text)
        if reference is None:
            continue
        direct[reference.name] = "a wheel" if reference.is_wheel else ""
        if reference.kind == "path" and not (document.path.parent / reference.url).is_file():
            yield keys, f"{reference.name!r}: there is no file {document.path.parent / reference.url}"
    tables = table_at(document.data, "build")
    for name in tables:
        if "dependencies" in table_at(tables, name) and normalise(name) in direct:
            yield ("build", name, "dependencies"), "'dependencies': only for a package of an index"
    for table, why in (("indexes", "it is a direct reference"), ("build", "its requirement names a wheel")):
        for name in _names(document, table):
            if normalise(name) in direct and (table == "indexes" or direct[normalise(name)]):
                yield (table, name), f"{name!r} in [{table}]: {why}"
    layers, targets = _names(document, "layers"), table_at(document.data, "targets")
    for name in _names(document, "build"):
        if normalise(name) in layers:
            yield ("build", name), f"{name!r} is built as [layers.{normalise(name)}]; take one of both out"
        for number, one in enumerate(list_at(tables, name, "targets")):
            if targets and one not in targets:
                yield ("build", name, "targets", number), f"the recipe has no target {one!r}"


def _names(document: Document, table: str) -> list[str]:
    found = document.data.get(table)
    return [name for name in found if isinstance(name, str)] if isinstance(found, dict | list) else []
