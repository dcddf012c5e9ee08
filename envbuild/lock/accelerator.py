"""Checks of torch's build, in wheels and in conda packages, against the target's accelerator.

The most reported failure of PyTorch locks is a target that resolves to a build for another accelerator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from envbuild.base.errors import LockError
from envbuild.data import load_table
from envbuild.lock.conda import CondaPackage
from envbuild.recipe.accelerators import CUDA, accelerator_of, gpu_families, torch_index
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target


def check_accelerator(target: Target, packages: Iterable[LockedPackage], source: str) -> None:
    """Raise LockError when the torch build in `packages` does not match `target`'s accelerator.

    The build follows from the wheel's local version (`+cpu`, `+cu126`: the naming of download.pytorch.org) and from
    the CUDA packages that it depends on (builds on the default index have no local version).
    """
    versions, wanted, families = {p.name: p.version for p in packages}, target.family, gpu_families()
    if "torch" not in versions:
        return
    torch = f"torch=={versions['torch']}"
    local = versions["torch"].partition("+")[2]
    gpu = sorted(f"{n}=={v}" for n, v in versions.items() if any(re.fullmatch(one.wheels, n) for one in families))
    # Local versions `+cu126`, `+rocm6.4`, and `+xpu`, for which envbuild has no targets.
    named = local.startswith(("xpu", *(one.usual[0].rstrip(".0123456789") for one in families)))
    if not wanted.gpu:
        if gpu or named:
            more = f" and brings {len(gpu)} GPU packages ({', '.join(gpu[:4])}{', …' if len(gpu) > 4 else ''})"
            raise LockError(
                f"{source}: target {target.name} is for CPUs, but {torch} is a GPU build{more if gpu else ''}",
                f"pin torch==VERSION+cpu in the target and name the index {torch_index('cpu')} there (on {target.arch},"
                " releases whose plain wheel is CPU-only also do; see docs/reference/recipe.md)",
            )
        return
    index = torch_index(target.accelerator)
    pin = f"pin torch==VERSION+{target.accelerator} in {target.table} and name the index {index} there"
    if not gpu and not named:
        raise LockError(f"{source}: target {target.name} needs {wanted.title}, but {torch} is a CPU-only build", pin)
    # torch's wheel on the default index pins the runtime: 12.6.77 is that of cu126.
    runtime = next((v for name, v in versions.items() if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", name)), None)
    tag = local if named else runtime and "cu" + "".join(runtime.split(".")[:2])
    own = tag is not None or any(re.fullmatch(wanted.wheels, name) for name in versions)
    if not own or tag not in (None, target.accelerator):
        same = own and (accelerator_of(tag or "") or wanted) is wanted
        raise LockError(
            f"{source}: target {target.name} resolved to {torch}, built for another "
            f"{wanted.title if same else 'accelerator'}{f' ({tag})' if tag else ''}",
            pin + (f", or make it a target of {tag}" if tag else ""),
        )


def check_conda_accelerator(target: Target, packages: Iterable[CondaPackage], source: str) -> None:
    """Raise LockError when the PyTorch build in `packages` does not match `target`'s accelerator.

    A CUDA build's string begins with `cuda`, or it depends on CUDA packages and its string does not begin with `cpu`.
    """
    data, wanted = load_table("conda")["accelerator"], target.family
    for package in packages:
        if package.name not in data["packages"]:
            continue
        needs = sorted(set(package.needs) & set(data["cuda_packages"]))
        cuda = package.build.startswith(CUDA.conda_builds) or bool(needs and not package.build.startswith("cpu"))
        if cuda and not wanted.gpu:
            raise LockError(
                f"{source}: target {target.name} is for CPUs, but {package.stem} is a CUDA build"
                + (f" and needs {', '.join(needs)}" if needs else ""),
                f"ask for a CPU build in {target.table}: conda = ['{package.name} * cpu*']",
            )
        own = cuda if wanted is CUDA else package.build.startswith(wanted.conda_builds)
        if wanted.gpu and not own:
            raise LockError(
                f"{source}: target {target.name} needs {wanted.title}, but {package.stem} is a "
                f"{'CUDA' if cuda else 'CPU-only'} build",
                f"ask for a {wanted.title} build in {target.table}: "
                f"conda = ['{package.name} * {wanted.conda_builds[0]}*']",
            )
