"""Check of conda's PyTorch build against the target's accelerator; `accelerator` does the same for wheels."""

from __future__ import annotations

from collections.abc import Iterable

from envbuild.errors import LockError
from envbuild.lock.conda import CondaPackage
from envbuild.recipe.accelerators import CUDA
from envbuild.recipe.targets import Target


def check_conda_accelerator(target: Target, packages: Iterable[CondaPackage], source: str) -> None:
    """Raise LockError when the PyTorch build in `packages` does not match `target`'s accelerator.

    A build is a CUDA build when its build string begins with `cuda`, or when it depends on CUDA packages and its
    build string does not begin with `cpu`.
    """
    from envbuild.lock.conda_pip import conda_data

    data = conda_data()["accelerator"]
    for package in packages:
        if package.name not in data["packages"]:
            continue
        needs = {spec.partition(" ")[0] for spec in package.depends} & set(data["cuda_packages"])
        cuda = package.build.startswith(CUDA.conda_builds) or bool(needs and not package.build.startswith("cpu"))
        if cuda and not target.family.gpu:
            raise LockError(
                f"{source}: target {target.name} is for CPUs, but {package.stem} is a CUDA build"
                + (f" and needs {', '.join(sorted(needs))}" if needs else ""),
                f"ask for a CPU build in {target.table}: conda = ['{package.name} * cpu*']",
            )
        wanted = target.family
        own = cuda if wanted is CUDA else package.build.startswith(wanted.conda_builds)
        if wanted.gpu and not own:
            kind = "CUDA" if cuda else "CPU-only"
            raise LockError(
                f"{source}: target {target.name} needs {wanted.title}, but {package.stem} is a {kind} build",
                f"ask for a {wanted.title} build in {target.table}: "
                f"conda = ['{package.name} * {wanted.conda_builds[0]}*']",
            )
