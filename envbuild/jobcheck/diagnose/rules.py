"""Rules of data/diagnoses.toml: patterns of lines, and the causes that they indicate. Read on first use."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from envbuild.data import load_table

Place = Literal["job", "verification", "source-build"]
Kind = Literal["cause", "symptom", "note"]
PLACES: tuple[Place, ...] = get_args(Place)
KINDS: tuple[Kind, ...] = ("cause", "symptom", "note")

_PATTERNS = ("all", "any", "none", "also", "ended", "before")
# A part of a regular expression: the begin of a group, a character class, or one character, which may be escaped.
_PART = re.compile(r"(?P<open>\((?:\?(?:P<\w+>|<?[=!]|:))?)|\)|\||(?P<part>\[\^?\]?(?:\\.|[^]\\])*\]|\\.|.)", re.DOTALL)
_REPEATED = re.compile(r"(?P<any>[*?]|\{0?,\d*\})\??|\+\??|\{\d+(?:,\d*)?\}\??")
_LITERAL = re.compile(r"\\\W|[^\\.^$\[]", re.DOTALL)
# A letter in both cases, such as [Ee].
_EITHER_CASE = re.compile(r"\[([A-Z])(?i:\1)\]")


@dataclass(frozen=True, slots=True, eq=False)
class LinePattern:
    """Regular expression to search in lines; every line that it matches contains one of the `needles`."""

    regex: re.Pattern[str]
    needles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """Condition on the number of lines that match `line`.

    `at_least` and `at_most` are limits; `fewer_than` and `as_many_as` name a group of another pattern of the
    rule whose value is the limit. `distinct` names a group whose different values are counted instead of lines.
    """

    line: LinePattern
    at_least: int = 0
    at_most: int = 1 << 60
    fewer_than: str = ""
    as_many_as: str = ""
    distinct: str = ""

    def holds(self, number: int, groups: Mapping[str, str]) -> bool:
        """Return whether `number` lines fulfil the condition; `groups` are the values of the rule's groups."""
        if not self.at_least <= number <= self.at_most:
            return False
        below, equal = groups.get(self.fewer_than, ""), groups.get(self.as_many_as, "")
        if self.fewer_than and not (below.isdecimal() and number < int(below)):
            return False
        return not self.as_many_as or (equal.isdecimal() and number >= int(equal))


@dataclass(frozen=True, slots=True)
class DiagnosisRule:
    """Row of data/diagnoses.toml, whose header explains each key."""

    id: str
    rank: int
    cause: str
    hint: str
    source: str
    pod_hint: str = ""
    kind: Kind = "cause"
    provoked: bool = True
    all: tuple[LinePattern, ...] = ()
    any: tuple[LinePattern, ...] = ()
    none: tuple[LinePattern, ...] = ()
    also: tuple[LinePattern, ...] = ()
    ended: tuple[LinePattern, ...] = ()
    before: tuple[LinePattern, ...] = ()
    passes: bool = False
    general: bool = False
    ends: bool = False
    follows: tuple[str, ...] = ()
    alone: str = ""
    every: str = ""
    counts: tuple[Count, ...] = ()

    @property
    def patterns(self) -> list[LinePattern]:
        """All patterns of the rule."""
        return [
            *(pattern for key in _PATTERNS for pattern in getattr(self, key)),
            *(count.line for count in self.counts),
        ]


def course_patterns(of: Literal["attempts", "progress", "failures", "pods"]) -> tuple[LinePattern, ...]:
    """Return the patterns of lines about `of`: a job's new attempt, its progress, a failed process, or pods."""
    return tuple(map(_pattern, load_table("diagnoses")[of]))


@functools.cache
def load_rules(place: Place = "job") -> tuple[DiagnosisRule, ...]:
    """Return the rules for logs of `place`, sorted by kind and rank."""
    rows = ((row, row.get("where", {"job": {}})) for row in load_table("diagnoses")["rules"])
    rules = [_rule({**row, **where[place]}) for row, where in rows if place in where]
    return tuple(sorted(rules, key=lambda rule: (KINDS.index(rule.kind), -rule.rank)))


def _rule(row: Mapping[str, Any]) -> DiagnosisRule:
    own = {key: value for key, value in row.items() if key not in ("where", "date")}
    patterns = {key: tuple(map(_pattern, row.get(key, ()))) for key in _PATTERNS}
    counts = tuple(Count(**{**count, "line": _pattern(count["line"])}) for count in row.get("counts", ()))
    return DiagnosisRule(**{**own, **patterns, "counts": counts, "follows": tuple(row.get("follows", ()))})


@functools.cache
def _pattern(text: str) -> LinePattern:
    return LinePattern(re.compile(text), needles(text))


def needles(regex: str) -> tuple[str, ...]:
    """Return constant texts such that every match of `regex` contains one of them, as long as possible; else none.

    A line without any of them cannot match, so most lines are not searched. Character classes and optional parts are
    skipped, except for one class such as [Ee] per text. Each alternative contributes its own text.
    """
    return _alternatives(regex, 0)[0]


def _alternatives(regex: str, at: int) -> tuple[tuple[str, ...], bool, int]:
    """Return the texts of the group at offset `at`, whether the group is just one text, and the offset of its end."""
    branches: list[tuple[str, ...]] = []
    whole = True
    best: tuple[str, ...] = ()
    run: tuple[str, ...] = ("",)

    def closed(texts: tuple[str, ...]) -> tuple[str, ...]:
        return max(best, texts if all(texts) else (), key=lambda some: min(map(len, some), default=0))

    while at < len(regex):
        part = _PART.match(regex, at)
        assert part is not None
        at = part.end()
        if part[0] in ("|", ")"):
            branches.append(closed(run))
            best, run = (), ("",)
            if part[0] == ")":
                break
            whole = False
            continue
        texts: tuple[str, ...] = ()
        literal = False
        if part["open"]:
            texts, literal, at = _alternatives(regex, at)
            if part["open"].endswith(("=", "!")):
                texts, literal = (), False
        elif _LITERAL.fullmatch(part["part"]):
            texts, literal = (part["part"][-1],), True
        elif len(run) == 1 and (case := _EITHER_CASE.fullmatch(part["part"])):
            texts, literal = (case[1], case[1].lower()), True
        if repeated := _REPEATED.match(regex, at):
            at = repeated.end()
            texts, literal = (() if repeated["any"] else texts), False
        if literal:
            run = tuple(begin + text for begin in run for text in texts)
            whole &= len(run) == 1
        else:
            whole = False
            best, run = closed(run), ("",)
            best = closed(texts)
    else:
        branches.append(closed(run))
    every = tuple(dict.fromkeys(text for some in branches for text in some)) if all(branches) else ()
    return every, whole and len(every) == 1, at
