"""What is being verified: an artifact, and how to run a command inside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.artifacts import venv
from envbuild.artifacts.state import State, read_state
from envbuild.errors import UsageError
from envbuild.recipe.targets import Target

Command = Callable[[str, Sequence[str]], list[str]]


@dataclass(frozen=True, slots=True)
class Subject:
    """An artifact with all that verification asks of it.

    `root` is the folder to read files from, `command(program, arguments)` the command line that runs
    a program of the artifact on this host, `launch_environment` the variables to run it with.
    """

    path: Path
    root: Path
    site_packages: Path
    state: State
    target: Target
    command: Command
    launch_environment: Callable[[Mapping[str, str]], dict[str, str]]

    @property
    def roots(self) -> tuple[str, ...]:
        """The root as given and with links resolved: scripts find themselves by either."""
        return (os.fspath(self.root.absolute()), os.path.realpath(self.root))

    def relative(self, text: str) -> str:
        """`text` with paths as seen from the artifact's root: equal wherever the artifact stands."""
        for root in self.roots:
            text = text.replace(root + os.sep, "").replace(root, ".")
        return text

    def holds(self, path: str) -> bool:
        """Whether `path` lies inside the artifact; a link inside counts, wherever it points."""
        return os.path.abspath(path).startswith(tuple(root + os.sep for root in self.roots))


def open_subject(path: Path) -> Subject:
    """The artifact at `path`. Raises UsageError when there is none, HostError when it cannot run here."""
    state = read_state(path)
    if state is None:
        what = "is not an artifact of envbuild" if path.exists() else "does not exist"
        raise UsageError(
            f"{path} {what}", "give the folder that `envbuild venv` printed as its last line"
        )
    return venv_subject(path, state)


def venv_subject(path: Path, state: State) -> Subject:
    """The venv at `path` as a subject."""
    target = Target.parse(state.target)
    venv.probe(target)
    return Subject(
        path=path,
        root=path,
        site_packages=venv.site_packages(path, state.python),
        state=state,
        target=target,
        command=lambda program, arguments: venv.command(path, program, *arguments),
        launch_environment=lambda env: venv.launch_environment(path, env),
    )
