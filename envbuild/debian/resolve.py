"""Resolver: names → all packages that they need, reproducible, with the reason for every failure.

Each package is taken in its newest version. Of alternatives, the first that exists is taken; of several
providers, the first by name; but a package that is already chosen is preferred if it satisfies the relation
(Debian Policy 7.1, 7.5, 7.6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from envbuild.debian.control import Relation
from envbuild.debian.index import Package, PackageIndex, provided
from envbuild.errors import LockError

# Qualifiers that every package satisfies, because there is one architecture only (Policy 7.1).
_ANY = frozenset({"", "any", "native", "all"})
_Group = tuple[Relation, ...]


@dataclass(slots=True)
class _Selection:
    """The packages chosen so far, and for each the package that first needed it."""

    packages: dict[str, Package] = field(default_factory=dict)
    asked_by: dict[str, str] = field(default_factory=dict)
    _virtual: dict[str, list[tuple[Package, str | None]]] = field(default_factory=dict)

    def add(self, package: Package, asked_by: str) -> None:
        self.packages[package.name] = package
        self.asked_by[package.name] = asked_by
        for name, versions in provided(package).items():
            self._virtual.setdefault(name, []).extend((package, v) for v in versions)

    def meeting(self, relation: Relation) -> Iterator[Package]:
        """Yield the chosen packages that satisfy `relation` by their own name or as providers."""
        own = self.packages.get(relation.name)
        if own is not None and relation.admits(own.version):
            yield own
        for package, version in self._virtual.get(relation.name, ()):
            if relation.admits(version):
                yield package

    def chain(self, name: str) -> str:
        """Return the packages that need `name`, back to the requested one, as text."""
        text, asker = name, self.asked_by[name]
        while asker:
            text, asker = f"{text}, needed by {asker}", self.asked_by[asker]
        return text


def resolve(index: PackageIndex, wanted: Iterable[str], without: Iterable[str], arch: str) -> list[Package]:
    """Return `wanted` and all dependencies, sorted by name. `arch` is Debian's name of the architecture.

    A package in `without` is left out even if others need it, together with what only it needs; a wanted
    package is never left out. Raises LockError for a name that does not exist, a dependency that nothing
    satisfies, and packages that exclude each other.
    """
    names = sorted(set(wanted))
    left_out = frozenset(without) - set(names)
    selection = _Selection()
    waiting: deque[Package] = deque()
    for name in names:
        package = index.packages.get(name)
        if package is None:
            raise _unknown(index, name)
        selection.add(package, "")
        waiting.append(package)
    while waiting:
        package = waiting.popleft()
        for group in package.relations("pre-depends", "depends"):
            usable = [r for r in group if r.qualifier in _ANY or r.qualifier == arch]
            if any(True for relation in usable for _ in selection.meeting(relation)):
                continue
            found = _first(index, usable)
            if found is None:
                raise _unmet(index, selection, package, group)
            if not found.isdisjoint(left_out):
                continue
            chosen = index.packages[min(found)]
            selection.add(chosen, package.name)
            waiting.append(chosen)
    _check_conflicts(selection)
    return [selection.packages[name] for name in sorted(selection.packages)]


def _first(index: PackageIndex, group: Sequence[Relation]) -> frozenset[str] | None:
    """Return the packages that satisfy the first satisfiable alternative of `group`, None if there is none."""
    for relation in group:
        own = index.packages.get(relation.name)
        if own is not None and relation.admits(own.version):
            return frozenset([own.name])
        if providers := index.providers(relation):
            return frozenset(package.name for package in providers)
    return None


def _check_conflicts(selection: _Selection) -> None:
    for name in sorted(selection.packages):
        package = selection.packages[name]
        for kind in ("conflicts", "breaks"):
            for group in package.relations(kind):
                for relation in group:
                    for other in selection.meeting(relation):
                        # A package may exclude a name that it provides itself: it then is the only provider.
                        if other.name != name:
                            raise LockError(
                                f"{name} {package.version} {kind} with {other.name} {other.version} "
                                f"(it excludes {relation})\n"
                                f"    {selection.chain(name)}\n    {selection.chain(other.name)}",
                                "leave one of them out of the base's packages",
                            )


def _unmet(index: PackageIndex, selection: _Selection, package: Package, group: _Group) -> LockError:
    needs = " | ".join(map(str, group))
    has = [f"{relation.name} is {found.version}" for relation in group if (found := index.packages.get(relation.name))]
    return LockError(
        f"nothing meets {needs}, needed by {selection.chain(package.name)}"
        + (f"; {', '.join(has)}" if has else "; no package has that name or provides it"),
        "the mirror may lack a part of the suite: name another, or lock later",
    )


def _unknown(index: PackageIndex, name: str) -> LockError:
    from difflib import get_close_matches

    if providers := index.providers(Relation(name)):
        hint = f"{', '.join(p.name for p in providers[:5])} provide it: name one of them"
    else:
        near = get_close_matches(name, index.packages, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see packages.debian.org for names"
    return LockError(f"there is no package {name!r} in this suite for this architecture", hint)
