"""The plan of an artifact of any kind, for commands that do not build it."""

from __future__ import annotations

from typing import Unpack

from envbuild.build.folder import prepare_folder
from envbuild.build.image import prepare_image
from envbuild.contract.kinds import Artifact, FolderArtifact
from envbuild.environment import Environment
from envbuild.lock.lifecycle import LockUse
from envbuild.plan import Plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target


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

    Raises the errors of that build, without `verify` those of a build without verification. Without `here`, it raises
    no error that depends on this host. `bytecode` is whether to look for the interpreter that compiles an image's
    bytecode.
    """
    if isinstance(kind, FolderArtifact):
        plan, _ = prepare_folder(kind, loaded, target, environment, here=here, verify=verify, **use)
    else:
        plan = prepare_image(loaded, target, environment, bytecode=bytecode, here=here, verify=verify, **use).plan
    return plan
