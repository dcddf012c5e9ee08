"""Check of a plan's wheels against its target before a build: their processor, and torch's accelerator.

Locks are checked when they are written, but a lock may have been edited or written elsewhere.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

from envbuild.errors import BuildError
from envbuild.layers.compose import WheelFile
from envbuild.recipe.accelerators import (
    MAX_VERSION_FILE,
    VERSION_FILE,
    accelerator_fault,
    torch_builds,
    torch_libraries,
)
from envbuild.recipe.targets import ARCHES, Target


def check_wheels(target: Target, wheels: Iterable[WheelFile]) -> None:
    """Raise BuildError for a wheel for another processor than `target`'s, and for a torch for another accelerator.

    Only the list of members and one small file of torch's wheel are read.
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
    """Return the processor in the platform tag (PEP 425) of the wheel file `name`.

    Returns None for a wheel that is for any processor, or for an unknown one.
    """
    platforms = name.removesuffix(".whl").rpartition("-")[2].split(".")
    found = {arch for arch in ARCHES for platform in platforms if platform.endswith(f"_{arch}")}
    return found.pop() if len(found) == 1 else None


def _read_torch(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the accelerators that the torch in a wheel is built for, and its accelerator libraries."""
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
