"""The engine that applies the rules of data/diagnoses.toml to logs, line by line.

A rule holds if each of its `all` patterns, one of its `any` and none of its `none` match some line of some log,
and its counts hold over all logs together. A line of NCCL's log is also matched in the form that nccl_log.py
parses: `nccl:KIND: TEXT`. If a requeued job appended to its log, counts restart at the line that reports the
new attempt. If no cause is known, the diagnosis shows the program's own exception (exception.py).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from envbuild.diagnose.exception import Exceptions
from envbuild.diagnose.nccl_log import parse_nccl_log
from envbuild.diagnose.rules import KINDS, DiagnosisRule, Kind, LinePattern, Place, load_rules, tells
from envbuild.site.pip_config import redact

_KEPT = 4  # lines of evidence per pattern
_SHOWN = 240  # characters of a line of evidence
_VALUES = 1000  # different values per group
_LONGEST = 1000  # characters of a value
_NAMED = 5  # values of `every` in a message
_GOES_ON = 10  # lines of training that show that a program continues
_ROOT = 45  # up to this rank, a cause does not explain its own cause
_EITHER = re.compile(r"\[\[(.*?)\]\]")
_GROUP = re.compile(r"\{(\w+)\}")
# Colours, moves of the cursor and the like. Source: ECMA-48, 5.4 "Control sequences".
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_FAILURE = re.compile(r"\b(?:\w*Error|error|ERROR|FATAL|fatal|\w*Exception|FAILED|failed|panic|Killed|killed)\b")


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line of a log, shortened and without passwords."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class DiagnosisFinding:
    """A rule that holds, with its cause and hint filled in, and the lines that are its evidence."""

    id: str
    kind: Kind
    cause: str
    hint: str
    source: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings, causes first; the program's first exception and its location, if no finding explains it.

    `lines` is the number of lines read; `last` are the last lines that look like an error.
    """

    lines: int
    findings: tuple[DiagnosisFinding, ...]
    exception: tuple[Evidence, ...]
    last: tuple[Evidence, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields for --json, which calls a hint `remedy`."""
        names = {"hint": "remedy"}
        return asdict(self, dict_factory=lambda items: {names.get(name, name): value for name, value in items})


@dataclass(slots=True)
class _Seen:
    """The `count` lines that match a pattern: the numbers of the first and the `latest` one, and the groups' values."""

    kept: list[Evidence] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, None]] = field(default_factory=dict)
    count: int = 0
    order: int = 0
    latest: int = 0


@dataclass(slots=True)
class _Course:
    """The course of the job: the numbers of the last lines of training and of the last process failure, and of logs."""

    trained: deque[int] = field(default_factory=lambda: deque([0], maxlen=_GOES_ON))
    failed: int = 0
    logs: int = 0

    def see(self, line: str, order: int) -> None:
        """Record line number `order`."""
        if tells("progress", line):
            self.trained.append(order)
        elif tells("failures", line):
            self.failed = order

    def passed(self, order: int) -> bool:
        """Return whether the job trained on after line `order`; after a failure, other ranks may write a few lines."""
        return self.trained[-1] > order if self.failed < order else self.long_passed(order)

    def long_passed(self, order: int) -> bool:
        """Return whether the job trained for many lines after line `order`."""
        return self.trained[0] > order


def diagnose(logs: Iterable[tuple[str, Iterable[str]]], rules: Sequence[DiagnosisRule]) -> Diagnosis:
    """Return the diagnosis of the `logs`, given as (name, lines), by `rules`."""
    seen: dict[LinePattern, _Seen] = {}
    last: deque[Evidence] = deque(maxlen=6)
    patterns = list(dict.fromkeys(pattern for rule in rules for pattern in rule.patterns))
    counted = {count.line for rule in rules for count in rule.counts}
    counted |= {pattern for rule in rules if rule.every for pattern in (*rule.any, *rule.all)}
    course, exceptions = _Course(), Exceptions()
    total = 0
    for name, lines in logs:
        course.logs += 1
        here: dict[LinePattern, _Seen] = {}
        for number, text in enumerate(lines, start=1):
            total += 1
            plain = _CONTROL.sub("", text) if "\x1b" in text else text
            course.see(plain, total)
            exceptions.read(name, number, plain, total)
            if exceptions.first and course.long_passed(exceptions.order):
                exceptions = Exceptions()
            for line in _forms(plain):
                if tells("attempts", line):
                    here.clear()
                for pattern in patterns:
                    if match := pattern.search(line):
                        start = match.start() if line in text else 0
                        one = seen.setdefault(pattern, _Seen(order=total))
                        one.latest = total
                        _keep(one, match, Evidence(name, number, _shown(text, start)))
                        if pattern in counted:
                            _count(here.setdefault(pattern, _Seen()), match.groupdict())
            if _FAILURE.search(plain):
                last.append(Evidence(name, number, _shown(text)))
        for pattern, counts in here.items():
            seen[pattern].count += counts.count
            for group, values in counts.values.items():
                seen[pattern].values.setdefault(group, {}).update(values)
    held = [(rule, found) for rule in rules if (found := _found(rule, seen, course)) is not None]
    held.sort(key=lambda one: (KINDS.index(one[0].kind), -one[0].rank, one[1][0]))
    known = any(rule.kind == "cause" and rule.rank > _ROOT for rule, _ in held)
    first = () if known or course.passed(exceptions.order) else exceptions.first
    shown = tuple(Evidence(name, number, _shown(text)) for name, number, text in first)
    return Diagnosis(total, tuple(finding for _, (_, finding) in held), shown, tuple(last))


def explain(text: str, place: Place) -> str:
    """Return the first cause in the log `text` by the rules of `place`, with its hint; "" if there is none."""
    found = diagnose([("log", text.splitlines())], load_rules(place)).findings
    return ": ".join(filter(None, (found[0].cause, found[0].hint))) if found else ""


def _count(one: _Seen, groups: Mapping[str, str | None]) -> None:
    one.count += 1
    for group, value in groups.items():
        values = one.values.setdefault(group, {})
        if len(values) < _VALUES:
            values[(value or "")[:_LONGEST]] = None


def _forms(text: str) -> Iterator[str]:
    """Yield a line without colours, and the forms in which rules match a line of NCCL."""
    yield text
    if "NCCL" not in text:
        return
    log = parse_nccl_log(text)
    yield from (f"nccl:network: {value}" for value in log.networks)
    yield from (f"nccl:provider: {value}" for value in log.providers)
    yield from (f"nccl:{fault.kind}: {fault.text} => {fault.cause}" for fault in log.faults)


def _keep(one: _Seen, match: re.Match[str], where: Evidence) -> None:
    for group, value in match.groupdict().items():
        # Loaders print paths by way of $ORIGIN: /env/torch/lib/../../nvidia/cudnn/lib/libcudnn.so.9
        plain = os.path.normpath(value) if value and value.startswith("/") and "/../" in value else value
        one.groups.setdefault(group, (plain or "")[:_LONGEST])
    if len(one.kept) < _KEPT:
        # Lines that differ only in numbers (times, process IDs) count as the same.
        alike = {re.sub(r"\d+", "0", kept.text) for kept in one.kept if kept.file == where.file}
        if re.sub(r"\d+", "0", where.text) not in alike:
            one.kept.append(where)


def _shown(text: str, around: int = 0) -> str:
    text = redact("".join(c if c.isprintable() else " " for c in _CONTROL.sub("", text)))
    start = max(0, min(around - _SHOWN // 4, len(text) - _SHOWN))
    return ("…" if start else "") + text.strip()[start : start + _SHOWN]


def _found(
    rule: DiagnosisRule, seen: Mapping[LinePattern, _Seen], course: _Course
) -> tuple[int, DiagnosisFinding] | None:
    """Return the number of the first line and the finding of `rule`, None if the rule does not hold."""
    if any(pattern in seen for pattern in rule.none) or not all(pattern in seen for pattern in rule.all):
        return None
    either = [pattern for pattern in rule.any if pattern in seen]
    if (rule.any and not either) or (rule.ended and not any(pattern in seen for pattern in rule.ended)):
        return None
    began = min((seen[pattern].order for pattern in either), default=0)
    if any(pattern in seen and seen[pattern].order < began for pattern in rule.before):
        return None
    if rule.passes and course.passed(max(seen[pattern].latest for pattern in (*either, *rule.all))):
        return None
    patterns = dict.fromkeys([*either, *rule.all, *(count.line for count in rule.counts), *rule.also])
    shown = [seen[pattern] for pattern in patterns if pattern in seen]
    groups: dict[str, str] = {}
    for one in shown:
        groups = {name: value for name, value in one.groups.items() if value} | groups
    for count in rule.counts:
        one = seen.get(count.line, _Seen())
        number = len(one.values.get(count.distinct, ())) if count.distinct else one.count
        if not count.holds(number, groups):
            return None
        groups.setdefault("count", str(number))
    if rule.every:
        values = (seen[pattern].values.get(rule.every) for pattern in (*either, *rule.all))
        names = list(next(filter(None, values), ()))
        groups |= {rule.every: ", ".join(names[-_NAMED:])} if names else {}
        groups["is"] = "are" if len(names) > 1 else "is"
    # First the first line of each pattern, then the second ones.
    evidence = dict.fromkeys(line for turn in zip_longest(*(one.kept for one in shown)) for line in turn if line)
    alone = rule.alone if course.logs == 1 and groups.get("count") == "1" else ""
    cause, hint = redact(_filled(rule.cause, groups)) + alone, redact(_filled(rule.hint, groups))
    finding = DiagnosisFinding(rule.id, rule.kind, cause, hint, rule.source, tuple(evidence))
    return min((one.order for one in shown), default=0), finding


def _filled(text: str, groups: Mapping[str, str]) -> str:
    """Return a message with the values of groups. [[…|…]] becomes its first alternative whose groups are all known."""

    def choose(match: re.Match[str]) -> str:
        return next((one for one in match[1].split("|") if set(_GROUP.findall(one)) <= set(groups)), "")

    return _EITHER.sub(choose, text).format_map(defaultdict(lambda: "?", groups))
