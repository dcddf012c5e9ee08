"""The choice of the runtime that starts the programs of an image file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from envbuild.environment import Environment
from envbuild.errors import HostError, UsageError
from envbuild.verify.image_file import APPTAINER, ENROOT, ImageFile, Runtime

OWN = "own"
_WAYS = ("mount", "squashfuse", "extract")
# The programs that start an image of each kind, best first; without any of them, envbuild uses its own runtime.
_PROGRAMS = {ENROOT: ("enroot",), APPTAINER: ("apptainer", "singularity")}
NAMES = (ENROOT, APPTAINER, OWN, *(f"{OWN}:{way}" for way in _WAYS))


def choose(kind: str, wanted: str | None, variables: Mapping[str, str]) -> tuple[str, Path | None, str | None]:
    """Return the runtime for an image of `kind`, its program, and the requested way of the own runtime, if any.

    `wanted` is one of NAMES, or None for the best available one. Raises UsageError for another name and for a
    runtime that does not start images of this kind, HostError when the wanted one is not installed.
    """
    if wanted is not None and wanted not in NAMES:
        raise UsageError(f"no runtime is called {wanted!r}", f"one of {', '.join(NAMES)}")
    if wanted in _PROGRAMS and wanted != kind:
        raise UsageError(
            f"{wanted} does not start {'.sif' if kind == APPTAINER else '.sqsh'} images", f"choose {kind} or {OWN}"
        )
    if wanted in (None, kind):
        search = variables.get("PATH", os.defpath)
        for name in _PROGRAMS[kind]:
            if found := shutil.which(name, path=search):
                return kind, Path(found), None
        if wanted:
            raise HostError(
                f"{' or '.join(_PROGRAMS[kind])} is not on PATH",
                f"install it, or choose {OWN}, which needs nothing installed",
            )
    return OWN, None, (wanted or OWN).partition(":")[2] or None


def runtime_for(image: ImageFile, wanted: str | None, environment: Environment) -> Runtime:
    """Return the runtime that starts `image` (see `choose`), after a trial start.

    If an installed runtime cannot start the image, the own runtime is used, unless `wanted` names the installed
    one. Raises HostError when no runtime can.
    """
    name, program, way = choose(image.kind, wanted, environment.variables)
    failed = None
    if program is not None:
        try:
            return _installed(name, image, program, environment)
        except HostError as error:
            if wanted is not None:
                raise
            failed = error
    from envbuild.verify.own_runtime import own_runtime

    try:
        own = own_runtime(image, way, environment)
    except HostError as error:
        if failed is None:
            raise
        raise HostError(f"{failed.message}\n{error.message}", error.hint) from error
    return replace(own, name=f"{own.name}, {name} could not start it") if failed else own


def _installed(name: str, image: ImageFile, program: Path, environment: Environment) -> Runtime:
    if name == ENROOT:
        from envbuild.verify.enroot_runtime import enroot_runtime

        return enroot_runtime(image, program, environment)
    from envbuild.verify.apptainer_runtime import apptainer_runtime

    return apptainer_runtime(image, program, environment)
