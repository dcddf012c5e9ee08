"""Mixes of two locks: the packages that differ, in the order in which their versions can be taken over. Pure.

A requirement of a package that another version does not meet is an implication: "who takes the new torch takes the new
nvidia-nccl". Packages that imply each other move together. The others are ordered so that a group comes after those
that it implies: the first groups of this order, however many, are always an environment whose requirements are met.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from envbuild.base.names import normalise
from envbuild.lock.format import BuiltPackage, Lock, LockedPackage

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# The lines of Requires-Dist of a package, by its name and version.
Metadata = Mapping[tuple[str, str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A package that differs: what each lock has of it, None for nothing."""

    name: str
    good: LockedPackage | BuiltPackage | None
    bad: LockedPackage | BuiltPackage | None

    @property
    def versions(self) -> tuple[str, str]:
        """The version in each lock, "" without one."""
        return (self.good.version if self.good else "", self.bad.version if self.bad else "")

    def __str__(self) -> str:
        good, bad = self.versions
        return f"{self.name} {good or 'none'} -> {bad or 'none'}" + (" (another file)" if good == bad else "")


@dataclass(frozen=True, slots=True)
class Group:
    """Differences that move together, and the indices of all earlier groups that must move before them."""

    members: tuple[Difference, ...]
    needs: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return ", ".join(map(str, self.members))


def differences(good: Lock, bad: Lock) -> list[Difference]:
    """Return the packages whose version or files differ, by name."""
    one, other = _packages(good), _packages(bad)
    return [
        Difference(name, one.get(name), other.get(name))
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]


def _packages(lock: Lock) -> dict[str, LockedPackage | BuiltPackage]:
    found: dict[str, LockedPackage | BuiltPackage] = {one.name: one for one in lock.packages}
    return found | {one.name: one for one in lock.built}


def mixed(good: Lock, differing: Iterable[Difference], moved: Collection[str]) -> Lock:
    """Return the lock `good` with the packages `moved` as the other lock has them."""
    packages = _packages(good)
    for one in differing:
        if one.name in moved:
            packages.pop(one.name, None)
            if one.bad is not None:
                packages[one.name] = one.bad
    rows = [packages[name] for name in sorted(packages)]
    return replace(
        good,
        packages=tuple(one for one in rows if isinstance(one, LockedPackage)),
        built=tuple(one for one in rows if isinstance(one, BuiltPackage)),
    )


def grouped(differing: Sequence[Difference], metadata: Metadata, direct: Iterable[str], python: str) -> list[Group]:
    """Return the `differing` packages in groups, each after those that it needs.

    `direct` are the recipe's own requirements, which may ask for extras of packages. `python` is the version of the
    environment, "3.11".
    """
    implied = _implications(differing, metadata, direct, python)
    reach = {one.name: _reached(one.name, implied) for one in differing}
    names = sorted(reach, key=lambda name: (len(reach[name]), min(_together(name, reach)), name))
    by_name, found = {one.name: one for one in differing}, list[Group]()
    index: dict[str, int] = {}
    for name in names:
        if name not in index:
            members = _together(name, reach)
            needs = frozenset(index[other] for other in reach[name] if other not in members)
            index |= dict.fromkeys(members, len(found))
            found.append(Group(tuple(by_name[one] for one in members), needs))
    return found


def _together(name: str, reach: Mapping[str, Collection[str]]) -> list[str]:
    return sorted({name, *(other for other in reach[name] if name in reach[other])})


def _reached(name: str, implied: Mapping[str, Collection[str]]) -> set[str]:
    found, todo = {name}, [name]
    while todo:
        new = set(implied[todo.pop()]) - found
        found |= new
        todo += new
    return found


def _implications(
    differing: Sequence[Difference], metadata: Metadata, direct: Iterable[str], python: str
) -> dict[str, set[str]]:
    """Return, for each package, those that must move if it moves."""
    read = _Requirements(metadata, direct, python)
    by_name = {one.name: one for one in differing}
    found: dict[str, set[str]] = {name: set() for name in by_name}
    for one in differing:
        for side, version in enumerate(one.versions):
            for name, asked in read.of(one.name, version) if version else ():
                other = by_name.get(name)
                if other is None or not _meets(asked, other.versions[side]):
                    continue  # the same in both locks, or not even its own lock meets it (an override)
                if not _meets(asked, other.versions[1 - side]):
                    if side:
                        found[one.name].add(name)
                    else:
                        found[name].add(one.name)
    return found


def _meets(asked: Requirement, version: str) -> bool:
    return bool(version) and asked.specifier.contains(version, prereleases=True)


class _Requirements:
    """The requirements of packages that hold in an environment of `python`, with the extras that anybody asks for."""

    def __init__(self, metadata: Metadata, direct: Iterable[str], python: str) -> None:
        from packaging.markers import default_environment
        from packaging.requirements import InvalidRequirement, Requirement

        # The host's own, which is where the environments run, with another Python.
        self._marker: dict[str, str] = {
            **dict[str, Any](default_environment()),
            "python_version": python,
            "python_full_version": f"{python}.0",
        }
        self._rows: dict[tuple[str, str], list[Requirement]] = {}
        self._extras: dict[str, set[str]] = {}

        def parsed(lines: Iterable[str]) -> list[Requirement]:
            rows = []
            for line in lines:
                try:
                    rows.append(Requirement(line))
                except InvalidRequirement:  # of old packages; installers ignore or refuse it
                    continue
                self._extras.setdefault(normalise(rows[-1].name), {""}).update(rows[-1].extras)
            return rows

        parsed(direct)
        for key, lines in metadata.items():
            self._rows[key] = parsed(lines)

    def of(self, name: str, version: str) -> list[tuple[str, Requirement]]:
        """Return the requirements of a package, by the normalised names of what they require."""
        extras = self._extras.get(name, {""})
        return [
            (normalise(row.name), row)
            for row in self._rows.get((name, version), ())
            if row.marker is None or any(row.marker.evaluate({**self._marker, "extra": extra}) for extra in extras)
        ]
