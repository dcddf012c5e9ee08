"""Output of whole lines on standard output and standard error, which several ranks share."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO


def log(line: str) -> None:
    """Print `line` on standard output and flush.

    Text and newline are one write: print() makes two when Python is unbuffered, and lines of different ranks
    would mix.
    """
    _write(sys.stdout, line)


def print_error(message: str) -> None:
    """Print `message` as this program's error line on standard error."""
    _write(sys.stderr, f"ddp_train: error: {message}")


def _write(stream: TextIO, line: str) -> None:
    """Write a line; letters that the stream lacks are escaped, and a full disk ends no training."""
    with suppress(OSError):
        try:
            stream.write(line + "\n")
        except UnicodeEncodeError:
            stream.write(line.encode("ascii", "backslashreplace").decode() + "\n")
        stream.flush()
