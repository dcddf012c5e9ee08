"""The rules of data/diagnoses.toml: patterns of lines, and the causes that they show. Read on first use."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, get_args

from envbuild.diagnose.needle import needle

Place = Literal["job", "verification", "source-build"]
Kind = Literal["cause", "symptom", "note"]
PLACES: tuple[Place, ...] = get_args(Place)
KINDS: tuple[Kind, ...] = ("cause", "note", "symptom")

_TABLE = resources.files("envbuild.data") / "diagnoses.toml"


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


@dataclass(frozen=True, slots=True)
class DiagnosisRule:
    """A row of the table, whose header explains each key."""

    id: str
    rank: int
    kind: Kind
    cause: str
    hint: str
    source: str
    date: str
    provoked: bool
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
    def patterns(self) -> tuple[LinePattern, ...]:
        """All patterns of the rule."""
        return (
            *self.all,
            *self.any,
            *self.none,
            *self.also,
            *self.ended,
            *self.before,
            *(count.line for count in self.counts),
        )


@functools.cache
def _data() -> dict[str, Any]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def tells(of: Literal["attempts", "progress", "failures"], line: str) -> bool:
    """Return whether `line` reports what `of` names: a new attempt of its job, progress, or a failed process."""
    return any(_pattern(text).search(line) for text in _data()[of])


@functools.cache
def load_rules(place: Place = "job") -> tuple[DiagnosisRule, ...]:
    """Return the rules for logs of `place`, sorted by kind and rank."""
    found = ((row, row.get("where", {"job": {}})) for row in _data()["rules"])
    rules = [_rule({**row, **where[place]}) for row, where in found if place in where]
    return tuple(sorted(rules, key=lambda rule: (KINDS.index(rule.kind), -rule.rank)))


@functools.cache
def _pattern(text: str) -> LinePattern:
    return LinePattern(re.compile(text), needle(text))


def _rule(row: Mapping[str, Any]) -> DiagnosisRule:
    values = {"kind": "cause", "provoked": True, **row, "date": str(row["date"])}
    for key in ("all", "any", "none", "also", "ended", "before"):
        values[key] = tuple(map(_pattern, row.get(key, ())))
    values.pop("where", None)
    counts = row.get("counts", ())
    values["counts"] = tuple(Count(**{**one, "line": _pattern(one["line"])}) for one in counts)
    return DiagnosisRule(**values)
