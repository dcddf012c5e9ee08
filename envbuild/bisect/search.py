"""The search for the packages that make an environment bad: pure, with an injected `test`.

Groups: a requirement of a package that another version does not meet is an implication, such as "the new torch needs
the new nvidia-nccl". Packages that imply each other move together. Groups are ordered so that each comes after those
that it implies: the first k groups, for every k, are an environment whose requirements are met.

Search: binary search over that order. It ends with two environments, good and bad, that differ in one group. If that
group is bad alone, it is the answer. If not, each further required group is found by another binary search among the
groups before it, as in QuickXplain (Junker, AAAI 2004) and in dd for two halves that interfere (Zeller, ESEC/FSE 1999);
ddmin (Zeller and Hildebrandt, TSE 2002) needs a quadratic number of tests.

A single group of n takes at most ceil(log2 n) + 2 tests, including the tests of both locks: the bad lock is tested
first; the good lock only if no mix was good, or early if the bound allows it. Each further group takes at most
ceil(log2 n) + 1 more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from envbuild.base.text import normalise
from envbuild.lock.format import BuiltPackage, Lock
from envbuild.recipe.sources import LockedPackage

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# The lines of Requires-Dist of a package, by its name and version.
Metadata = Mapping[tuple[str, str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A package that differs: its entry in each lock, None if missing."""

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
    left, other = _packages(good), _packages(bad)
    return [
        Difference(name, left.get(name), other.get(name))
        for name in sorted(left.keys() | other.keys())
        if left.get(name) != other.get(name)
    ]


def _packages(lock: Lock) -> dict[str, LockedPackage | BuiltPackage]:
    packages: dict[str, LockedPackage | BuiltPackage] = {package.name: package for package in lock.packages}
    return packages | {package.name: package for package in lock.built}


def mixed(good: Lock, differing: Iterable[Difference], moved: Collection[str]) -> Lock:
    """Return the lock `good` with the packages `moved` taken from the other lock."""
    packages = _packages(good)
    for difference in differing:
        if difference.name in moved:
            packages.pop(difference.name, None)
            if difference.bad is not None:
                packages[difference.name] = difference.bad
    rows = [packages[name] for name in sorted(packages)]
    return replace(
        good,
        packages=tuple(row for row in rows if isinstance(row, LockedPackage)),
        built=tuple(row for row in rows if isinstance(row, BuiltPackage)),
    )


def grouped(differing: Sequence[Difference], metadata: Metadata, direct: Iterable[str], python: str) -> list[Group]:
    """Return the `differing` packages in groups, each after the groups that it needs.

    `direct` are the recipe's own requirements, which may ask for extras of packages. `python` is the version of the
    environment, "3.11".
    """
    implied = _implications(differing, metadata, direct, python)
    reach = {difference.name: _reached(difference.name, implied) for difference in differing}
    names = sorted(reach, key=lambda name: (len(reach[name]), min(_together(name, reach)), name))
    by_name, groups = {difference.name: difference for difference in differing}, list[Group]()
    index: dict[str, int] = {}
    for name in names:
        if name not in index:
            members = _together(name, reach)
            needs = frozenset(index[other] for other in reach[name] if other not in members)
            index |= dict.fromkeys(members, len(groups))
            groups.append(Group(tuple(by_name[member] for member in members), needs))
    return groups


def _together(name: str, reach: Mapping[str, Collection[str]]) -> list[str]:
    return sorted({name, *(other for other in reach[name] if name in reach[other])})


def _reached(name: str, implied: Mapping[str, Collection[str]]) -> set[str]:
    names, todo = {name}, [name]
    while todo:
        new = set(implied[todo.pop()]) - names
        names |= new
        todo += new
    return names


def _implications(
    differing: Sequence[Difference], metadata: Metadata, direct: Iterable[str], python: str
) -> dict[str, set[str]]:
    """Return, for each package, the packages that must move with it."""
    read = _Requirements(metadata, direct, python)
    by_name = {difference.name: difference for difference in differing}
    by_package: dict[str, set[str]] = {name: set() for name in by_name}
    for difference in differing:
        for side, version in enumerate(difference.versions):
            for name, asked in read.of(difference.name, version) if version else ():
                other = by_name.get(name)
                if other is None or not _meets(asked, other.versions[side]):
                    continue  # the same in both locks, or not even its own lock meets it (an override)
                if not _meets(asked, other.versions[1 - side]):
                    if side:
                        by_package[difference.name].add(name)
                    else:
                        by_package[name].add(difference.name)
    return by_package


def _meets(asked: Requirement, version: str) -> bool:
    return bool(version) and asked.specifier.contains(version, prereleases=True)


class _Requirements:
    """The requirements of packages in an environment of `python`, with all requested extras."""

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
        """Return the requirements of a package, by the normalised names of the required packages."""
        extras = self._extras.get(name, {""})
        return [
            (normalise(row.name), row)
            for row in self._rows.get((name, version), ())
            if row.marker is None or any(row.marker.evaluate({**self._marker, "extra": extra}) for extra in extras)
        ]


class MixState(Enum):
    """The result of a test; an environment that cannot be built or judged is untestable."""

    GOOD = "good"
    BAD = "bad"
    UNTESTABLE = "untestable"


Mix = frozenset[int]
Test = Callable[[Mix], MixState]


@dataclass(frozen=True, slots=True)
class Culprits:
    """The result of a search; `reproduced` is false, with the reason `why`, if the locks do not differ by the metric.

    `groups` together make an environment bad; each is a set of indices, with several if mixes between them could not be
    tested. `alone` is whether no other group is needed, None if that could not be tested. `good` and `bad` are the
    mixes that prove it.
    """

    reproduced: bool
    why: str = ""
    groups: tuple[Mix, ...] = ()
    alone: bool | None = None
    good: Mix = frozenset()
    bad: Mix = frozenset()


@dataclass(slots=True)
class _Tests:
    """Tests of mixes, each made once; `needs` has the groups that each group needs."""

    test: Test
    needs: Sequence[Iterable[int]]
    known: dict[Mix, MixState] = field(default_factory=dict)

    def of(self, groups: Iterable[int]) -> MixState:
        mix = self.closed(groups)
        if mix not in self.known:
            self.known[mix] = self.test(mix)
        return self.known[mix]

    def closed(self, groups: Iterable[int]) -> Mix:
        """Return `groups` with the groups that they need."""
        chosen = frozenset(groups)
        return chosen.union(*(self.needs[name] for name in chosen))

    def first_bad(self, order: Sequence[int], with_: Mix = frozenset()) -> tuple[int, int]:
        """Return (low, high): with `with_`, the first `low` groups of `order` are good, the first `high` groups bad.

        They differ by one unless all numbers between are untestable. Zero groups are assumed good, all of `order` bad.
        """
        low, high = 0, len(order)
        while high - low > 1:
            middle = (low + high) // 2
            for tried in sorted(range(low + 1, high), key=lambda count: abs(count - middle)):
                state = self.of(with_.union(order[:tried]))
                if state is not MixState.UNTESTABLE:
                    break
            else:
                break
            low, high = (low, tried) if state is MixState.BAD else (tried, high)
        return low, high


def search(needs: Sequence[Iterable[int]], packages: int, test: Test) -> Culprits:
    """Find the groups that make an environment bad; `needs[i]` are the groups that group i requires.

    `packages`, the number of differing packages, is n in the bound, and at least the number of groups. `test` gets the
    groups that are taken from the bad lock.
    """
    tests, count = _Tests(test, needs), len(needs)
    everything, nothing = tests.closed(range(count)), Mix()
    if tests.of(everything) is not MixState.BAD:
        return Culprits(False, "the second lock is not bad")
    first_is_bad = Culprits(False, "the first lock is not good")
    if _steps(count) < _steps(packages) and tests.of(nothing) is not MixState.GOOD:
        return first_is_bad
    low, high = tests.first_bad(range(count))
    if low == 0 and tests.of(nothing) is not MixState.GOOD:
        return first_is_bad
    shown = tests.closed(range(low)), tests.closed(range(high))
    groups, before = [Mix(range(low, high))], low
    while (state := tests.of(Mix().union(*groups))) is MixState.GOOD and before > 0:
        # These alone are good, and with all of those before them they are bad.
        low, high = tests.first_bad(range(before), Mix().union(*groups))
        groups.append(Mix(range(low, high)))
        before = low
    alone = None if state is MixState.UNTESTABLE else state is MixState.BAD
    return Culprits(True, "", tuple(groups), alone, *shown)


def _steps(count: int) -> int:
    """Return ceil(log2 count)."""
    return max(count - 1, 0).bit_length()


def bound(packages: int) -> int:
    """Return the largest number of tests after which a single group of `packages` differing packages is known."""
    return _steps(packages) + 2
