"""The settings of a verification: `[verify]` of a recipe, as the state, the receipt and the verification have them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar

from envbuild.base.toml import form, internal, key

# A bound on the last value of a metric: "< 0.5".
BOUND = re.compile(r"(<=|>=|<|>) *([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)")
_module = form(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "is not the name of a module")


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
    match = BOUND.fullmatch(text)
    try:
        good = match is not None and math.isfinite(float(match[2]))
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
class Thoroughness:
    """The thoroughness of a verification: `quick` for one short launch, `faults` to also test the restart of a rank."""

    faults: bool = internal(False)
    quick: bool = internal(False)


FULL = Thoroughness()


@dataclass(frozen=True)
class VerifySettings(Thoroughness):
    """The distributed training that verifies an artifact, and the checks of the user's own code.

    The first fields are the keys of [verify]. The plan adds facts of the recipe: `direct` are the normalised names of
    the packages that it requires itself, `script_text` is the text of its `script`, and `gpus` are the GPUs of the
    target, or else the site's. A run adds its thoroughness, and `wanted_nproc_per_node`, the recipe's number where this
    host has fewer GPUs than that, else 0.
    """

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
        check=lambda text: None if text == "*" else _module(text),
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

    direct: tuple[str, ...] = internal(())
    script_text: str = internal("")
    gpus: tuple[str, ...] = internal(())
    wanted_nproc_per_node: int = internal(0)

    @property
    def first_epochs(self) -> int:
        """The epochs of the first launch; the second launch continues from its snapshot."""
        return max(1, self.epochs // 2)

    def as_state(self) -> dict[str, Any]:
        """Return the keys of [verify] and the facts of the plan as plain data for envbuild.json.

        Without a script or GPUs it has no key for them, so that images of such recipes keep their digests.
        """
        data = {name: value for name, value in asdict(self).items() if name not in _OF_RUN}
        if not self.script_text:
            del data["script"], data["script_text"]
        if not self.gpus:
            del data["gpus"]
        return data

    def override(self, options: Mapping[str, Any]) -> VerifySettings:
        """Return these settings with `options` that are not None."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})

    def covers(self, other: VerifySettings) -> bool:
        """Return whether a verification by these settings is at least as thorough as one by `other`."""
        same = _SAME_QUICK if other.quick else _SAME
        if any(getattr(self, name) != getattr(other, name) for name in same):
            return False
        # On a host with fewer GPUs than the recipe has ranks, the next verification would have as few.
        ranks = self.nodes * max(self.nproc_per_node, self.wanted_nproc_per_node)
        return other.quick or (
            set(self.gpus) >= set(other.gpus)
            and self.nodes >= other.nodes
            and ranks >= other.nodes * other.nproc_per_node
            and self.epochs >= other.epochs
            and self.loss_tolerance <= other.loss_tolerance
            and self.busbw_floor >= other.busbw_floor
            and (self.faults or not other.faults)
            and not self.quick
        )


# Settings that must be equal for one verification to stand for another, and those for one by --verify quick.
_SAME_QUICK = ("trainer", "imports", "imports_except", "direct")
_SAME = (*_SAME_QUICK, "command", "expect", "script", "script_text", "model")
# Settings that every state and receipt has.
_REQUIRED = ("nodes", "nproc_per_node", "epochs", "loss_tolerance", "model", "trainer")
# Settings of one run, which are not in the state.
_OF_RUN = ("faults", "quick", "wanted_nproc_per_node")


def parse_settings(table: object) -> VerifySettings:
    """Return the settings from the plain data of a state or a receipt; keys of a newer envbuild are ignored.

    Raises ValueError for a value of another type, and without a key for the thoroughness of the verification.
    """
    if not isinstance(table, dict):
        raise ValueError(f"the verification's settings are {table!r:.100}")
    if missing := [name for name in _REQUIRED if name not in table]:
        raise ValueError(f"the verification's settings lack {', '.join(missing)}")
    return _parse(VerifySettings(), table)


Settings = TypeVar("Settings", VerifySettings, ExpectTable)


def _parse(default: Settings, table: Mapping[str, Any]) -> Settings:
    """Return a copy of `default` with the values of `table`."""
    values: dict[str, Any] = {}
    for field in fields(default):
        if field.name not in table:
            continue
        value, old = table[field.name], getattr(default, field.name)
        if isinstance(old, ExpectTable) and isinstance(value, dict):
            value = _parse(old, value)
        elif (
            isinstance(old, tuple) and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        ):
            value = tuple(value)
        elif isinstance(old, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(old):
            raise ValueError(f"{field.name!r} of the verification's settings is {value!r:.100}")
        values[field.name] = value
    return replace(default, **values)
