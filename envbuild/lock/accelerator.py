"""The field's most reported trap: a CPU target that resolved to CUDA, a CUDA target to a CPU torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from envbuild.errors import LockError
from envbuild.lock.format import LockedPackage
from envbuild.recipe.targets import Target

# Projects that only a GPU build of torch depends on; wheels named nvidia-* carry the CUDA libraries.
_GPU_ONLY = ("triton", "pytorch-triton", "cuda-bindings", "cuda-toolkit", "cuda-pathfinder")


def check_accelerator(target: Target, packages: Iterable[LockedPackage], source: str) -> None:
    """Raise LockError when the build of torch in `packages` is not one for `target`'s accelerator.

    A wheel's build is known from its local version (`+cpu`, `+cu126`: download.pytorch.org's
    names) and from the CUDA packages that it pulls in (the builds on the default index).
    """
    locked = list(packages)
    torch = next((p for p in locked if p.name == "torch"), None)
    if torch is None:
        return
    local = torch.version.partition("+")[2]
    gpu = sorted(
        f"{p.name}=={p.version}"
        for p in locked
        if p.name.startswith("nvidia-") or p.name in _GPU_ONLY
    )
    if not target.is_cuda and (gpu or local.startswith(("cu", "rocm", "xpu"))):
        seen = f"{len(gpu)} GPU packages ({', '.join(gpu[:4])}{', …' if len(gpu) > 4 else ''})"
        raise LockError(
            f"{source}: target {target.name} is for CPUs, but torch=={torch.version} is a GPU build"
            + (f" and brings {seen}" if gpu else ""),
            _CPU_HINT.format(arch=target.arch),
        )
    if target.is_cuda and not gpu and not local.startswith("cu"):
        raise LockError(
            f"{source}: target {target.name} needs CUDA, but torch=={torch.version} is a CPU-only build",
            f"pin torch==VERSION+{target.accelerator} in [targets.{target.name}] and name the index "
            f"https://download.pytorch.org/whl/{target.accelerator} there",
        )
    built = local if local.startswith("cu") else _of_runtime(locked)
    if target.is_cuda and built not in (None, target.accelerator):
        raise LockError(
            f"{source}: target {target.name} resolved to torch=={torch.version}, built for another CUDA ({built})",
            f"pin torch==VERSION+{target.accelerator} in [targets.{target.name}] and name the index "
            f"https://download.pytorch.org/whl/{target.accelerator} there, or make it a target of {built}",
        )


def _of_runtime(packages: Iterable[LockedPackage]) -> str | None:
    """`cu126` where torch's wheel from the default index pins the runtime of CUDA 12.6; None where nothing tells."""
    for package in packages:
        if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", package.name):
            major, _, rest = package.version.partition(".")
            return f"cu{major}{rest.partition('.')[0]}"
    return None


_CPU_HINT = (
    "pin torch==VERSION+cpu in the target and name the index https://download.pytorch.org/whl/cpu there"
    " (on {arch}, releases whose plain wheel is CPU-only also do; see docs/reference/recipe.md)"
)
