"""The kinds of artifacts, one module each. A new one is its module and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envbuild.kinds.apptainer import APPTAINER
from envbuild.kinds.base import Artifact
from envbuild.kinds.conda import CONDA
from envbuild.kinds.docker import DOCKER
from envbuild.kinds.enroot import ENROOT
from envbuild.kinds.venv import VENV

ARTIFACTS: Mapping[str, Artifact] = {
    one.name: one for one in (VENV, CONDA, DOCKER, ENROOT, APPTAINER)
}


def kinds_of(*forms: str) -> tuple[str, ...]:
    """Return the names of the kinds of these forms, in the table's order."""
    return tuple(name for name, one in ARTIFACTS.items() if one.form in forms)


def kind_at(path: Path) -> Artifact | None:
    """Return the kind of the artifact at `path`, None where there is none. Raises BuildError for a damaged one."""
    return next((one for one in ARTIFACTS.values() if one.holds(path)), None)
