"""The shapes of a log's lines: most lines differ in numbers alone, and few can match any pattern.

A shape is a line without its digits. Each new shape is searched once, by one expression of the constant texts of all
patterns; a pattern is then tried only on lines whose shape contains one of its texts. Memory is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping
from typing import Generic, TypeVar

Mark = TypeVar("Mark", bound=Hashable)

_DIGITS = b"0123456789"
# How often characters occur in logs, by classes: per 1,000 characters; all others, such as capitals, are rare.
_COMMON = {60: b" e", 40: b"atnorsi", 20: b'cdlmpu."_-/:', 10: b"bfghkwvy,=[]()", 5: b"xzjq'"}
_RARE = 1
# The shapes that are remembered, and their characters in all.
_MOST, _MOST_CHARACTERS = 100_000, 16 << 20
_SHORTEST = 3
# Shorter ends of texts are in too many other words.
_END = 4


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass").translate(None, _DIGITS)


class LineShapes(Generic[Mark]):
    """The marks of shapes: those of `texts` of which a shape contains one text; a mark without texts is on each."""

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
        self._known: dict[bytes, tuple[Mark, ...]] = {}
        self._characters = 0

    def of(self, lines: str) -> list[tuple[Mark, ...]]:
        """Return the marks of each of the `lines`, which newlines separate, in the order of `texts`."""
        shapes = _encoded(lines).split(b"\n")
        if len(self._known) > _MOST or self._characters > _MOST_CHARACTERS:
            self._known.clear()
            self._characters = 0
        for shape in set(shapes) - self._known.keys():
            marked = self._search(shape) or self._search_short(shape)
            self._known[shape] = self._marks_of(shape) if marked else self._always
            self._characters += len(shape)
        return [self._known[shape] for shape in shapes]

    def _marks_of(self, shape: bytes) -> tuple[Mark, ...]:
        marks = {*self._always, *(mark for text in self._short if text in shape for mark in self._marks[text])}
        at = 0
        while found := self._search(shape, at):
            begin, at = found.start(), found.start() + 1
            for end, text in self._ends[shape[begin : begin + _SHORTEST]]:
                if shape.startswith(end, begin) and text in shape:
                    marks.update(self._marks[text])
        return tuple(sorted(marks, key=self._order.__getitem__))


def _ends(texts: Collection[bytes]) -> dict[bytes, list[tuple[bytes, bytes]]]:
    """Return an end and the whole of each of the `texts`, by the first characters of the end."""
    frequency = {character: often for often, some in _COMMON.items() for character in some}
    starts: dict[int, dict[bytes, int]] = {}
    for text in texts:
        for start in range(max(0, len(text) - _END), -1, -1):
            starts.setdefault(text[start], {})[text] = start
    found: dict[bytes, list[tuple[bytes, bytes]]] = {}
    left = set(texts)
    while left:
        # The character that begins most ends for its frequency (a greedy cover).
        first = max(
            sorted(starts), key=lambda one: len(starts[one].keys() & left) / (frequency.get(one, _RARE) + _RARE)
        )
        for text, start in starts[first].items():
            if text in left:
                found.setdefault(text[start : start + _SHORTEST], []).append((text[start:], text))
        left -= starts.pop(first).keys()
    return found


def _alternatives(texts: Collection[bytes]) -> re.Pattern[bytes]:
    """Return an expression that matches at the begin of each of the `texts`."""
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
