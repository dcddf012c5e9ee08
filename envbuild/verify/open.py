"""The artifact at a path as the subject of a verification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from envbuild.artifacts import conda, venv
from envbuild.artifacts.state import State, read_state
from envbuild.artifacts.survey import survey
from envbuild.artifacts.venv import site_packages
from envbuild.environment import Environment, load_environment
from envbuild.errors import UsageError
from envbuild.recipe.targets import Target
from envbuild.verify.file_subject import open_file_subject
from envbuild.verify.host import host_nodes
from envbuild.verify.image_file import is_image_file
from envbuild.verify.subject import Subject


def open_subject(
    path: Path, environment: Environment | None = None, runtime: str | None = None
) -> Subject:
    """The artifact at `path`: the folder of a venv or conda environment, or a .sqsh or .sif file, which is
    started by `runtime` (one of runtimes.NAMES; None: the best there is).

    Raises UsageError when there is none, HostError when it cannot run here.
    """
    if is_image_file(path):
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
    kind: _FolderKind = conda if state.artifact == conda.KIND else venv
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


class _FolderKind(Protocol):
    """What the modules of environments in folders have in common."""

    def probe(self, target: Target) -> None: ...
    def command(self, path: Path, program: str, *arguments: str) -> list[str]: ...
    def launch_environment(self, path: Path, env: Mapping[str, str]) -> dict[str, str]: ...
