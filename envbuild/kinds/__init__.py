"""The kinds of artifacts. A new kind is a new entry in ARTIFACTS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from envbuild.kinds.base import Artifact, FileArtifact, FolderArtifact, RegistryArtifact

if TYPE_CHECKING:
    from envbuild.environment import Environment
    from envbuild.lock.state import LockUse
    from envbuild.plan.plan import Plan
    from envbuild.recipe.load import LoadedRecipe
    from envbuild.recipe.targets import Target

_IMAGE_SOURCES = ("package index", "Debian's archive")
_FILE_IMPORTS = ("deflate", "zstandard", "isal", "lz4", "pysequoia", "requests")

VENV = FolderArtifact(
    name="venv",
    help="Build a verified virtual environment.",
    default_name="venv",
    sources=("package index",),
    imports=("requests",),
    states=("image",),  # the state of an image, seen from inside it
)
CONDA = FolderArtifact(
    name="conda",
    help="Build a verified conda environment, without conda.",
    default_name="conda",
    of_conda=True,
    sources=("conda-forge",),
    imports=("rattler", "zstandard", "requests"),
    by_uv=False,
)
DOCKER = RegistryArtifact(
    name="docker",
    help="Build a verified container image, without a daemon or root.",
    default_name="docker",
    sources=_IMAGE_SOURCES,
    imports=("deflate", "zstandard", "isal", "pysequoia", "requests"),
)
ENROOT = FileArtifact(
    name="enroot",
    help="Build a verified squashfs image for enroot and pyxis, without root.",
    default_name="{recipe}.sqsh",
    sources=_IMAGE_SOURCES,
    imports=_FILE_IMPORTS,
    starters=("enroot",),
    containers=("pyxis", "enroot"),
)
APPTAINER = FileArtifact(
    name="apptainer",
    help="Build a verified SIF image for Apptainer, without it or root.",
    default_name="{recipe}.sif",
    sources=_IMAGE_SOURCES,
    imports=_FILE_IMPORTS,
    starters=("apptainer", "singularity"),
    containers=("apptainer",),
)
ARTIFACTS: Mapping[str, Artifact] = {one.name: one for one in (VENV, CONDA, DOCKER, ENROOT, APPTAINER)}


def kinds_of(*forms: str) -> tuple[str, ...]:
    """Return the names of the kinds whose form is one of `forms`, in the order of ARTIFACTS."""
    return tuple(name for name, one in ARTIFACTS.items() if one.form in forms)


def kind_at(path: Path) -> Artifact | None:
    """Return the kind of the artifact at `path`, None when there is none. Raises BuildError for a damaged one."""
    return next((one for one in ARTIFACTS.values() if one.holds(path)), None)


def plan_of(
    kind: Artifact, loaded: LoadedRecipe, target: Target, environment: Environment, *,
    here: bool = True, bytecode: bool = True, verify: bool = True, **use: Unpack[LockUse],
) -> Plan:  # fmt: skip
    """Return the plan of an artifact of `kind`, as its build makes it.

    Raises the errors of that build; without `verify`, those of a build without verification; without `here`, none that
    depend on this host. `bytecode` says whether to look for the interpreter that compiles an image's bytecode.
    """
    from envbuild.verify.needs_torch import check_torch

    if isinstance(kind, FolderArtifact):
        from envbuild.kinds.folder import prepare_folder

        plan, _ = prepare_folder(kind, loaded, target, environment, here=here, **use)
    else:
        from envbuild.kinds.image import prepare_image

        plan = prepare_image(loaded, target, environment, bytecode=bytecode, here=here, **use).plan
    check_torch(loaded, plan, verify=verify)
    return plan
