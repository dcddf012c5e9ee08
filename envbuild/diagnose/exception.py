"""The first exception of a program in its log, which may mix the lines of many ranks.

A traceback has Python's format (traceback.c): a header line, indented frames, and the exception. Each line may
have a prefix that names its process (`[rank0]: `, `0: `, `[pod/ddp-worker-0/pytorch] `).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line \d+')
_MARKS = re.compile(r"[\s^~]*$")
_EXCEPTION = re.compile(r"(?P<module>(?:\w+\.)*)(?P<name>[A-Z]\w*)(?:: |:?\s*$)")
_USUAL = ("Error", "Exception", "Warning", "Expired", "Timeout", "Failure", "Interrupt", "Exit", "Iteration")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3|^<frozen ")
_LAUNCHER = re.compile(r"/torch/distributed/(?:run|launch|launcher/api)\.py$|/bin/torchrun$")
_OF_TORCHRUN = "torch.distributed.elastic."
_ENDS = ("SystemExit", "KeyboardInterrupt")
# Timestamps, which differ between the lines of a traceback and are removed from their prefixes.
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ][\d:.,]+|\d\d:\d\d:\d\d[\d.,]*")
# The maximum of lines per traceback, and of open tracebacks.
_LONGEST = 1000
_MOST = 256
# A traceback whose end is missing is given up after so many lines of all processes.
_GIVEN_UP = 50_000


class Line(NamedTuple):
    """A line of a log."""

    file: str
    number: int
    text: str


@dataclass(slots=True)
class _Open:
    """A traceback whose exception has not been read: its last frame, and the last frame in the program's own files."""

    last: list[Line] = field(default_factory=list)
    own: list[Line] = field(default_factory=list)
    lines: int = 0
    framed: bool = False
    launcher: bool = False


@dataclass(slots=True)
class Exceptions:
    """A reader of log lines that finds the `first` exception that is neither torchrun's own nor ignored.

    Before it are the frames that locate it; `order` is the number of its line among all lines.
    """

    first: tuple[Line, ...] = ()
    order: int = 0
    _file: str = ""
    _begun: int = 0
    _open: dict[str, _Open] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether each line counts, for a traceback has begun; else only a line that contains BEGIN."""
        return bool(self._open) and not self.first

    def read(self, line: Line, before: str, order: int) -> None:
        """Read the next line, which follows the line `before` of its file."""
        if line.file != self._file or order > self._begun + _GIVEN_UP:
            self._file = line.file
            self._open.clear()
        begun = BEGIN in line.text
        if (begun or self._open) and (plain := _TIME.sub("", line.text)):
            if begun and "Exception ignored in" not in before and len(self._open) < _MOST:
                self._open[plain[: plain.index(BEGIN)]] = _Open()
                self._begun = order
            elif not begun:
                self._go_on(line, before, plain, order)

    def _without_bar(self, plain: str, before: str) -> None:
        """Correct the prefix of a traceback that began behind a progress bar in the line before, by its first frame."""
        bar, begun, _ = _TIME.sub("", before).partition(BEGIN)
        prefix, frame, _ = plain.partition('  File "')
        known = not begun or not frame or prefix in self._open
        if not known and bar in self._open and (bar.startswith(prefix) or bar.endswith(prefix)):
            self._open[prefix] = self._open.pop(bar)

    def _go_on(self, line: Line, before: str, plain: str, order: int) -> None:
        self._without_bar(plain, before)
        prefix = max((one for one in self._open if plain.startswith(one)), key=len, default=None)
        if prefix is None:
            return
        one = self._open[prefix]
        one.lines += 1
        found = _exception(one, line, plain[len(prefix) :])
        if found is not None or one.lines > _LONGEST:
            del self._open[prefix]
        if found is None or one.launcher or found["name"] in _ENDS or found["module"].startswith(_OF_TORCHRUN):
            return
        self.first, self.order = tuple(dict.fromkeys((*one.own, *one.last, line))), order


def _exception(one: _Open, line: Line, text: str) -> re.Match[str] | None:
    """Store a frame in the traceback `one`, or return the match of its exception; `text` is Python's part of `line`."""
    if text[:1] in (" ", "\t"):
        if frame := _FRAME.match(text):
            one.launcher |= _LAUNCHER.search(frame["file"]) is not None
            one.last = [line]
            if not _LIBRARY.search(frame["file"]):
                one.own = one.last
        elif len(one.last) == 1 and not _MARKS.match(text):
            one.last.append(line)
        one.framed = True
        return None
    found = _EXCEPTION.match(text)
    # Other processes may write between its lines.
    ended = found and (one.framed or found["name"].endswith(_USUAL))
    if text.strip():
        one.framed = False
    return found if ended else None
