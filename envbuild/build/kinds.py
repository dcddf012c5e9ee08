"""Artifacts of every kind on this host: the kind at a path, its state, its verification, its plan.

Modules of one form are imported on use: a build of an environment imports none about images.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.base.errors import UsageError
from envbuild.contract.kinds import (
    ARTIFACTS,
    Artifact,
    BuiltArtifact,
    FileArtifact,
    FolderArtifact,
    folder_kind,
    read_folder,
)

if TYPE_CHECKING:
    from envbuild.build.installing import FolderModule
    from envbuild.environment import Environment
    from envbuild.verify.model import Subject


def folder_module(kind: FolderArtifact) -> FolderModule:
    """Return the module of this package that builds and starts environments of this kind; it has the kind's name."""
    module: FolderModule = importlib.import_module(f"envbuild.build.{kind.name}")
    return module


def kind_at(path: Path) -> Artifact | None:
    """Return the kind of the artifact at `path`, None without one. Raises BuildError for a damaged artifact."""
    if (folder := folder_kind(path)) is not None:
        return folder
    from envbuild.verify.image_file import image_kind

    kind = ARTIFACTS.get(image_kind(path) or "")
    return kind if isinstance(kind, FileArtifact) else None


def read_artifact(path: Path) -> BuiltArtifact:
    """Return the environment or the image file at `path`. Raises UsageError when envbuild did not build it."""
    if (environment := read_folder(path)) is not None:
        return environment
    from envbuild.contract.state import PREFIX
    from envbuild.image.sif import content_digest
    from envbuild.verify.image_file import image_state, open_image_file

    state = image_state(open_image_file(path))
    return BuiltArtifact(state, content_digest(path), f"/{PREFIX}/bin/python")


def subject_at(path: Path, kind: Artifact, environment: Environment, runtime: str | None) -> Subject:
    """Return the artifact of `kind` at `path` as the subject of a verification.

    `runtime` starts it, None for the best one on this host. Raises UsageError when envbuild did not build it or it has
    no such runtime, HostError when it cannot run here.
    """
    if isinstance(kind, FolderArtifact):
        from envbuild.verify.host import folder_subject

        if runtime is not None:
            raise UsageError(f"{path} is no .sqsh or .sif file: it has no runtime to choose")
        return folder_subject(path, read_artifact(path).state, folder_module(kind), environment)
    from envbuild.verify.image_runtime import open_file_subject

    return open_file_subject(path, environment, runtime)
