"""Progress for users, always on stderr: rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Log = Callable[[str], None]
OnProgress = Callable[[int], None]


def log(message: str) -> None:
    """Print one line to stderr; standard output is for results."""
    print(message, file=sys.stderr, flush=True)


def human_size(count: float) -> str:
    """Return `count` bytes in decimal units, as package indexes print sizes."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


@contextmanager
def transfer(title: str, total: int | None) -> Iterator[OnProgress]:
    """Show the progress of one transfer of `total` bytes (None: unknown).

    Yields a function to call with each number of bytes transferred; several threads may call it. A terminal shows a
    bar; elsewhere one line is printed at the start, which keeps logs short.
    """
    if not sys.stderr.isatty():
        log(f"{title} ({human_size(total)})" if total else title)
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
