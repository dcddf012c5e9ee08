"""Artifacts of every kind on this host: the kind at a path, its module, its state.

Modules of one form are imported on use: a build of an environment imports none about images.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.contract.kinds import (
    ARTIFACTS,
    Artifact,
    BuiltArtifact,
    FileArtifact,
    FolderArtifact,
    folder_kind,
    read_folder,
)
from envbuild.contract.state import PREFIX

if TYPE_CHECKING:
    from envbuild.build.installing import FolderModule


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
    from envbuild.image.sif import content_digest
    from envbuild.verify.image_file import image_state, open_image_file

    state = image_state(open_image_file(path))
    return BuiltArtifact(state, content_digest(path), f"/{PREFIX}/bin/python")
