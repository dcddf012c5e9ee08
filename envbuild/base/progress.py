"""Progress for users, always on stderr: live on a terminal; elsewhere, plain lines and a sign of life every 15 s."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from envbuild.base.display import Display
from envbuild.base.display import human_size as human_size
from envbuild.base.display import human_time as human_time

Log = Callable[[str], None]
OnProgress = Callable[[int], None]


def display() -> Display:
    """Return the display of stderr, which belongs to the stream: a test that replaces the stream gets another one."""
    stream: Any = sys.stderr
    found = getattr(stream, "display", None)
    if isinstance(found, Display):
        return found
    new = Display(stream)
    if stream is not None:
        stream.display = new
    return new


def log(message: str) -> None:
    """Print a message to stderr; standard output is for results. With --quiet, only those that begin "warning:"."""
    display().print(message)


def detail(message: str) -> None:
    """Print a message to stderr with --verbose."""
    if display().verbosity > 0:
        log(message)


def reuse(kind: str, name: str, there: bool) -> int:
    """Note for the closing summary whether a part of the build, such as one of the "layers", was there already.

    A part that was not there once counts as new. Returns how many parts of the kind are new.
    """
    parts = display().reused.setdefault(kind, {})
    parts[name] = parts.get(name, True) and there
    return len(parts) - sum(parts.values())


@contextmanager
def step(title: str, *, told: bool = False, note: Callable[[], str] | None = None) -> Iterator[None]:
    """Show a step that takes its time.

    A terminal shows it with its time while it runs, the lines of `note()` below it, and prints it with its time when it
    ends. Elsewhere it is printed when it starts, and again when nothing was printed for 15 s. `told`: the caller has
    printed it.
    """
    with display().task(title, told=told, note=note):
        yield


@contextmanager
def transfer(title: str, total: int | None) -> Iterator[OnProgress]:
    """Show the progress of one transfer of `total` bytes (None: unknown), as a step.

    Yields a function to call with each number of bytes transferred; several threads may call it.
    """
    with display().task(title, total=total, counts=True) as task:
        yield task.advance
