"""What is being verified: an artifact, how to look into it, and how to run nodes of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from envbuild.artifacts import conda, venv
from envbuild.artifacts.state import State, read_state
from envbuild.artifacts.survey import Survey, survey
from envbuild.artifacts.venv import site_packages
from envbuild.environment import Environment, load_environment
from envbuild.errors import UsageError
from envbuild.recipe.targets import Target
from envbuild.verify.host import host_nodes
from envbuild.verify.nodes import Nodes, OpenNodes


@dataclass(frozen=True, slots=True)
class Subject:
    """An artifact with all that verification asks of it.

    `root` is the environment's folder as its own processes see it. `alone` tells that they see nothing
    but the artifact (a container), so that every path is part of it. `kind` is the artifact's for the receipt
    where it differs from the state's (one state serves every kind of image). `digest` names the content,
    `runtime` what runs it, `nodes` opens the places where torchrun is started.
    """

    path: Path
    root: Path
    state: State
    target: Target
    digest: str
    runtime: str
    survey: Callable[[Nodes], Survey]
    nodes: OpenNodes
    alone: bool = False
    kind: str = ""

    @property
    def roots(self) -> tuple[str, ...]:
        """The root as given and with links resolved: scripts find themselves by either."""
        given = os.fspath(self.root.absolute())
        return (given,) if self.alone else (given, os.path.realpath(self.root))

    def relative(self, text: str) -> str:
        """`text` with paths as seen from the artifact's root: equal wherever the artifact stands."""
        for root in self.roots:
            text = text.replace(root + os.sep, "").replace(root, ".")
        return text

    def holds(self, path: str) -> bool:
        """Whether `path` lies inside the artifact; a link inside counts, wherever it points."""
        inside = tuple(root + os.sep for root in self.roots)
        return self.alone or os.path.abspath(path).startswith(inside)


def open_subject(
    path: Path, environment: Environment | None = None, runtime: str | None = None
) -> Subject:
    """The artifact at `path`: the folder of a venv or conda environment, or a .sqsh or .sif file, which is
    started by `runtime` (one of runtimes.NAMES; None: the best there is).

    Raises UsageError when there is none, HostError when it cannot run here.
    """
    from envbuild.verify.image_file import is_image_file

    if is_image_file(path):
        from envbuild.verify.file_subject import open_file_subject

        return open_file_subject(path, environment or load_environment(), runtime)
    if runtime is not None:
        raise UsageError(f"{path} is no .sqsh or .sif file: it has no runtime to choose")
    state = None if path.is_file() else read_state(path)
    if state is None:
        what = "is not an artifact of envbuild" if path.exists() else "does not exist"
        raise UsageError(
            f"{path} {what}",
            "give the folder or file that envbuild printed as its last line",
        )
    return folder_subject(path, state)


def folder_subject(path: Path, state: State) -> Subject:
    """The environment in the folder `path` as a subject: a venv or a conda environment.

    Raises HostError when it cannot run here.
    """
    target = Target.parse(state.target)
    kind: _Kind = conda if state.artifact == conda.KIND else venv
    kind.probe(target)
    return Subject(
        path=path,
        root=path,
        state=state,
        target=target,
        digest=state.digest,
        runtime="host",
        survey=lambda _: survey(path, site_packages(path, state.python), target.elf_machine),
        nodes=lambda work, _, env: host_nodes(
            work,
            lambda program, arguments: kind.command(path, program, *arguments),
            kind.launch_environment(path, env),
        ),
    )


class _Kind(Protocol):
    """What the modules of environments in folders have in common."""

    def probe(self, target: Target) -> None: ...
    def command(self, path: Path, program: str, *arguments: str) -> list[str]: ...
    def launch_environment(self, path: Path, env: Mapping[str, str]) -> dict[str, str]: ...
