"""The search for the groups of packages that make an environment bad: pure, with an injected `test`.

Binary search over the order of the groups, in which the first k groups are an environment that can be installed, for
every k. It ends with two environments, good and bad, that differ in one group. If that group is bad alone, it is the
answer. If not, each further one that it takes is found by another binary search among the groups before it: the way of
QuickXplain (Junker, AAAI 2004) and of dd for two halves that interfere (Zeller, ESEC/FSE 1999), where ddmin (Zeller and
Hildebrandt, TSE 2002) needs a quadratic number of tests.

A single group of n takes at most ceil(log2 n) + 2 tests, those of both locks included: the bad lock is tested first;
the good one only if no mix was good, or early where the bound allows it. Each further group takes at most
ceil(log2 n) + 1 more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class MixState(Enum):
    """The result of a test; an environment that cannot be built or judged is untestable."""

    GOOD = "good"
    BAD = "bad"
    UNTESTABLE = "untestable"


Mix = frozenset[int]
Test = Callable[[Mix], MixState]


@dataclass(frozen=True, slots=True)
class Culprits:
    """The result of a search; `reproduced` is false if the two locks do not differ by the metric, and `why` says it.

    `groups` are the groups that make an environment bad together; each is a set of indices, of more than one where
    those between could not be tested. `alone` is whether they alone do, None if that could not be tested. `good` and
    `bad` are the mixes that show it.
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
        """Return `groups` and those that they need."""
        chosen = frozenset(groups)
        return chosen.union(*(self.needs[one] for one in chosen))

    def first_bad(self, order: Sequence[int], with_: Mix = frozenset()) -> tuple[int, int]:
        """Return (low, high): the first `low` of `order` with `with_` are good, the first `high` bad.

        They differ by one unless all between are untestable. Zero is good, and all of `order` bad.
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

    `packages` is the number n of the bound: that of the packages that differ, at least that of the groups. `test`
    gets the groups that are those of the bad lock.
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
