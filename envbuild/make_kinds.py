"""The kinds of environments that live in a folder: what `make.make_environment` asks of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from envbuild.artifacts import conda, venv
from envbuild.artifacts.state import State
from envbuild.environment import Environment
from envbuild.layers.trainer import Trainer
from envbuild.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Venv:
    """A virtual environment. `python` is an interpreter's path or version, None for the recipe's version."""

    plan: Plan
    trainer: Trainer
    environment: Environment
    python: str | None
    offline: bool

    def is_current(self, path: Path, state: State) -> bool:
        """See `make.Kind`."""
        return venv.is_current(path, state, self.python)

    def build(self, staged: Path, final: Path) -> State:
        """See `make.Kind`; the folder may be moved anywhere."""
        return venv.build(
            self.plan, self.trainer, self.environment, staged,
            python=self.python, offline=self.offline,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conda:
    """A conda environment."""

    plan: Plan
    trainer: Trainer
    environment: Environment
    offline: bool

    def is_current(self, path: Path, state: State) -> bool:
        """See `make.Kind`. An environment's files hold its path: one that was moved is built again."""
        return conda.is_current(path, state)

    def build(self, staged: Path, final: Path) -> State:
        """See `make.Kind`."""
        return conda.build(
            self.plan, self.trainer, self.environment, staged, final, offline=self.offline
        )
