"""`[layers.nccl]` with NCCL from PyPI: a newer wheel replaces the one that torch pins.

torch's libtorch_cuda finds libnccl.so.2 by its DT_RPATH, in nvidia/nccl/lib beside torch. LD_LIBRARY_PATH
therefore does not select another NCCL, but another wheel of the same distribution does.
"""

from __future__ import annotations

from dataclasses import replace

from envbuild.errors import LockError
from envbuild.lock.format import Lock
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target


def nccl_package(target: Target) -> str:
    """Return the distribution with NCCL for a CUDA target: `nvidia-nccl-cu12` (NVIDIA's names on PyPI)."""
    return f"{target.family.nccl_wheel}{target.accelerator[:4]}"


def nccl_override(recipe: LoadedRecipe, target: Target) -> str | None:
    """Return the pin that overrides torch's own in a resolution for `target`, or None if the recipe requests none."""
    version = recipe.nccl_wheel(target)
    return None if version is None else f"{nccl_package(target)}=={version}"


def check_override(recipe: LoadedRecipe, target: Target, pinned: Lock) -> None:
    """Raise LockError when [layers.nccl] cannot replace the NCCL in `pinned`, the resolution without an override.

    That is the case when torch takes no NCCL from PyPI, and when the override is older than torch's pin: torch
    may call functions that an older NCCL lacks.
    """
    from packaging.version import InvalidVersion, Version

    wanted = recipe.nccl_wheel(target)
    assert wanted is not None
    name, where = nccl_package(target), recipe.where("layers", "nccl")
    torch = next((p.version for p in pinned.packages if p.name == "torch"), None)
    own = next((p.version for p in pinned.packages if p.name == name), None)
    if own is None:
        what = f"torch=={torch} brings no {name}" if torch else f"nothing here depends on {name}"
        raise LockError(
            f"{where}: NCCL {wanted} cannot replace anything for {target.name}: {what}",
            "NCCL is inside that wheel or the base image; choose a torch that pins it, or take [layers.nccl] out",
        )
    try:
        older = Version(wanted) < Version(own)
    except InvalidVersion:
        raise LockError(
            f"{where}: {wanted!r} is not a version of {name}", f"write it as PyPI does, for example {own}"
        ) from None
    if older:
        raise LockError(
            f"{where}: NCCL {wanted} is older than {own}, which torch=={torch} pins",
            f'version = "{own}" or newer; without [layers.nccl] it is {own}',
        )


def free_of(keep: Lock | None, target: Target) -> Lock | None:
    """Return `keep` without NCCL, whose version the override decides."""
    if keep is None:
        return None
    name = nccl_package(target)
    return replace(keep, packages=tuple(p for p in keep.packages if p.name != name))
