"""Output of whole lines on standard output and standard error, which several ranks share."""

from __future__ import annotations

import sys


def log(line: str) -> None:
    """Print `line` on standard output and flush.

    Text and newline are one write: print() makes two when Python is unbuffered, and lines of different ranks
    would mix.
    """
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def print_error(message: str) -> None:
    """Print `message` as this program's error line on standard error."""
    sys.stderr.write(f"ddp_train: error: {message}\n")
    sys.stderr.flush()
