"""The options --quiet and --verbose, of envbuild and of the commands that build, plan or verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from envbuild.base.progress import display


def _say(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        display().verbosity = -1 if parameter.name == "quiet" else 1


def verbosity(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how much is printed to stderr."""
    settings: dict[str, Any] = {"is_flag": True, "expose_value": False, "is_eager": True, "callback": _say}
    quiet = click.option("-q", "--quiet", help="Print warnings and errors alone, and the result.", **settings)
    verbose = click.option("-v", "--verbose", help="Also print each program that envbuild starts.", **settings)
    return quiet(verbose(command))
