"""Lines on standard output and standard error that stay whole when several ranks share them."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print `line` on standard output at once.

    One write for text and newline: print() makes two of them when Python is unbuffered, and lines
    of different ranks would then mix.
    """
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def complain(message: str) -> None:
    """Print `message` as this program's error line on standard error."""
    sys.stderr.write(f"ddp_train: error: {message}\n")
    sys.stderr.flush()
