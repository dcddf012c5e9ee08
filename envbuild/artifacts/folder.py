"""What the modules of environments in folders have in common: venv.py, conda.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from envbuild.artifacts.state import State
from envbuild.environment import Environment
from envbuild.layers.trainer import Trainer
from envbuild.plan.plan import Plan
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.artifacts.layers_in import LayerFolder


class FolderModule(Protocol):
    """What makes environments of one kind and starts programs in them. `python` is an interpreter's path or version,
    None for the recipe's version; for kinds that take one of this host."""

    def probe(self, target: Target) -> None:
        """Raise HostError when this host cannot hold one for `target`."""
        ...

    def is_current(self, path: Path, state: State, python: str | None = None) -> bool:
        """Whether the environment at `path` is what its `state` says, judged quickly."""
        ...

    def build(
        self, plan: Plan, trainer: Trainer, environment: Environment, staged: Path, final: Path, *,
        offline: bool, layers: Callable[[Path], Sequence[LayerFolder]], python: str | None = None,
    ) -> State:  # fmt: skip
        """Make the environment in the empty folder `staged`, for `final` as its place, and return its state."""
        ...

    def command(self, path: Path, program: str, *arguments: str) -> list[str]:
        """The command line that runs `program` (torchrun, python) inside the environment at `path`."""
        ...

    def launch_environment(self, path: Path, env: Mapping[str, str]) -> dict[str, str]:
        """The variables for running inside the environment at `path`."""
        ...
