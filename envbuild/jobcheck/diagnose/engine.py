"""Engine that applies the rules of data/diagnoses.toml to logs, in one pass over their lines.

A rule holds if each of its `all` patterns, one of its `any` and none of its `none` match some line of some log,
and its counts hold over all logs together. A line of NCCL's log is also matched in the form that nccl_log.py
parses, `nccl:KIND: TEXT`; so is the line behind torch's `Last error:`, which quotes NCCL. If a requeued job
appended to its log, counts restart at the line that reports the new attempt. If no cause is known, the diagnosis
shows the program's error message (blocks.py). A message of Open MPI, a block of lines, is matched as one line,
`mpi:help: TEXT`. Patterns are tried only on lines that contain their constant texts (LineShapes).
"""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any, Generic, Literal, TypeVar

from envbuild.base.masking import redact
from envbuild.jobcheck.diagnose.blocks import (
    BEGIN,
    FRAME,
    GOES_ON,
    GRAVE,
    OF_SHELL,
    REMARK,
    RULE,
    SIGNS,
    SURVIVED,
    WARNING,
    Exceptions,
    HelpBlock,
    Line,
    Weight,
    Words,
)
from envbuild.jobcheck.diagnose.nccl_log import needles_of_forms, parse_nccl_log
from envbuild.jobcheck.diagnose.rules import KINDS, DiagnosisRule, Kind, LinePattern, Place, course_patterns, load_rules

Mark = TypeVar("Mark", bound=Hashable)
Verdict = Literal["cause", "program", "symptom", "none"]
_DIGIT_BYTES = b"0123456789"
# Frequency of characters in logs, by classes: per 1,000 characters; all others, such as capitals, are rare.
_COMMON = {60: b" e", 40: b"atnorsi", 20: b'cdlmpu."_-/:', 10: b"bfghkwvy,=[]()", 5: b"xzjq'"}
_RARE = 1
# The shapes that are remembered, and their characters in all.
_MOST, _MOST_CHARACTERS = 100_000, 16 << 20
_SHORTEST = 3
_END_SIZE = 4  # shorter ends of texts are in too many other words
_KEPT = 4  # lines of evidence per pattern
_SHOWN = 240  # characters of a line of evidence
_VALUES = 1000  # different values per group
_LONGEST = 1000  # characters of a value
_NAMED = 5  # values of `every` in a message
_GOES_ON = 10  # lines of training that show that a program continues
_ROOT = 45  # up to this rank, a cause does not explain its own cause
_CONSEQUENCE = 40  # up to this rank, a symptom follows from any exception
_EITHER = re.compile(r"\[\[(.*?)\]\]")
_GROUP = re.compile(r"\{(\w+)\}")
# Colours, moves of the cursor and the like. Source: ECMA-48, 5.4 "Control sequences".
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_FAILURES = ("Error", "error", "ERROR", "FATAL", "fatal", "Exception", "FAILED", "failed", "panic", "Killed", "killed")
_FAILURE = re.compile(rf"\b(?:\w*Error|\w*Exception|{'|'.join(_FAILURES)})\b(?!\W{{1,3}}\d+\.\d+(?:\s|$))")
# torch's exception quotes what NCCL said in the next line (ProcessGroupNCCL, getNcclErrorDetailStr).
_LAST_ERROR = "Last error:"
_FINISHED = "worker group successfully finished"
_SHAPES_KEPT = 64  # per pattern
_DIGITS = re.compile(r"\d+")
_SOURCE = re.compile(r"\.format\(|\{[\w.]*\}['\"]")  # a line of source that raises a message, and not the message


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass").translate(None, _DIGIT_BYTES)


class TextIndex(Generic[Mark]):
    """Index from texts to marks: a line has a mark if it contains one of the mark's texts, or if the mark has none."""

    def __init__(self, texts: Mapping[Mark, Collection[str]]) -> None:
        encoded = {mark: set(map(_encoded, some)) for mark, some in texts.items()}
        self._always = tuple(mark for mark, some in encoded.items() if not some or b"" in some)
        self._order = {mark: number for number, mark in enumerate(texts)}
        self._marks: dict[bytes, list[Mark]] = {}
        for mark, some in encoded.items():
            for text in () if mark in self._always else some:
                self._marks.setdefault(text, []).append(mark)
        self._short = [text for text in self._marks if len(text) < _SHORTEST]
        # The texts by their ends, which begin with few and rare characters: these are searched, for speed.
        self._ends = _ends([text for text in self._marks if len(text) >= _SHORTEST])
        self._search_short = re.compile(b"|".join(map(re.escape, self._short)) or rb"(?!)").search
        self._search = _alternatives({end for some in self._ends.values() for end, _ in some}).search

    def of(self, shape: bytes) -> tuple[Mark, ...]:
        """Return the marks of a line without its digits, in the order of `texts`."""
        return self._marks_of(shape) if self._search(shape) or self._search_short(shape) else self._always

    def _marks_of(self, shape: bytes) -> tuple[Mark, ...]:
        marks = {*self._always, *(mark for text in self._short if text in shape for mark in self._marks[text])}
        at = 0
        while match := self._search(shape, at):
            begin, at = match.start(), match.start() + 1
            for end, text in self._ends[shape[begin : begin + _SHORTEST]]:
                if shape.startswith(end, begin) and text in shape:
                    marks.update(self._marks[text])
        return tuple(sorted(marks, key=self._order.__getitem__))


class LineShapes(Generic[Mark]):
    """Shapes of log lines: lines without digits. Each shape is searched once: most lines differ only in digits."""

    def __init__(self, index: TextIndex[Mark]) -> None:
        self._index = index
        self._known: dict[bytes, tuple[Mark, ...]] = {}
        self._characters = 0

    def of(self, lines: str) -> list[tuple[Mark, ...]]:
        """Return the marks of each line of the text `lines`."""
        shapes = _encoded(lines).split(b"\n")
        if len(self._known) > _MOST or self._characters > _MOST_CHARACTERS:
            self._known.clear()
            self._characters = 0
        for shape in set(shapes) - self._known.keys():
            self._known[shape] = self._index.of(shape)
            self._characters += len(shape)
        return [self._known[shape] for shape in shapes]


def _ends(texts: Collection[bytes]) -> dict[bytes, list[tuple[bytes, bytes]]]:
    """Return an end and the whole of each of the `texts`, by the first characters of the end."""
    frequency = {character: often for often, some in _COMMON.items() for character in some}
    starts: dict[int, dict[bytes, int]] = {}
    for text in texts:
        for start in range(max(0, len(text) - _END_SIZE), -1, -1):
            starts.setdefault(text[start], {})[text] = start
    ends: dict[bytes, list[tuple[bytes, bytes]]] = {}
    left = set(texts)
    while left:
        # The character that begins most ends for its frequency (a greedy cover).
        first = max(
            sorted(starts), key=lambda byte: len(starts[byte].keys() & left) / (frequency.get(byte, _RARE) + _RARE)
        )
        for text, start in starts[first].items():
            if text in left:
                ends.setdefault(text[start : start + _SHORTEST], []).append((text[start:], text))
        left -= starts.pop(first).keys()
    return ends


def _alternatives(texts: Collection[bytes]) -> re.Pattern[bytes]:
    """Return an expression that matches at the beginning of any of the `texts`."""
    by_first: dict[bytes, set[bytes]] = {}
    for text in texts:
        by_first.setdefault(text[:1], set()).add(text[1:])
    groups = []
    for first, rests in sorted(by_first.items()):
        shortest: list[bytes] = []
        for rest in sorted(rests):
            # A text that begins with another one, which is sorted before it, is found by that.
            if not shortest or not rest.startswith(shortest[-1]):
                shortest.append(rest)
        groups.append(re.escape(first) + b"(?:" + b"|".join(map(re.escape, shortest)) + b")")
    return re.compile(b"|".join(groups) or rb"(?!)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line of a log, shortened and without passwords."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class DiagnosisFinding:
    """Matching rule with its cause and hint filled in, and the log lines that are its evidence."""

    id: str
    kind: Kind
    cause: str
    hint: str
    source: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings of a diagnosis, causes first, and the program's error message, `words`, if no cause explains it.

    The message is shown first: the first exception and its location, or the most specific line (blocks.py).

    `lines` is the number of lines read; `last` are the last lines that look like an error.
    """

    lines: int
    findings: tuple[DiagnosisFinding, ...]
    exception: tuple[Evidence, ...]
    last: tuple[Evidence, ...]

    @property
    def verdict(self) -> Verdict:
        """Main result of the diagnosis: an unexplained error message of the program precedes causes."""
        if self.exception:
            return "program"
        kinds = {finding.kind for finding in self.findings}
        return "cause" if "cause" in kinds else "symptom" if "symptom" in kinds else "none"

    def as_json(self) -> dict[str, Any]:
        """Return the fields for --json, which calls a hint `remedy`."""
        names = {"hint": "remedy"}
        fields = asdict(self, dict_factory=lambda items: {names.get(name, name): value for name, value in items})
        return {"verdict": self.verdict, **fields}


@dataclass(slots=True)
class _Seen:
    """Lines that match a pattern: their `count`, the numbers of the first and the `latest`, and the groups' values.

    `alike` are the lines, by file and without numbers, that are already in `kept`.
    """

    kept: list[Evidence] = field(default_factory=list)
    alike: set[tuple[str, int, str]] = field(default_factory=set)
    groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, None]] = field(default_factory=dict)
    count: int = 0
    order: int = 0
    latest: int = 0


@dataclass(slots=True)
class _Course:
    """Course of the job: the numbers of the last lines of training, and of the lines of its last events.

    Events are a failed process, a new attempt and a successful end. `logs` is the number of logs, `pods` whether they
    are of pods.
    """

    trained: deque[int] = field(default_factory=lambda: deque([0], maxlen=_GOES_ON))
    failed: int = 0
    attempt: int = 0
    finished: int = 0
    logs: int = 0
    pods: bool = False

    def passed(self, order: int) -> bool:
        """Return whether training continued after line `order`; a few lines of other ranks do not count."""
        return self.trained[-1] > order if self.failed < order else self.long_passed(order)

    @property
    def survived(self) -> int:
        """Number of the last line before a successful later attempt; 0 without such an attempt."""
        bad = max(self.attempt, self.failed)
        if self.attempt and (self.finished > bad or self.trained[0] > bad):
            return max(bad, self.trained[0])
        return self.attempt if self.failed < self.attempt < self.trained[-1] else 0

    def long_passed(self, order: int) -> bool:
        """Return whether the job trained for many lines after line `order`."""
        return self.trained[0] > order


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """Kind of lines: about the job's `course`, with exceptions, or of NCCL, which are also matched in other forms."""

    name: Literal["attempts", "progress", "failures", "pods", "words", "nccl", "last", "help", "error"]
    regex: tuple[re.Pattern[str], ...] = ()


@functools.lru_cache(maxsize=16)
def _index_of(rules: tuple[DiagnosisRule, ...]) -> TextIndex[_Mark | LinePattern]:
    """Return the index of the constant texts of `rules`, and of the lines that tell the course of the job."""
    texts: dict[_Mark | LinePattern, Sequence[str]] = {}
    # Progress comes before failures, and attempts before the patterns of the same line.
    for name in ("progress", "failures", "attempts", "pods"):
        patterns = course_patterns(name)
        needles = [pattern.needles for pattern in patterns]
        texts[_Mark(name, tuple(pattern.regex for pattern in patterns))] = (
            [text for some in needles for text in some] if all(needles) else ()
        )
    texts[_Mark("words")] = (BEGIN, FRAME, *SIGNS)
    texts[_Mark("nccl")] = needles_of_forms()
    texts[_Mark("last")] = (_LAST_ERROR,)
    texts[_Mark("help")] = (RULE,)
    texts |= {pattern: pattern.needles for rule in rules for pattern in rule.patterns}
    texts[_Mark("error", (_FAILURE,))] = _FAILURES
    return TextIndex(texts)


class _Reader:
    """Reader of logs, with the matches so far."""

    def __init__(self, rules: tuple[DiagnosisRule, ...]) -> None:
        self._counted = {count.line for rule in rules for count in rule.counts}
        self._counted |= {pattern for rule in rules if rule.every for pattern in (*rule.any, *rule.all)}
        self._shapes = LineShapes(_index_of(rules))
        self.seen: dict[LinePattern, _Seen] = {}
        self.last: deque[Line] = deque(maxlen=6)
        self.course, self.exceptions = _Course(), Exceptions()
        self.total = 0
        self.help = HelpBlock()
        # The text before `Last error:`, and the number of the line behind it.
        self._quoted: tuple[str, int] = "", 0

    def read(self, name: str, blocks: Iterable[str]) -> None:
        """Read a log, whose blocks are one line or several."""
        self.course.logs += 1
        here: dict[LinePattern, _Seen] = {}
        number, before = 0, ""
        for block in blocks:
            plain = _CONTROL.sub("", block) if "\x1b" in block else block
            shapes = self._shapes.of(plain)
            follows = self.exceptions.open or self.help.open or self._quoted[1] > self.total
            lines = plain.split("\n") if follows or any(shapes) else ()
            for index, marks in enumerate(shapes) if lines else ():
                follows = self.exceptions.open or self.help.open or self._quoted[1] == self.total + index + 1
                if marks or follows:
                    line = Line(name, number + index + 1, lines[index].rstrip("\r"))
                    self._line(line, before, self.total + index + 1, marks, here)
                before = lines[index]
            before = before if lines else plain[plain.rfind("\n") + 1 :]
            number += len(shapes)
            self.total += len(shapes)
        for pattern, counts in here.items():
            self.seen[pattern].count += counts.count
            for group, values in counts.values.items():
                self.seen[pattern].values.setdefault(group, {}).update(values)

    def _line(
        self, line: Line, before: str, order: int, marks: Sequence[_Mark | LinePattern], here: dict[LinePattern, _Seen]
    ) -> None:
        """Read the line after `before`; `here` holds the counts of its log since the last new attempt."""
        course, words = "", False
        matched: list[LinePattern] = []
        if self._quoted[1] == order and line.text.startswith(self._quoted[0]):
            self._match_forms(_forms(f" NCCL WARN {line.text[len(self._quoted[0]) :]}"), line, order, here)
        if (block := self.help.read(line)) is not None:
            self._match_forms((f"mpi:help: {block[1]}",), block[0], order, here)
        for mark in marks:
            if isinstance(mark, LinePattern):
                if self._match(mark, line, line.text, order, here):
                    matched.append(mark)
            elif mark.name == "nccl":
                self._match_forms(_forms(line.text[max(0, line.text.find(" NCCL ")) :]), line, order, here)
            elif mark.name == "last":
                self._quoted = line.text.partition(_LAST_ERROR)[0], order + 1
            elif mark.name == "words":
                words = True
            elif mark.name == "help" or not any(pattern.search(line.text) for pattern in mark.regex):
                continue
            elif mark.name == "attempts":
                here.clear()
                self.course.attempt = order
            elif mark.name == "pods":
                self.course.pods = True
            elif mark.name == "error":
                self.last.append(line)
            else:
                course = course or mark.name
        if course == "progress":
            self.course.trained.append(order)
            self.course.finished = order if _FINISHED in line.text else self.course.finished
        elif course == "failures":
            self.course.failed = order
        if words or self.exceptions.open:
            self.exceptions.read(line, before, order, matched)
        if self.exceptions.best.weight and self.course.long_passed(self.exceptions.best.order):
            self.exceptions = Exceptions()

    def _match_forms(self, forms: Iterable[str], line: Line, order: int, here: dict[LinePattern, _Seen]) -> None:
        for form in forms:
            for pattern in self._shapes.of(form)[0]:
                if isinstance(pattern, LinePattern):
                    self._match(pattern, line, form, order, here)

    def _match(self, pattern: LinePattern, line: Line, form: str, order: int, here: dict[LinePattern, _Seen]) -> bool:
        match = pattern.regex.search(form)
        if match is None:
            return False
        seen = self.seen.setdefault(pattern, _Seen(order=order))
        seen.latest = order
        _keep(seen, match, line, match.start() if form is line.text else 0)
        if pattern in self._counted:
            _count(here.setdefault(pattern, _Seen()), match.groupdict())
        return True


def diagnose(logs: Iterable[tuple[str, Iterable[str]]], rules: Sequence[DiagnosisRule]) -> Diagnosis:
    """Return the diagnosis of the `logs` by `rules`; a log is its name and its text in blocks of whole lines.

    A block is one line or several, without the newline at its end.
    """
    reader = _Reader(tuple(rules))
    for name, blocks in logs:
        reader.read(name, blocks)
    seen, course, exceptions = reader.seen, reader.course, reader.exceptions
    held = [(rule, result) for rule in rules if (result := _found(rule, seen, course)) is not None]
    highest = max((rule.rank for rule, _ in held if rule.kind != "note"), default=0)
    held = [row for row in held if not row[0].general or row[0].rank >= highest]
    held.sort(key=lambda row: (KINDS.index(row[0].kind), -row[0].rank, row[1][0]))
    words = exceptions.words
    shown = (
        () if course.passed(words.order) else tuple(_evidence(line, words.at) for line in (*words.lines, *words.led))
    )
    message = words if shown else Words()
    held = [_without_claim(rule, result, message, held, (course.failed, reader.total)) for rule, result in held]
    held.sort(key=lambda row: (KINDS.index(row[1][1].kind), -row[0].rank, row[1][0]))
    held = [*held[:1], *((rule, (order, _as_symptom(finding))) for rule, (order, finding) in held[1:])]
    held.sort(key=lambda row: (KINDS.index(row[1][1].kind), -row[0].rank, row[1][0]))
    if held and (held[0][1][1].kind == "cause" or held[0][0].rank > _CONSEQUENCE):
        explains = [n for n, (rule, _) in enumerate(held) if words.marks.intersection((*rule.any, *rule.all))]
        if shown and explains:
            rule, (order, finding) = held[explains[0]]
            held[explains[0]] = rule, (order, replace(finding, evidence=_distinct((*shown, *finding.evidence))))
        shown = () if explains or _comes_before(*held[0], words) else shown
    last = tuple(map(_evidence, reader.last))
    return Diagnosis(reader.total, tuple(finding for _, (_, finding) in held), shown, last)


def _without_claim(
    rule: DiagnosisRule,
    result: tuple[int, DiagnosisFinding],
    words: Words,
    held: Sequence[tuple[DiagnosisRule, tuple[int, DiagnosisFinding]]],
    ends: tuple[int, int],
) -> tuple[DiagnosisRule, tuple[int, DiagnosisFinding]]:
    """Return a cause as a symptom if the program survived it: its lines say so, or another reason ended the program.

    Programs continue after warnings, and often after lines of a rule that `passes`, such as the exception of an
    optional import, or a command of the shell that is not there. They then end with another exception, or for the
    reason of a rule that `ends`, to which no earlier line leads. A script continues after a line of its shell or of
    a small tool. `ends` are the numbers of the last failure's line and of the last line.
    """
    (order, finding), (failed, end) = result, ends
    if rule.kind != "cause":
        return rule, result
    lines = [evidence.text for evidence in finding.evidence]
    warned = all(WARNING.search(line) for line in lines)
    mild = warned and not any(GRAVE.search(line) for line in lines)
    remarked = mild or all(REMARK.search(line) for line in lines)
    mentioned = warned or all(SURVIVED.search(line) for line in lines)
    others = [row for row in held if row[0] is not rule and rule.id not in row[0].follows]
    later = [other for other, (at, _) in others if at > order and other.kind == "cause"]
    led = any(rule.id in other.follows and words.marks.intersection((*other.any, *other.all)) for other, _ in held)
    last = words.weight == Weight.ENDED and order < words.order
    own = words.marks.intersection((*rule.any, *rule.all))
    light = rule.passes and remarked and not own
    of_shell = rule.passes and all(OF_SHELL.search(line) for line in lines)
    spoke = words.weight >= (Weight.ERROR if rule.rank > _ROOT else Weight.REFUSAL) and order < words.order
    survived = (
        all(GOES_ON.search(line) for line in lines)
        or (rule.passes and mild and order < end)
        or (of_shell and ((spoke and not (led or own)) or (rule.rank <= _ROOT and failed < order < end)))
        or any(mild or (rule.passes and (remarked or other.rank > _ROOT)) for other in later if other.ends)
        or any(of_shell or (light and not other.passes) for other in later if other.rank > _ROOT)
        or (last and not (led or own) and (warned or (rule.passes and mentioned)))
    )
    return rule, (order, _as_symptom(finding) if survived else finding)


def _as_symptom(finding: DiagnosisFinding) -> DiagnosisFinding:
    return replace(finding, kind="symptom") if finding.kind == "cause" else finding


def _comes_before(rule: DiagnosisRule, result: tuple[int, DiagnosisFinding], words: Words) -> bool:
    """Return whether a cause explains more than the program's error message `words`, which no rule explains.

    After a cause, a program's message is a consequence of it.
    """
    order, finding = result
    if finding.kind == "cause" and rule.rank > _ROOT:
        return True
    if finding.kind != rule.kind:
        return False
    return words.weight < Weight.NAMED or (order < words.order and not rule.passes)


def _distinct(evidence: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """Return the first part of each line: patterns may match at different places of a long line."""
    lines: dict[tuple[str, int], Evidence] = {}
    for row in evidence:
        lines.setdefault((row.file, row.line), row)
    return tuple(lines.values())


def explain(text: str, place: Place) -> str:
    """Return the first cause in the log `text` by the rules of `place`, with its hint; "" if there is none."""
    findings = diagnose([("log", ["\n".join(text.splitlines())])], load_rules(place)).findings
    return ": ".join(filter(None, (findings[0].cause, findings[0].hint))) if findings else ""


def _count(seen: _Seen, groups: Mapping[str, str | None]) -> None:
    seen.count += 1
    for group, value in groups.items():
        values = seen.values.setdefault(group, {})
        if len(values) < _VALUES:
            values[(value or "")[:_LONGEST]] = None


@functools.lru_cache(1024)
def _forms(text: str) -> tuple[str, ...]:
    """Return the forms of a line of NCCL that rules match, without the prefix, which differs between ranks."""
    log = parse_nccl_log(text)
    faults = (f"nccl:{fault.kind}: {fault.text} => {fault.cause}" for fault in log.faults)
    networks = (f"nccl:network: {value}" for value in log.networks)
    return (*networks, *(f"nccl:provider: {value}" for value in log.providers), *faults)


def _keep(seen: _Seen, match: re.Match[str], line: Line, start: int) -> None:
    for group, value in match.groupdict().items():
        if not seen.groups.get(group) or (value and _SOURCE.search(seen.groups[group])):
            # Loaders print paths by way of $ORIGIN: /env/torch/lib/../../nvidia/cudnn/lib/libcudnn.so.9
            plain = os.path.normpath(value) if value and value.startswith("/") and "/../" in value else value
            seen.groups[group] = (plain or "")[:_LONGEST]
    # Lines that differ only in numbers (times, process IDs) count as the same.
    if len(seen.kept) < _KEPT and (like := (line.file, start, _DIGITS.sub("0", line.text))) not in seen.alike:
        if len(seen.alike) < _SHAPES_KEPT:
            seen.alike.add(like)
        evidence = _evidence(line, start)
        alike = {_DIGITS.sub("0", kept.text) for kept in seen.kept if kept.file == line.file}
        if _DIGITS.sub("0", evidence.text) not in alike:
            seen.kept.append(evidence)


def _evidence(line: Line, around: int = 0) -> Evidence:
    """Return the part of a line around an offset."""
    text = redact("".join(c if c.isprintable() else " " for c in line.text))
    start = max(0, min(around - _SHOWN // 4, len(text) - _SHOWN))
    return Evidence(line.file, line.number, ("…" if start else "") + text.strip()[start : start + _SHOWN])


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
    latest = max(seen[pattern].latest for pattern in (*either, *rule.all))
    if rule.passes and course.passed(latest):
        return None
    if rule.kind != "note" and latest <= course.survived:
        return None
    if rule.kind == "cause" and course.failed < latest and course.long_passed(latest):
        return None
    patterns = dict.fromkeys([*either, *rule.all, *(count.line for count in rule.counts), *rule.also])
    shown = [seen[pattern] for pattern in patterns if pattern in seen]
    groups: dict[str, str] = {}
    for lines in shown:
        groups = {name: value for name, value in lines.groups.items() if value} | groups
    for count in rule.counts:
        lines = seen.get(count.line, _Seen())
        number = len(lines.values.get(count.distinct, ())) if count.distinct else lines.count
        if not count.holds(number, groups):
            return None
        groups.setdefault("count", str(number))
    if rule.every:
        values = (seen[pattern].values.get(rule.every) for pattern in (*either, *rule.all))
        names = list(next(filter(None, values), ()))
        groups |= {rule.every: ", ".join(names[-_NAMED:])} if names else {}
        groups["is"] = "are" if len(names) > 1 else "is"
    # First the first line of each pattern, then the second ones.
    evidence = dict.fromkeys(line for turn in zip_longest(*(lines.kept for lines in shown)) for line in turn if line)
    alone = rule.alone if course.logs == 1 and groups.get("count") == "1" else ""
    cause, hint = (
        redact(_filled(rule.cause, groups)) + alone,
        redact(_filled((course.pods and rule.pod_hint) or rule.hint, groups)),
    )
    finding = DiagnosisFinding(rule.id, rule.kind, cause, hint, rule.source, _distinct(evidence))
    return min((lines.order for lines in shown), default=0), finding


def _filled(text: str, groups: Mapping[str, str]) -> str:
    """Return a message with the values of groups. [[…|…]] becomes its first alternative whose groups are all known."""

    def choose(match: re.Match[str]) -> str:
        return next((choice for choice in match[1].split("|") if set(_GROUP.findall(choice)) <= set(groups)), "")

    return _EITHER.sub(choose, text).format_map(defaultdict(lambda: "?", groups))
