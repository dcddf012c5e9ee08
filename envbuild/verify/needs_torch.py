"""Refuse artifacts without torch before they are built: verification trains with torch."""

from __future__ import annotations

from pathlib import Path

from envbuild.artifacts.state import IMAGE, State
from envbuild.errors import RecipeError, UsageError
from envbuild.plan.plan import Plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target, host_arch


def check_torch(loaded: LoadedRecipe, plan: Plan, *, verify: bool) -> None:
    """Raise RecipeError when the artifact of `plan` is to be verified and its locks lack torch.

    Raises UsageError for a virtual environment of a recipe that takes torch from its base image. Images for
    another architecture pass, because they are not verified on this host.
    """
    if plan.has_torch:
        return
    name, base = loaded.recipe.name, loaded.recipe.image.base
    if plan.image is None and not plan.conda and base != "debian":
        raise UsageError(
            f"recipe {name} takes torch from {base}; a virtual environment would be without it",
            f"build it with `envbuild docker {name}`",
        )
    foreign = plan.image is not None and Target.parse(plan.target).arch != host_arch()
    if not verify or foreign:
        return
    raise RecipeError(
        f"{loaded.path}: an artifact for {plan.target} cannot be verified: its lock has no torch, and verification "
        "trains with torch",
        f"add torch to {'[conda] dependencies' if plan.conda else '`requirements`'}, or build without verification: "
        "--no-verify",
    )


def check_built_torch(state: State, path: Path) -> None:
    """Raise UsageError when the environment at `path` has no torch. Images pass: their base may bring torch."""
    names = {name for name, _, _ in state.packages}
    if state.artifact != IMAGE and not names & {"torch", "pytorch"}:
        raise UsageError(
            f"{path} cannot be verified: it has no torch, and verification trains with torch",
            f"add torch to the recipe {state.recipe} and build it again",
        )
