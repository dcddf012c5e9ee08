"""The streams of envbuild: no text that it prints can command a terminal, or fails in the locale's encoding."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

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


class CleanStream(io.TextIOWrapper):
    """A stream that cleans all text: the one place through which envbuild's text reaches a terminal.

    `beneath` is the stream that cleans nothing, for those who move the cursor. Messages that cannot be written, such as
    those to a log on a full disk, are lost (`is_lossy`): they decide neither the work nor its exit code. Somebody who
    stops to read them does.
    """

    beneath: TextIO
    coloured: bool
    is_lossy: bool

    def write(self, text: str, /) -> int:
        with self._losing():
            super().write(clean(text, colours=self.coloured))
        return len(text)

    def flush(self) -> None:
        with self._losing():
            super().flush()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, BrokenPipeError) or not self.is_lossy:
                raise


def has_colours() -> bool:
    """Return whether the user wants colours on terminals (https://no-color.org), and the terminal has them."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def guard_streams() -> None:
    """Remove commands to a terminal from text for stderr, and for stdout on a terminal.

    Characters that the locale's encoding lacks are escaped instead of raising an error.

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
            cleaning = CleanStream(stream.buffer, encoding, "envbuild", line_buffering=True)
            cleaning.beneath, cleaning.coloured, cleaning.is_lossy = stream, has_colours(), name == "stderr"
            setattr(sys, name, cleaning)


def _bytes_of(error: UnicodeError) -> tuple[bytes, int]:
    """Encode what the locale cannot: the bytes of a path that were no text as they were, other characters escaped."""
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    kept = (bytes([ord(c) - 0xDC00]) if "\udc80" <= c <= "\udcff" else ascii(c)[1:-1].encode() for c in part)
    return b"".join(kept), error.end
