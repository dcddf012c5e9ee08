"""`[verify]` of a recipe: the training, the imports and the command that verify an artifact."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from envbuild.base.errors import RecipeError
from envbuild.base.files import read_small
from envbuild.base.toml import Document, Problem, form, key, table_at

# A script's text is part of envbuild.json in the artifact and of its receipt.
_MOST_SCRIPT = 100_000
# A bound on the last value of a metric: "< 0.5".
BOUND = re.compile(r"(<=|>=|<|>) *([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)")
_module = form(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "is not the name of a module")


def _excepted_problem(text: str) -> str | None:
    return None if text == "*" else _module(text)


def _command_problem(text: str) -> str | None:
    """Return why `text` is no command line, or None."""
    try:
        return None if shlex.split(text) else "is empty"
    except ValueError as error:
        return f"{text!r} is no command line: {error}"


def _metric_problem(text: str) -> str | None:
    """Return why `text` is no regular expression for a number, or None."""
    try:
        groups = re.compile(text).groups
    except (re.error, OverflowError, RecursionError) as error:
        return f"{text[:80]!r} is no regular expression: {error}"
    return None if groups == 1 else f"{text!r} has {groups} groups; the number must be its only one, as in 'loss: (.+)'"


def _bound_problem(text: str) -> str | None:
    found = BOUND.fullmatch(text)
    try:
        good = found is not None and math.isfinite(float(found[2]))
    except ValueError:
        good = False
    return None if good else f"{text!r} is no bound, such as '< 0.5' or '>= 90'"


@dataclass(frozen=True)
class ExpectTable:
    """`[verify.expect]`: what the command of [verify] must leave behind."""

    exit_code: int = key(0, "The exit code on every node.", minimum=0, example=0)
    metric: str = key(
        "",
        "A regular expression whose only group is a number that rank 0 prints repeatedly.",
        check=_metric_problem,
        example="loss: ([0-9.e+-]+)",
    )
    trend: Literal["finite", "falls", "rises"] = key(
        "finite",
        "The metric's course from its first to its last value; `finite`: at least one value, all finite.",
        example="falls",
    )
    last: str = key("", "A bound that the metric's last value must keep.", check=_bound_problem, example="< 0.5")
    file: str = key(
        "",
        "A file that must exist and not be empty afterwards, relative to the folder the command starts in.",
        pattern=r"[^\0\n]*",
        example="out/model.pt",
    )


@dataclass(frozen=True)
class VerifyTable:
    """`[verify]`: the distributed training that verifies an artifact, and the checks of the user's own code."""

    nodes: int = key(2, "Nodes that train together.", minimum=1, example=2)
    nproc_per_node: int = key(2, "Processes on each node.", minimum=1, example=2)
    epochs: int = key(6, "Passes over the data.", minimum=1, example=6)
    batch_size: int = key(32, "Samples in a batch of one process.", minimum=1, example=32)
    model: Literal["linear", "mlp", "cnn"] = key("mlp", "The model that is trained.", example="mlp")
    timeout_s: int = key(600, "Seconds after which the run has failed.", minimum=1, example=600)
    loss_tolerance: float = key(
        1e-4, "Relative difference of losses that still counts as equal.", minimum=0, example=1e-4
    )
    busbw_floor: float = key(
        0.0,
        "GB/s of bus bandwidth that the largest all-reduce must reach. 0: measured, not judged.",
        minimum=0,
        example=40.0,
    )
    trainer: bool = key(True, "false: no training, for environments without torch.", example=True)
    imports: tuple[str, ...] = key(
        (),
        "Modules that every rank must be able to import, besides the top-level modules of the direct requirements.",
        check=_module,
        example=["transformers"],
    )
    imports_except: tuple[str, ...] = key(
        (),
        'Modules of direct requirements that are not imported; ["*"] for none of them.',
        check=_excepted_problem,
        example=["torchgen"],
    )
    command: str = key(
        "",
        "A command of your own, started by torchrun as every rank. No shell reads it.",
        check=_command_problem,
        example="python -m pkg.train --max-steps 20",
    )
    script: str = key(
        "",
        "A training script of your own and its arguments, started by torchrun as every rank. Its path is relative "
        "to the recipe's folder.",
        check=_command_problem,
        example="train.py --max-steps 20",
    )
    expect: ExpectTable = key(ExpectTable(), "What the command or the script must leave behind.")


# Keys that recipes had no digest for before they existed: with their defaults they stay out of it.
LATER = ("trainer", "imports", "imports_except", "command", "script", "expect")


def verify_mistakes(document: Document) -> Iterator[Problem]:
    """Yield keys of [verify] that exclude each other, and those of [verify.expect] that need another key."""
    verify, expect = table_at(document.data, "verify"), table_at(document.data, "verify", "expect")
    if verify.get("command") and verify.get("script"):
        yield ("verify", "script"), "[verify] has `command` and `script`: leave one of them out"
    if "expect" in verify and not (verify.get("command") or verify.get("script")):
        yield ("verify", "expect"), "[verify.expect] needs `command` or `script` in [verify]"
    for name in ("trend", "last"):
        if name in expect and not expect.get("metric"):
            yield ("verify", "expect", name), f"{name!r} in [verify.expect] needs `metric`"


def script_of(table: VerifyTable, document: Document) -> tuple[Path, str] | None:
    """Return the path and the text of the script of [verify], None without one.

    Raises RecipeError for a script that cannot be read. The text is kept in the artifact, so that `envbuild verify`
    needs no recipe.
    """
    if not table.script:
        return None
    path = document.path.parent / shlex.split(table.script)[0]
    where = f"{document.where('verify', 'script')}: 'script' in [verify]"
    try:
        text = read_small(path).decode()
    except OSError as error:
        raise RecipeError(f"{where}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where}: {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if len(text) > _MOST_SCRIPT:
        raise RecipeError(
            f"{where}: {path} has {len(text)} characters, and at most {_MOST_SCRIPT} are kept in an artifact",
            "install it as [project], and start it by `command`",
        )
    return path, text


def expect_of(table: Mapping[str, Any]) -> ExpectTable:
    """Return the [verify.expect] table from plain data; unknown keys, of a newer envbuild, are ignored."""
    known = {field.name for field in fields(ExpectTable)}
    return ExpectTable(**{name: value for name, value in table.items() if name in known})
