"""The streams of envbuild: no text that it prints can command a terminal, or fails in the locale's encoding."""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from envbuild.base.errors import note_writing

# Commands to a terminal (ECMA-48): control sequences, strings such as a window's title, and single characters. The
# first group are the colours and styles of messages.
_COMMAND = re.compile(
    r"(\x1b\[(?:(?:[0-4]|3[0-7]|9[0-7])(?:;(?:[0-4]|3[0-7]|9[0-7]))*)?m)|"
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b."
)


def clean(text: str, *, colours: bool = False) -> str:
    """Return `text` without commands to a terminal, with or without its colours, and "?" for other control characters.

    Tabs and line ends remain. Logs, registries and tools may send anything.
    """
    text = _COMMAND.sub(lambda m: m[1] or "" if colours else "", text.replace("\r\n", "\n"))
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or (colours and c == "\x1b") else "?" for c in text)


class ClosedPipe(Exception):
    """Whoever read standard output or standard error has closed it: EPIPE of these streams alone.

    It is no OSError, which those who write files would take for an error of theirs.
    """


class GuardedStream(io.TextIOWrapper):
    """Standard output or standard error: the one place through which envbuild's text leaves it.

    `cleans`: it removes commands to a terminal, and `beneath` is the stream that does not, for those who move the
    cursor. Messages that cannot be written, such as those to a log on a full disk, are lost (`is_lossy`): they decide
    neither the work nor its exit code. Somebody who stops to read them does. Raises ClosedPipe, and OSError with the
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
    """Return whether the user wants colours on terminals (https://no-color.org), and the terminal has them."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def guard_streams() -> None:
    """Guard standard output and standard error: their errors, and commands to a terminal in text for one.

    Text for stderr, and for stdout on a terminal, is cleaned. Characters that the locale's encoding lacks are escaped
    instead of raising an error. Scripts get the bytes of results unchanged: a path may contain any. A stream that was
    closed by who started envbuild is /dev/null: files that are opened later must not take its place.
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
    """Open /dev/null in the place of standard streams that are closed."""
    null = os.open(os.devnull, os.O_RDWR)
    while null <= 2:  # it is the lowest free descriptor
        os.set_inheritable(null, True)
        null = os.dup(null)
    os.close(null)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - until the end


def _bytes_of(error: UnicodeError) -> tuple[bytes, int]:
    """Encode what the locale cannot: the bytes of a path that were no text as they were, other characters escaped."""
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    kept = (bytes([ord(c) - 0xDC00]) if "\udc80" <= c <= "\udcff" else ascii(c)[1:-1].encode() for c in part)
    return b"".join(kept), error.end
