"""Messages and progress for users on stderr: live on a terminal; elsewhere, lines and a sign of life every 15 s.

Printed text contains no terminal control sequences, and does not fail in the locale's encoding.

rich draws the live part, and is imported when a task has run for a quarter of a second.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from envbuild.base.system_errors import note_writing
from envbuild.base.text import human_size, human_time

# Commands to a terminal (ECMA-48): control sequences, strings such as a window's title, and single characters. The
# first group are the colours and styles of messages.
_COMMAND = re.compile(
    r"(\x1b\[(?:(?:[0-4]|3[0-7]|9[0-7])(?:;(?:[0-4]|3[0-7]|9[0-7]))*)?m)|"
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b."
)


def clean(text: str, *, colours: bool = False) -> str:
    """Return `text` without terminal control sequences, with or without colours, and "?" for other control characters.

    Tabs and line ends are kept. Text of logs, registries and tools is untrusted.
    """
    text = _COMMAND.sub(lambda m: m[1] or "" if colours else "", text.replace("\r\n", "\n"))
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or (colours and c == "\x1b") else "?" for c in text)


class ClosedPipe(Exception):
    """EPIPE on standard output or standard error: its reader has closed it.

    It is not an OSError, which code that writes files would take for an error of its file.
    """


class GuardedStream(io.TextIOWrapper):
    """Standard output or standard error, through which all text of envbuild is written.

    With `cleans`, it removes terminal control sequences; code that moves the cursor writes to the stream `beneath`.
    If `is_lossy`, messages that cannot be written, such as to a log on a full disk, are dropped without affecting the
    work or its exit code. A closed pipe ends the work: it raises ClosedPipe. Other errors are OSError with the
    stream's name.
    """

    beneath: TextIO
    title: str
    cleans: bool
    coloured: bool
    is_lossy: bool

    def write(self, text: str, /) -> int:
        with self._guarded():
            super().write(clean(text, colours=self.coloured) if self.cleans else text)
        return len(text)

    def flush(self) -> None:
        with self._guarded():
            super().flush()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise ClosedPipe from error
            if not self.is_lossy:
                error.filename = self.title
                note_writing(error, self.title)
                raise


def has_colours() -> bool:
    """Return whether the user wants colours (https://no-color.org) and the terminal supports them."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def guard_streams() -> None:
    """Replace standard output and standard error by GuardedStreams.

    Text for stderr, and for stdout on a terminal, is cleaned. Characters that the locale's encoding lacks are escaped
    instead of raising an error. Scripts get the bytes of results unchanged: a path may contain any bytes. A stream that
    was closed before envbuild started becomes /dev/null, so that no file opened later gets its descriptor.
    """
    _open_closed()
    codecs.register_error("envbuild", _bytes_of)
    for name, title in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):  # a test's
            continue
        # click would replace a stream in ASCII by one in UTF-8, which cleans nothing.
        encoding = "utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding
        # The buffer is shared with the first stream, which stays open as sys.__stderr__.
        guarded = GuardedStream(stream.buffer, encoding, "envbuild", line_buffering=stream.line_buffering)
        guarded.title, guarded.beneath, guarded.coloured = title, stream, has_colours()
        guarded.is_lossy = name == "stderr"
        guarded.cleans = guarded.is_lossy or stream.isatty()
        setattr(sys, name, guarded)


def _open_closed() -> None:
    """Open /dev/null for standard streams that are closed."""
    null = os.open(os.devnull, os.O_RDWR)
    while null <= 2:  # it is the lowest free descriptor
        os.set_inheritable(null, True)
        null = os.dup(null)
    os.close(null)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - until the end


def _bytes_of(error: UnicodeError) -> tuple[bytes, int]:
    """Encode characters that the locale lacks: undecodable bytes of a path unchanged, others as escapes."""
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    kept = (bytes([ord(c) - 0xDC00]) if "\udc80" <= c <= "\udcff" else ascii(c)[1:-1].encode() for c in part)
    return b"".join(kept), error.end


_LIVE_S, _SIGN_S = 0.25, 15.0
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# Columns of the bar of a transfer.
_BAR = 20
# Seconds over which a rate is measured: longer than the pauses of a network, shorter than a user's patience.
_RATE_S = 10.0
_UNSEEN = ("dumb", "unknown", "")


@dataclass(slots=True, eq=False)
class Task:
    """Running step or transfer; a transfer `counts` bytes. `printed`: the caller has printed its title."""

    title: str
    started: float
    total: int | None = None
    counts: bool = False
    printed: bool = False
    note: Callable[[], str] | None = None
    done: int = 0
    # (time, bytes) of the last seconds, by which the rate is measured.
    samples: list[tuple[float, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """Title without the ellipsis at its end."""
        return self.title.strip().removesuffix(" …")

    def advance(self, count: int) -> None:
        """Add `count` bytes."""
        with self._lock:
            self.done += count

    def rate(self, now: float) -> float:
        """Return the bytes per second of the last seconds, 0 if there are none; call it at each refresh."""
        self.samples = [sample for sample in self.samples if sample[0] >= now - _RATE_S] or [(self.started, 0)]
        self.samples.append((now, self.done))
        (before, had), (after, has) = self.samples[0], self.samples[-1]
        return (has - had) / (after - before) if after > before else 0.0

    def amount(self) -> str:
        """Return the transferred and the total bytes: "1.2 MB of 9.0 MB"; "" for a step."""
        if not self.counts or not (self.done or self.total):
            return ""
        return human_size(self.done) + (f" of {human_size(self.total)}" if self.total else "")

    def figures(self, now: float, columns: int) -> str:
        """Return the amount, the time left and the rate; leave out the time or the rate if `columns` are too few."""
        rate, shown = self.rate(now), self.amount()
        left = f"{human_time((self.total - self.done) / rate)} left" if self.total and rate else ""
        for more in (left, f"{human_size(rate)}/s" if rate else ""):
            if shown and more and len(shown) + 2 + len(more) <= columns:
                shown += f"  {more}"
        return shown


class Display:
    """Messages and tasks of a stream (None: closed); `reused` holds, by kind, whether each part was reused.

    `clock` replaces the clock in tests, which then call `tick`.
    """

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] | None = None) -> None:
        self.verbosity = 0
        self.reused: dict[str, dict[str, bool]] = {}
        self._stream = stream
        self._terminal = stream is not None and stream.isatty()
        # The live part moves the cursor, which the guarded stream would not let pass.
        self._beneath: Any = getattr(stream, "beneath", stream)
        encoding = (getattr(self._beneath, "encoding", None) or "").lower().replace("-", "")
        self._moves = self._terminal and os.environ.get("TERM", "") not in _UNSEEN and encoding == "utf8"
        self._clock = clock or time.monotonic
        self._ticks = clock is None
        self._tasks: list[Task] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._live: Any = None
        self._printed = self._clock()

    def print(self, message: str) -> None:
        """Print a message above the live part; with --quiet only a warning."""
        if self._stream is None or (self.verbosity < 0 and not message.startswith("warning:")):
            return
        lines = _wrapped(message, self._columns()) if self._terminal else message
        with self._lock:
            self._printed = self._clock()
            if self._live is not None:
                from rich.text import Text

                self._live.console.print(Text(clean(lines)), soft_wrap=True)
            else:  # in one write: lines of several threads must not mix
                self._stream.write(f"{lines}\n")
                self._stream.flush()

    @contextmanager
    def task(
        self,
        title: str,
        *,
        total: int | None = None,
        counts: bool = False,
        printed: bool = False,
        note: Callable[[], str] | None = None,
    ) -> Iterator[Task]:
        """Show a task while the context is open. `note` returns lines to show below it."""
        task = Task(title, self._clock(), total, counts, printed, note)
        live = self._moves and self.verbosity >= 0
        if not live and not printed:
            self.print(f"{title} ({human_size(total)})" if total else title)
        ended = ""
        try:
            self._start(task)
            yield task
        except BaseException as fault:
            ended = "interrupted after " if isinstance(fault, KeyboardInterrupt) else "failed after "
            raise
        finally:
            self._end(task)
            if (live and not printed) or self.verbosity > 0:
                amount = f"{human_size(task.done)} in " if task.done and not ended else ""
                self.print(f"{task.name} ({ended}{amount}{self._clock() - task.started:.1f} s)")

    def tick(self) -> bool:
        """Refresh the live part, or print a sign of life if it is time for one. Return whether a task runs."""
        with self._lock:
            if not self._tasks:
                return False
            now = self._clock()
            if self._moves and self.verbosity >= 0:
                self._refresh(now)
            elif now - max(self._printed, self._tasks[-1].started) >= _SIGN_S:
                task = self._tasks[-1]
                spent = [human_time(now - task.started), *([task.amount()] if task.amount() else [])]
                self.print(f"{task.name}: {', '.join(spent)}")
            return True

    def _start(self, task: Task) -> None:
        with self._lock:
            self._tasks.append(task)
            if self._ticks and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="display", daemon=True)
                self._thread.start()

    def _end(self, task: Task) -> None:
        with self._lock:
            self._tasks = [other for other in self._tasks if other is not task]
            if not self._tasks and self._live is not None:
                self._live.stop()
                self._live = None

    def _run(self) -> None:
        while True:
            time.sleep(_LIVE_S)
            # If the terminal is gone, a message of the main thread says so.
            with suppress(OSError, ValueError, ClosedPipe), self._lock:
                if not self.tick():
                    self._thread = None
                    return

    def _refresh(self, now: float) -> None:
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            console = Console(file=self._beneath, highlight=False)
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(self._drawn(now, self._live.console.width), refresh=True)

    def _drawn(self, now: float, width: int) -> Any:
        """Return the live part: a line for each task, and its notes."""
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        # A task whose title the caller printed is shown only if there is no other task.
        tasks = [task for task in self._tasks if not task.printed or task.note] or self._tasks[-1:]
        title = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid = Table.grid(title, Column(), padding=(0, 1, 0, 0), expand=True)
        spinner = _SPINNER[int(now / _LIVE_S) % len(_SPINNER)]
        for task in tasks:
            minutes, seconds = divmod(int(now - task.started), 60)
            name = Text(f"{spinner} {clean(task.name)}", style="bold")
            grid.add_row(name, Text(f"{minutes}:{seconds:02}", style="cyan"))
            barred = task.total is not None and width > 2 * _BAR
            if figures := task.figures(now, width - 12 - (_BAR if barred else 0)):
                line = Table.grid(padding=(0, 1, 0, 0))
                bar = [ProgressBar(total=task.total, completed=task.done, width=_BAR)] if barred else []
                line.add_row(" ", *bar, Text(figures, style="cyan", no_wrap=True, overflow="ellipsis"))
                grid.add_row(line, "")
            for row in clean(task.note()).splitlines() if task.note else ():
                grid.add_row(Text(f"  {row}"), "")
        return grid

    def _columns(self) -> int:
        with suppress(OSError, ValueError, AttributeError):
            known = os.environ.get("COLUMNS", "")
            return int(known) if known.isdecimal() else os.get_terminal_size(self._beneath.fileno()).columns or 80
        return 80


def _wrapped(message: str, columns: int) -> str:
    """Return a message in lines of at most `columns`, broken at blanks; words such as paths stay whole."""
    lines = message.split("\n")
    return "\n".join(wrapped(line, max(columns, 20), len(line) - len(line.lstrip()) + 2) for line in lines)


def wrapped(line: str, columns: int, indent: int) -> str:
    """Return `line`, broken at blanks if it is wider than `columns`, with the rest indented; words stay whole."""
    if len(line) <= columns:
        return line
    start = " " * indent
    keep: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return "\n".join(textwrap.wrap(line, columns, subsequent_indent=start, **keep))


Log = Callable[[str], None]
OnProgress = Callable[[int], None]


def display() -> Display:
    """Return the display of stderr, one per stream object: a test that replaces the stream gets a new display."""
    stream: Any = sys.stderr
    own = getattr(stream, "display", None)
    if isinstance(own, Display):
        return own
    new = Display(stream)
    if stream is not None:
        stream.display = new
    return new


def log(message: str) -> None:
    """Print a message to stderr; stdout is for results. With --quiet, print only messages that begin "warning:"."""
    display().print(message)


def detail(message: str) -> None:
    """Print a message to stderr with --verbose."""
    if display().verbosity > 0:
        log(message)


def reuse(kind: str, name: str, there: bool) -> int:
    """Record for the closing summary whether a part of the build, such as one of the "layers", was reused.

    A part that was ever missing counts as new. Returns the number of new parts of the kind.
    """
    parts = display().reused.setdefault(kind, {})
    parts[name] = parts.get(name, True) and there
    return len(parts) - sum(parts.values())


@contextmanager
def step(title: str, *, printed: bool = False, note: Callable[[], str] | None = None) -> Iterator[None]:
    """Show a long-running step.

    A terminal shows it with its time while it runs, the lines of `note()` below it, and prints it with its time when it
    ends. Elsewhere it is printed when it starts, and again when nothing was printed for 15 s. `printed`: the caller has
    printed it.
    """
    with display().task(title, printed=printed, note=note):
        yield


@contextmanager
def transfer(title: str, total: int | None) -> Iterator[OnProgress]:
    """Show the progress of one transfer of `total` bytes (None: unknown), as a step.

    Yields a function to call with the number of bytes of each piece; several threads may call it.
    """
    with display().task(title, total=total, counts=True) as task:
        yield task.advance
