"""The kinds of environments that live in a folder: the plan of each, and what `make.make_environment` asks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.artifacts import conda, venv
from envbuild.artifacts.state import State
from envbuild.environment import Environment
from envbuild.errors import UsageError
from envbuild.layers.trainer import Trainer
from envbuild.locks import has_wheels
from envbuild.make import prepare
from envbuild.make_checks import RequestedLayers, check_here
from envbuild.make_layers import ahead, build_layers, declared, on_host
from envbuild.plan.plan import Plan
from envbuild.progress import say as to_stderr
from envbuild.recipe.find import command_word
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.artifacts.layers_in import LayerFolder

Say = Callable[[str], None]
_PROBES = {venv.KIND: venv.probe, conda.KIND: conda.probe}


def prepare_folder(
    kind: str,
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    locked: bool,
    offline: bool,
    say: Say,
    compile_bytecode: bool = False,
    write: bool = True,
    here: bool = True,
) -> tuple[Plan, Trainer]:
    """The plan of an environment of `kind` (venv, conda), and its trainer; see `make.prepare`.

    Raises UsageError where there is none of this kind of the recipe, HostError where it is to be built `here` and this
    host cannot.
    """
    if here:
        _PROBES[kind](target)
    if kind == venv.KIND and not has_wheels(loaded, target):
        raise UsageError(
            f"recipe {loaded.recipe.name} has conda packages and no requirements, so there is no venv of it",
            f"build it with `envbuild conda {command_word(loaded)}`",
        )
    layers = on_host(loaded, target, environment) if here else declared(loaded, target)
    plan, trainer = prepare(
        loaded, target, environment, artifact=kind, locked=locked, offline=offline, say=say,
        compile_bytecode=compile_bytecode, conda=kind == conda.KIND, layers=layers, write=write,
    )  # fmt: skip
    if here:
        check_here(RequestedLayers(plan.sources, plan.host_layers), environment)
    return plan, trainer


@dataclass(frozen=True, slots=True)
class Venv:
    """A virtual environment. `python` is an interpreter's path or version, None for the recipe's version."""

    plan: Plan
    trainer: Trainer
    environment: Environment
    python: str | None
    offline: bool
    say: Say = to_stderr

    def is_current(self, path: Path, state: State) -> bool:
        """See `make.Kind`."""
        return venv.is_current(path, state, self.python)

    def build(self, staged: Path, final: Path) -> State:
        """See `make.Kind`; the folder may be moved anywhere."""
        return venv.build(
            self.plan, self.trainer, self.environment, staged,
            python=self.python, offline=self.offline,
            layers=_layers(self.plan, self.environment, self.say, self.offline),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conda:
    """A conda environment."""

    plan: Plan
    trainer: Trainer
    environment: Environment
    offline: bool
    say: Say = to_stderr

    def is_current(self, path: Path, state: State) -> bool:
        """See `make.Kind`. An environment's files hold its path: one that was moved is built again."""
        return conda.is_current(path, state)

    def build(self, staged: Path, final: Path) -> State:
        """See `make.Kind`."""
        return conda.build(
            self.plan, self.trainer, self.environment, staged, final, offline=self.offline,
            layers=_layers(self.plan, self.environment, self.say, self.offline),
        )  # fmt: skip


def _layers(
    plan: Plan, environment: Environment, say: Say, offline: bool
) -> Callable[[Path], Sequence[LayerFolder]]:
    """What gives the layers of `plan` to an environment whose interpreter it is told: Python projects are compiled
    against its packages. All others are built now, so that what fails does so early."""
    declared = RequestedLayers(plan.sources, plan.host_layers)
    first = build_layers(ahead(declared), plan.folder, environment, say, offline=offline)
    if len(first) == len(declared.sources):
        return lambda python: first
    return lambda python: build_layers(
        declared, plan.folder, environment, say, offline=offline, python=python
    )
