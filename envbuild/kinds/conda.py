"""Conda environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.kinds.base import FolderArtifact


@dataclass(frozen=True, slots=True)
class CondaArtifact(FolderArtifact):
    """A conda environment; jobs set the variables that its activation sets."""

    def job_variables(self, path: str) -> Mapping[str, str]:
        from envbuild.artifacts.conda_activate import set_variables

        return set_variables(Path(path))


CONDA = CondaArtifact(
    name="conda",
    help="Build a verified conda environment, without conda.",
    place="conda",
    of_conda=True,
    sources=("conda-forge",),
    imports=("rattler", "zstandard", "requests"),
    by_uv=False,
)
