"""Text output: its verbosity, no wider than the terminal, and one line per entry in a pipe, for grep."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import click

from envbuild.base.progress import display, wrapped


def _say(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        display().verbosity = -1 if parameter.name == "quiet" else 1


def verbosity(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how much is printed to stderr."""
    settings: dict[str, Any] = {"is_flag": True, "expose_value": False, "is_eager": True, "callback": _say}
    quiet = click.option("-q", "--quiet", help="Print only warnings, errors and the result.", **settings)
    verbose = click.option("-v", "--verbose", help="Also print each program that envbuild starts.", **settings)
    return quiet(verbose(command))


NO_LIMIT = 10_000


def width() -> int:
    """Return the columns of the terminal, or COLUMNS; in a pipe, there is no limit."""
    return shutil.get_terminal_size((NO_LIMIT, 0)).columns


def entry(name: str, cells: Sequence[str], column: int, width: int) -> str:
    """Return `name`, in a column of `column` characters, and `cells` after it, on several lines if one is too short.

    Words are never broken, so that a path can be copied.
    """
    line = "  ".join([f"{name:<{column}}", *cells])
    if len(line) <= width:
        return line
    room = max(20, width - column - 2)
    parts: list[str] = []
    for cell in cells:
        if parts and len(parts[-1]) + 2 + len(cell) <= room:
            parts[-1] += f"  {cell}"
        else:
            parts += textwrap.wrap(cell, room, break_long_words=False, break_on_hyphens=False)
    names = [name, *[""] * (len(parts) - 1)]
    return "\n".join(f"{n:<{column}}  {part}" for n, part in zip(names, parts, strict=True))


def fitted(line: str, indent: int = 6) -> str:
    """Return `line`, on several lines if it is wider than the terminal: all but the first are indented.

    Words are never broken: one that would be too wide with the indentation gets less of it.
    """
    limit = width()
    return wrapped(line, limit, min(indent, max(2, limit - max(map(len, line.split()), default=0))))


def columns(rows: Sequence[Sequence[str]], most: int = NO_LIMIT) -> list[str]:
    """Return `rows` in aligned columns, one line each; a column is at most `most` wide, unless a cell is longer."""
    widths = [min(most, max(map(len, column))) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def printable(text: str, instead: str = " ") -> str:
    """Return `text` with `instead` for each control character, which could move a terminal's cursor."""
    return "".join(c if c.isprintable() else instead for c in text)
