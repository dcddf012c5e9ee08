"""Progress for users, always on stderr: rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import codecs
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Log = Callable[[str], None]
OnProgress = Callable[[int], None]

# Commands to a terminal (ECMA-48): control sequences, strings such as a window's title, and single characters. The
# first group are the colours and styles of messages.
_COMMAND = re.compile(
    r"(\x1b\[(?:(?:[0-4]|3[0-7]|9[0-7])(?:;(?:[0-4]|3[0-7]|9[0-7]))*)?m)|"
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b."
)


def log(message: str) -> None:
    """Print one line to stderr; standard output is for results."""
    print(message, file=sys.stderr, flush=True)


def clean(text: str, *, colours: bool = False) -> str:
    """Return `text` without commands to a terminal, with or without its colours, and "?" for other control characters.

    Tabs and line ends remain. Logs, registries and tools may send anything.
    """
    text = _COMMAND.sub(lambda m: m[1] or "" if colours else "", text.replace("\r\n", "\n"))
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or (colours and c == "\x1b") else "?" for c in text)


class _Terminal(io.TextIOWrapper):
    """A stream that cleans all text: the one place through which envbuild's text reaches a terminal."""

    def write(self, text: str, /) -> int:
        super().write(clean(text, colours=True))
        return len(text)


def guard_streams() -> None:
    """Clean all text for stderr, and that for stdout on a terminal; let no character fail in the locale's encoding.

    Scripts get the bytes of results unchanged: a path may contain any.
    """
    codecs.register_error("envbuild", _bytes_of)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):  # closed, or a test's
            continue
        # click would replace a stream in ASCII by one in UTF-8, which cleans nothing.
        encoding = "utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding
        if name == "stdout" and not stream.isatty():
            stream.reconfigure(encoding=encoding, errors="envbuild")
        else:  # the buffer is shared with the first stream, which stays open as sys.__stderr__
            setattr(sys, name, _Terminal(stream.buffer, encoding, "envbuild", line_buffering=True))


def _bytes_of(error: UnicodeError) -> tuple[bytes, int]:
    """Encode what the locale cannot: the bytes of a path that were no text as they were, other characters escaped."""
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    kept = (bytes([ord(c) - 0xDC00]) if "\udc80" <= c <= "\udcff" else ascii(c)[1:-1].encode() for c in part)
    return b"".join(kept), error.end


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

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # The bar moves the cursor, which the guarded stream would not let pass.
    with Progress(*columns, console=Console(file=sys.__stderr__), transient=True) as progress:
        task = progress.add_task(clean(title), total=total)
        yield lambda count: progress.advance(task, count)
