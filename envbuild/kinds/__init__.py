"""The kinds of artifacts, one module each. A new kind is a new module and an entry in ARTIFACTS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from envbuild.kinds.apptainer import APPTAINER
from envbuild.kinds.base import Artifact, FolderArtifact
from envbuild.kinds.conda import CONDA
from envbuild.kinds.docker import DOCKER
from envbuild.kinds.enroot import ENROOT
from envbuild.kinds.venv import VENV

if TYPE_CHECKING:
    from envbuild.environment import Environment
    from envbuild.lock.lifecycle import LockUse
    from envbuild.plan.plan import Plan
    from envbuild.recipe.load import LoadedRecipe
    from envbuild.recipe.targets import Target

ARTIFACTS: Mapping[str, Artifact] = {one.name: one for one in (VENV, CONDA, DOCKER, ENROOT, APPTAINER)}


def kinds_of(*forms: str) -> tuple[str, ...]:
    """Return the names of the kinds whose form is one of `forms`, in the order of ARTIFACTS."""
    return tuple(name for name, one in ARTIFACTS.items() if one.form in forms)


def kind_at(path: Path) -> Artifact | None:
    """Return the kind of the artifact at `path`, None when there is none. Raises BuildError for a damaged one."""
    return next((one for one in ARTIFACTS.values() if one.holds(path)), None)


def plan_of(
    kind: Artifact,
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    here: bool = True,
    bytecode: bool = True,
    verify: bool = True,
    **use: Unpack[LockUse],
) -> Plan:
    """Return the plan of an artifact of `kind`, as its build makes it.

    Raises the errors of that build; without `verify`, those of a build without verification; without `here`,
    none that depend on this host. `bytecode` says whether to look for the interpreter that compiles an image's
    bytecode.
    """
    from envbuild.verify.static_checks import check_torch

    if isinstance(kind, FolderArtifact):
        from envbuild.kinds.folder import prepare_folder

        plan, _ = prepare_folder(kind, loaded, target, environment, here=here, **use)
    else:
        from envbuild.kinds.image import prepare_image

        plan = prepare_image(loaded, target, environment, bytecode=bytecode, here=here, **use).plan
    check_torch(loaded, plan, verify=verify)
    return plan
