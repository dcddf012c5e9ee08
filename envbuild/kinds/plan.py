"""The plan of an artifact of any kind, with nothing written: what `envbuild plan` shows and `envbuild matrix` asks."""

from __future__ import annotations

from collections.abc import Callable

from envbuild.environment import Environment
from envbuild.kinds.base import Artifact, FolderArtifact
from envbuild.plan.plan import Plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target


def plan_of(
    kind: Artifact,
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    locked: bool,
    offline: bool,
    say: Callable[[str], None],
    here: bool = True,
    bytecode: bool = True,
    verify: bool = True,
) -> Plan:
    """The plan of an artifact of `kind`, as its build makes it.

    Raises what the build raises, which verifies it if `verify`; where it is not `here`, nothing that depends on this
    host. Without `bytecode` no interpreter is looked for, which an image's bytecode needs.
    """
    from envbuild.verify.needs_torch import check_torch

    if isinstance(kind, FolderArtifact):
        from envbuild.kinds.folder import prepare_folder

        plan, _ = prepare_folder(
            kind, loaded, target, environment, locked=locked, offline=offline, say=say,
            write=False, here=here,
        )  # fmt: skip
    else:
        from envbuild.kinds.image import prepare_image

        plan = prepare_image(
            loaded, target, environment, locked=locked, offline=offline, bytecode=bytecode, say=say,
            write=False, here=here,
        ).plan  # fmt: skip
    check_torch(loaded, plan, verify=verify)
    return plan
