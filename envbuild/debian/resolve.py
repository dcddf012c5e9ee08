"""Resolver: names → all packages of several suites that they need, reproducible, with the reason for every failure.

Each package is taken in its newest version. Of alternatives, the first that exists is taken; of several providers, the
first by name; but a package that is already chosen is preferred if it satisfies the relation (Debian Policy 7.1, 7.5,
7.6).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.base.errors import BuildError, LockError
from envbuild.debian.control import Relation, compare_versions, parse_control, parse_relations
from envbuild.image.layer import open_layer

_CHUNK = 1 << 20
_NAME = re.compile(rb"^Package:[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)
_VERSION = re.compile(rb"^Version:[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)
_PROVIDES = re.compile(rb"^Provides:", re.MULTILINE | re.IGNORECASE)
# Qualifiers that every package satisfies, because there is one architecture only (Policy 7.1).
_ANY = frozenset({"", "any", "native", "all"})
_Group = tuple[Relation, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Package:
    """A package of a suite; its paragraph `raw` is parsed when needed: a suite has 60,000 packages, a base 60."""

    name: str
    version: str
    archive: str
    raw: bytes

    def fields(self) -> dict[str, str]:
        """Return the fields by lower-case name. Raises LockError for a faulty paragraph."""
        return parse_control(self.raw.decode("utf-8", "replace"), f"the entry of {self.name}")

    def relations(self, *names: str) -> tuple[_Group, ...]:
        """Return the groups of the relationship fields `names`, in that order."""
        fields = self.fields()
        return tuple(group for name in names for group in parse_relations(fields.get(name, ""), f"{self.name}: {name}"))

    def provided(self) -> dict[str, list[str | None]]:
        """Return the names that it provides besides its own, with their versions (None for no version)."""
        given: dict[str, list[str | None]] = {}
        for group in self.relations("provides"):
            for relation in group:
                given.setdefault(relation.name, []).append(relation.version or None)
        return given


@dataclass(slots=True)
class PackageIndex:
    """The newest version of each package over all added suites; of equal versions, the one added first."""

    packages: dict[str, Package] = field(default_factory=dict)
    _providing: dict[str, Package] = field(default_factory=dict)

    def add(self, path: Path, archive: str) -> None:
        """Add a Packages file, compressed or not. Raises LockError when it is damaged."""
        try:
            with open_layer(path, "its content") as stream:
                rest = b""
                while chunk := stream.read(_CHUNK):
                    *whole, rest = (rest + chunk).split(b"\n\n")
                    self._add(whole, archive)
                self._add([rest.strip(b"\n")], archive)
        except (BuildError, OSError, ValueError) as error:
            raise LockError(f"{path}: not a list of packages: {error}") from error

    def providers(self, relation: Relation) -> list[Package]:
        """Return the packages that provide the name in `relation`, by name; only a versioned Provides meets a bound."""
        needle = relation.name.encode()
        found = [
            package
            for package in self._providing.values()
            if needle in package.raw and any(map(relation.admits, package.provided().get(relation.name, ())))
        ]
        return sorted(found, key=lambda package: package.name)

    def _add(self, paragraphs: Iterable[bytes], archive: str) -> None:
        for raw in paragraphs:
            if not raw.strip():
                continue
            name, version = _NAME.search(raw), _VERSION.search(raw)
            if name is None or version is None:
                raise ValueError("an entry without Package or Version")
            package = Package(name[1].decode(), version[1].decode(), archive, raw)
            known = self.packages.get(package.name)
            if known is not None and compare_versions(package.version, known.version) <= 0:
                continue
            self.packages[package.name] = package
            self._providing.pop(package.name, None)
            if _PROVIDES.search(raw):
                self._providing[package.name] = package


@dataclass(slots=True)
class _Selection:
    """The packages chosen so far, and for each the package that first needed it."""

    packages: dict[str, Package] = field(default_factory=dict)
    asked_by: dict[str, str] = field(default_factory=dict)
    _virtual: dict[str, list[tuple[Package, str | None]]] = field(default_factory=dict)

    def add(self, package: Package, asked_by: str) -> None:
        self.packages[package.name] = package
        self.asked_by[package.name] = asked_by
        for name, versions in package.provided().items():
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

    A package in `without` is left out even if others need it, together with what only it needs; a wanted package is
    never left out. Raises LockError for a name that does not exist, a dependency that nothing satisfies, and packages
    that exclude each other.
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
            if not found:
                raise _unmet(index, selection, package, group)
            if not found.isdisjoint(left_out):
                continue
            chosen = index.packages[min(found)]
            selection.add(chosen, package.name)
            waiting.append(chosen)
    _check_conflicts(selection)
    return [selection.packages[name] for name in sorted(selection.packages)]


def _first(index: PackageIndex, group: Sequence[Relation]) -> frozenset[str]:
    """Return the packages that satisfy the first satisfiable alternative of `group`."""
    for relation in group:
        own = index.packages.get(relation.name)
        if own is not None and relation.admits(own.version):
            return frozenset([own.name])
        if providers := index.providers(relation):
            return frozenset(package.name for package in providers)
    return frozenset()


def _check_conflicts(selection: _Selection) -> None:
    for name in sorted(selection.packages):
        package = selection.packages[name]
        rows = [(kind, one) for kind in ("conflicts", "breaks") for group in package.relations(kind) for one in group]
        for kind, relation in rows:
            for other in selection.meeting(relation):
                # A package may exclude a name that it provides itself: it then is the only provider.
                if other.name != name:
                    raise LockError(
                        f"{name} {package.version} {kind} with {other.name} {other.version} (it excludes {relation})\n"
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
