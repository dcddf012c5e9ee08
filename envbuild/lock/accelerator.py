"""Check of torch's build against the target's accelerator.

The most reported failure of PyTorch locks is a CPU target that resolves to a CUDA build, or a CUDA target that
resolves to a CPU build.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from envbuild.errors import LockError
from envbuild.lock.format import LockedPackage
from envbuild.recipe.accelerators import accelerator_of, gpu_families, torch_index
from envbuild.recipe.targets import Target


def check_accelerator(target: Target, packages: Iterable[LockedPackage], source: str) -> None:
    """Raise LockError when the torch build in `packages` does not match `target`'s accelerator.

    The build follows from the wheel's local version (`+cpu`, `+cu126`: the naming of download.pytorch.org) and from
    the CUDA packages that it depends on (builds on the default index have no local version).
    """
    locked, wanted, families = list(packages), target.family, gpu_families()
    torch = next((p for p in locked if p.name == "torch"), None)
    if torch is None:
        return
    local = torch.version.partition("+")[2]
    gpu = sorted(f"{p.name}=={p.version}" for p in locked if any(re.fullmatch(one.wheels, p.name) for one in families))
    # Local versions `+cu126`, `+rocm6.4`, and `+xpu`, for which envbuild has no targets.
    named = local.startswith(("xpu", *(one.usual[0].rstrip(".0123456789") for one in families)))
    if not wanted.gpu and (gpu or named):
        seen = f"{len(gpu)} GPU packages ({', '.join(gpu[:4])}{', …' if len(gpu) > 4 else ''})"
        raise LockError(
            f"{source}: target {target.name} is for CPUs, but torch=={torch.version} is a GPU build"
            + (f" and brings {seen}" if gpu else ""),
            _CPU_HINT.format(arch=target.arch),
        )
    pin = (
        f"pin torch==VERSION+{target.accelerator} in {target.table} and name the index "
        f"{torch_index(target.accelerator)} there"
    )
    if wanted.gpu and not gpu and not named:
        raise LockError(
            f"{source}: target {target.name} needs {wanted.title}, but torch=={torch.version} is a CPU-only build", pin
        )
    tag = local if named else _of_runtime(locked)
    own = tag is not None or any(re.fullmatch(wanted.wheels, p.name) for p in locked)
    if wanted.gpu and (not own or tag not in (None, target.accelerator)):
        family = accelerator_of(tag or "") or wanted
        other = f"another {wanted.title}" if own and family is wanted else "another accelerator"
        raise LockError(
            f"{source}: target {target.name} resolved to torch=={torch.version}, built for {other}"
            + (f" ({tag})" if tag else ""),
            pin + (f", or make it a target of {tag}" if tag else ""),
        )


def _of_runtime(packages: Iterable[LockedPackage]) -> str | None:
    """Return `cu126` when torch's wheel from the default index pins the runtime of CUDA 12.6.

    Returns None when no package names the CUDA version.
    """
    for package in packages:
        if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", package.name):
            major, _, rest = package.version.partition(".")
            return f"cu{major}{rest.partition('.')[0]}"
    return None


_CPU_HINT = (
    "pin torch==VERSION+cpu in the target and name the index https://download.pytorch.org/whl/cpu there"
    " (on {arch}, releases whose plain wheel is CPU-only also do; see docs/reference/recipe.md)"
)
