"""Common parts of environments in folders, which venv.py and conda.py build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from envbuild.artifacts.state import State
from envbuild.environment import Environment
from envbuild.errors import BuildError, HostError
from envbuild.layers.trainer import NAME, Trainer
from envbuild.plan.plan import Plan
from envbuild.recipe.targets import Target, host_arch

if TYPE_CHECKING:
    from envbuild.artifacts.layers_in import LayerFolder


class FolderModule(Protocol):
    """A module that builds environments of one kind, called TITLE, and starts programs in them.

    `python` is the path or version of an interpreter of this host, None for the recipe's version; kinds that
    contain their own interpreter ignore it.
    """

    TITLE: str

    def is_current(self, path: Path, state: State, python: str | None = None) -> bool:
        """Return whether the environment at `path` matches its `state`, by a quick check."""
        ...

    def build(
        self, plan: Plan, trainer: Trainer, environment: Environment, staged: Path, final: Path, *,
        offline: bool, layers: Callable[[Path], Sequence[LayerFolder]], python: str | None = None,
    ) -> State:  # fmt: skip
        """Build the environment in the empty folder `staged` for the final path `final`, and return its state."""
        ...

    # The command line of a program (torchrun, python) in the environment at `path`, and its variables.
    def command(self, path: Path, program: str, *arguments: str) -> list[str]: ...
    def launch_environment(self, path: Path, env: Mapping[str, str]) -> dict[str, str]: ...


def check_host(title: str, target: Target) -> None:
    """Raise HostError when a `title` for `target` cannot be built on this host."""
    if target.arch != host_arch():
        raise HostError(
            f"a {title} for {target.name} cannot be built on this {host_arch()} host: its Python runs in it",
            f"run envbuild on an {target.arch} node (a job on the cluster), or choose a target for "
            f"{host_arch()} with --target",
        )


def interpreter(path: Path) -> Path:
    """Return the python of the environment at `path`."""
    return path / "bin" / "python"


def site_packages(path: Path, python: str) -> Path:
    """Return the site-packages folder of the environment at `path` with Python `python` ("3.11")."""
    return path / "lib" / f"python{python}" / "site-packages"


def check_installed(plan: Plan, trainer: Trainer, layers: Sequence[LayerFolder], found: Mapping[str, str]) -> None:
    """Raise BuildError when the distributions `found` (name → version) are not those of plan, layers and trainer."""
    wanted = {package.name: package.version for package in plan.packages}
    wanted |= {name: version for layer in layers for name, version in layer.distributions}
    wanted[NAME] = trainer.version
    wrong = sorted(
        f"{name}: locked {wanted.get(name, 'nothing')}, installed {found.get(name, 'nothing')}"
        for name in wanted.keys() | found.keys()
        if wanted.get(name) != found.get(name)
    )
    if wrong:
        raise BuildError("the installed packages differ from the lock:\n  " + "\n  ".join(wrong))
