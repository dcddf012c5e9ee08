"""The rules of data/diagnoses.toml: patterns of lines, and the causes that they show. Read on first use."""

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
KINDS: tuple[Kind, ...] = ("cause", "note", "symptom")

_PATTERNS = ("all", "any", "none", "also", "ended", "before")
# A part of a regular expression: a character class, or one character, which may be escaped.
_PART = re.compile(r"(?P<part>\[\^?\]?(?:\\.|[^]\\])*\]|\\.|.)(?P<repeated>(?:[*+?]|\{\d*,?\d*\})\??)?", re.DOTALL)
_LITERAL = re.compile(r"\\\W|[^\\().^$]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LinePattern:
    """A regular expression to search in lines; `needle` is a text in every line that it matches."""

    regex: re.Pattern[str]
    needle: str

    def search(self, line: str) -> re.Match[str] | None:
        """Return the match in `line`, None if there is none."""
        return self.regex.search(line) if self.needle in line else None


@dataclass(frozen=True, slots=True)
class Count:
    """A condition on the number of lines that match `line`.

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
    """A row of the table, whose header explains each key."""

    id: str
    rank: int
    cause: str
    hint: str
    source: str
    kind: Kind = "cause"
    provoked: bool = True
    all: tuple[LinePattern, ...] = ()
    any: tuple[LinePattern, ...] = ()
    none: tuple[LinePattern, ...] = ()
    also: tuple[LinePattern, ...] = ()
    ended: tuple[LinePattern, ...] = ()
    before: tuple[LinePattern, ...] = ()
    passes: bool = False
    alone: str = ""
    every: str = ""
    counts: tuple[Count, ...] = ()

    @property
    def patterns(self) -> list[LinePattern]:
        """All patterns of the rule."""
        return [*(one for key in _PATTERNS for one in getattr(self, key)), *(count.line for count in self.counts)]


def tells(of: Literal["attempts", "progress", "failures"], line: str) -> bool:
    """Return whether `line` reports what `of` names: a new attempt of its job, progress, or a failed process."""
    return any(_pattern(text).search(line) for text in load_table("diagnoses")[of])


@functools.cache
def load_rules(place: Place = "job") -> tuple[DiagnosisRule, ...]:
    """Return the rules for logs of `place`, sorted by kind and rank."""
    found = ((row, row.get("where", {"job": {}})) for row in load_table("diagnoses")["rules"])
    rules = [_rule({**row, **where[place]}) for row, where in found if place in where]
    return tuple(sorted(rules, key=lambda rule: (KINDS.index(rule.kind), -rule.rank)))


def _rule(row: Mapping[str, Any]) -> DiagnosisRule:
    own = {key: value for key, value in row.items() if key not in ("where", "date")}
    patterns = {key: tuple(map(_pattern, row.get(key, ()))) for key in _PATTERNS}
    counts = tuple(Count(**{**one, "line": _pattern(one["line"])}) for one in row.get("counts", ()))
    return DiagnosisRule(**{**own, **patterns, "counts": counts})


@functools.cache
def _pattern(text: str) -> LinePattern:
    return LinePattern(re.compile(text), needle(text))


def needle(regex: str) -> str:
    """Return the longest text that every match of `regex` contains, "" if there is none to find.

    A line without it cannot match, and `in` is much faster than `search`. Groups, character classes and
    quantified characters are skipped; top-level alternatives have no common text.
    """
    runs, depth = [""], 0
    for found in _PART.finditer(regex):
        part = found["part"]
        if part == "|" and not depth:
            return ""
        depth += (part == "(") - (part == ")")
        if depth or found["repeated"] or not _LITERAL.fullmatch(part):
            runs.append("")
        else:
            runs[-1] += part[-1]
    return max(runs, key=len)
