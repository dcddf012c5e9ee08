"""The indexes of a resolution: which ones answer, and which packages come from one of them alone.

A public index can have a package with the name of a private one and a higher version ("dependency confusion"). A recipe
binds packages to indexes by name in `[indexes]`; the site says where these are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from envbuild.base.errors import LockError
from envbuild.base.text import normalise
from envbuild.base.toml import nearest
from envbuild.environment import Environment
from envbuild.lock.format import BuiltPackage
from envbuild.lock.offers import Offers
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.sources import LockedPackage


def reachable(indexes: Sequence[str], environment: Environment, offline: bool) -> tuple[list[str], list[str]]:
    """Return the URLs of the indexes (their first mirror) that answer, and a note for each index that does not.

    With `offline` only folders are asked.
    """
    answering, notes = list[str](), list[str]()
    for index in indexes:
        refusals: list[str] = []
        for candidate in environment.site.mirrored(index):
            if offline and not candidate.startswith("file:"):
                continue
            refusal = environment.probe(candidate)
            if refusal is None:
                answering.append(candidate)
                break
            refusals.append(refusal)
        else:
            unasked = f"--offline: index {index} was not asked"
            notes.append(f"index {index} cannot be reached: {'; '.join(refusals)}" if refusals else unasked)
    return answering, notes


def bound_indexes(
    recipe: LoadedRecipe, names: Collection[str], environment: Environment, offline: bool
) -> dict[str, str]:
    """Return name → URL of its index for those of `names` that the recipe binds; {} if pip forbids all indexes.

    Raises LockError for an index that the site does not name or that does not answer.
    """
    bound: dict[str, str] = {}
    for project, index in recipe.recipe.indexes.items():
        if normalise(project) not in names or environment.pip.no_index:
            continue
        known = environment.site.indexes
        if index not in known:
            raise LockError(
                f"{recipe.where('indexes', project)}: this site has no index {index!r}{nearest(index, known)}",
                f'name its URL in site.toml, [indexes] {index} = "https://…"; named are {", ".join(known) or "none"}',
            )
        urls, reasons = reachable([known[index]], environment, offline)
        if offline and not urls:  # uv says what it lacks
            urls = [known[index]]
        if not urls:
            raise LockError(
                f"{recipe.where('indexes', project)}: {project} comes from {index!r} alone: {reasons[0]}",
                "run it where this index is reached, or name a mirror of it in site.toml",
            )
        bound[normalise(project)] = urls[0]
    return bound


def check_bound(recipe: LoadedRecipe, packages: Iterable[LockedPackage | BuiltPackage], offers: Offers) -> None:
    """Raise LockError for a package that the recipe binds, but that only other packages require: uv ignores these."""
    loose = {p.name for p in packages} & (recipe.bound.keys() - offers.bound.keys())
    for project in recipe.recipe.indexes if not offers.environment.pip.no_index else ():
        if normalise(project) in loose:
            raise LockError(
                f"{recipe.where('indexes', project)}: {project} is not bound: only other packages require it",
                f"add {project!r} to `requirements` of the recipe, the target or [conda], wherever it is missing",
            )


def check_pages(recipe: LoadedRecipe, packages: Iterable[LockedPackage | BuiltPackage], offers: Offers) -> None:
    """Raise LockError if the page of a package came over plain HTTP: uv follows redirects from HTTPS to it."""
    for name, page in offers.plain_redirects([package.name for package in packages]).items():
        raise LockError(
            f"{recipe.path}: the page of {name} is not trusted: {page}",
            "let the index serve it over HTTPS, or name another index",
        )


def ambiguous_names(packages: Sequence[LockedPackage | BuiltPackage], offers: Offers) -> list[str]:
    """Return a warning if several indexes have a project of the same name as a locked package."""
    shared = offers.on_several([package.name for package in packages])
    if not shared:
        return []
    names = ", ".join(f"{p.name} {p.version} ({' and '.join(shared[p.name])})" for p in packages if p.name in shared)
    return [
        f"warning: several indexes have different files under one name, and the newest version counts: {names}; "
        "bind a package to one index with [indexes] in the recipe"
    ]
