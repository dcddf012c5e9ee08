"""The same trap in conda's packages: a CPU target that got a CUDA build of PyTorch, or the reverse."""

from __future__ import annotations

from collections.abc import Iterable

from envbuild.errors import LockError
from envbuild.lock.conda import CondaPackage
from envbuild.recipe.targets import Target


def check_conda_accelerator(target: Target, packages: Iterable[CondaPackage], source: str) -> None:
    """Raise LockError when PyTorch's build in `packages` is not one for `target`'s accelerator.

    A build is one for GPUs when its string begins with `cuda`, or when it needs CUDA's packages.
    """
    from envbuild.lock.conda_pip import conda_data

    data = conda_data()["accelerator"]
    for package in packages:
        if package.name not in data["packages"]:
            continue
        needs = {spec.partition(" ")[0] for spec in package.depends} & set(data["cuda_packages"])
        gpu = package.build.startswith(("cuda", "gpu")) or bool(
            needs and not package.build.startswith("cpu")
        )
        if gpu and not target.is_cuda:
            raise LockError(
                f"{source}: target {target.name} is for CPUs, but {package.stem} is a CUDA build"
                + (f" and needs {', '.join(sorted(needs))}" if needs else ""),
                f"ask for a CPU build in [targets.{target.name}]: conda = ['{package.name} * cpu*']",
            )
        if target.is_cuda and not gpu:
            raise LockError(
                f"{source}: target {target.name} needs CUDA, but {package.stem} is a CPU-only build",
                f"ask for a CUDA build in [targets.{target.name}]: conda = ['{package.name} * cuda*']",
            )
