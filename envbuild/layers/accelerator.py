"""The wheels of a plan against its target, before anything is built: their processor, and torch's accelerator.

Locks are checked when they are made; one that was edited or made elsewhere is only as good as what it names.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

from envbuild.errors import BuildError
from envbuild.layers.compose import WheelFile
from envbuild.recipe.targets import ARCHES, Target
from envbuild.recipe.torch_build import (
    MAX_VERSION_FILE,
    VERSION_FILE,
    accelerator_fault,
    torch_builds,
    torch_libraries,
)


def check_wheels(target: Target, wheels: Iterable[WheelFile]) -> None:
    """Raise BuildError for a wheel of another processor than `target`'s, and for a torch of another accelerator.

    Of torch's wheel the list of members and one small file are read.
    """
    for wheel in wheels:
        other = wheel_arch(wheel.path.name)
        if other is not None and other != target.arch:
            raise BuildError(
                f"{wheel.path.name} is for {other}, and {target.name} is for {target.arch}",
                "the lock names a wheel of another platform: make it anew with `envbuild lock`",
            )
        if wheel.name == "torch":
            builds, libraries = _read_torch(wheel.path)
            fault = accelerator_fault(target.name, builds, libraries, exact=True)
            if fault is not None:
                raise BuildError(
                    f"{wheel.path.name}: this torch {fault}",
                    f"correct torch's version in {target.table} and lock it again; "
                    "docs/reference/recipe.md tells which index has which build",
                )


def wheel_arch(name: str) -> str | None:
    """The processor that the wheel file `name` is for, by its platform tag (PEP 425); None: any, or unknown."""
    platforms = name.removesuffix(".whl").rpartition("-")[2].split(".")
    found = {arch for arch in ARCHES for platform in platforms if platform.endswith(f"_{arch}")}
    return found.pop() if len(found) == 1 else None


def _read_torch(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return what the torch in a wheel is built for, and its libraries of accelerators."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.NameToInfo
            text = ""
            if VERSION_FILE in names:
                with archive.open(VERSION_FILE) as stream:
                    text = stream.read(MAX_VERSION_FILE).decode("utf-8", "replace")
            libraries = [n for n in sorted(torch_libraries()) if f"torch/lib/{n}" in names]
    except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise BuildError(f"{path} is not a wheel that can be read: {error}") from error
    return torch_builds(text), libraries
