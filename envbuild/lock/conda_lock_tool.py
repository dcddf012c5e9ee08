"""conda-lock as the solver, for sites that require the solution of conda, mamba or micromamba."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from envbuild import process
from envbuild.environment import Environment
from envbuild.errors import HostError, LockError
from envbuild.lock.conda import CondaPackage, conda_platform
from envbuild.lock.conda_format import canonical_depends, parse_packages
from envbuild.lock.conda_solve import (
    Spec,
    bad_spec,
    canonical_url,
    hide,
    network_variables,
    recipe_specs,
    unsatisfiable,
    virtual_packages,
)
from envbuild.recipe.conda import channel_url
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target
from envbuild.store.client import split_credentials

_PROGRAMS = ("micromamba", "mamba", "conda")
_VARIABLE = "ENVBUILD_CONDA"
# conda-lock's output when the program that it calls finds no solution; the match leaves out the command line.
_REFUSAL = re.compile(
    r"Could not lock the environment for platform \S+\n(?P<text>.*?)(?:\n\s+Command: |\nTraceback|\Z)", re.S
)


def find_conda(environment: Environment) -> str:
    """Return the conda, mamba or micromamba to solve with: $ENVBUILD_CONDA, else the first on PATH.

    Raises HostError when there is none, or when conda-lock is not installed.
    """
    if importlib.util.find_spec("conda_lock") is None:
        raise HostError(
            "--solver conda-lock: conda-lock is not installed",
            "pip install conda-lock, or leave the option away: envbuild solves by itself",
        )
    path = environment.variables.get("PATH")
    if named := environment.variables.get(_VARIABLE):
        if found := shutil.which(named, path=path):
            return found
        raise HostError(f"{_VARIABLE}={named} is no program", "set it to a conda, mamba or micromamba")
    for program in _PROGRAMS:
        if found := shutil.which(program, path=path):
            return found
    raise HostError(
        f"--solver conda-lock needs one of {', '.join(_PROGRAMS)} on PATH",
        f"install one, set {_VARIABLE}, or leave the option away: envbuild solves by itself",
    )


def solve_by_conda_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    keep: Collection[CondaPackage] = (),
    offline: bool = False,
) -> tuple[CondaPackage, ...]:
    """Solve with conda-lock and return what `conda_solve.solve` returns.

    Channels are read through the site's first mirror. conda handles credentials itself here (.condarc and netrc).
    Raises HostError when conda-lock or conda is missing, and LockError with conda-lock's output when it fails.
    """
    program = find_conda(environment)
    channels = {}
    for name in recipe.recipe.conda.channels:
        canonical = channel_url(name)
        first = split_credentials(environment.site.mirrored(canonical)[0].rstrip("/"))[0]
        channels[first] = canonical
    asked = recipe_specs(recipe, target)
    specs = [spec.text for spec in asked]
    env = network_variables(environment)
    if offline:
        env["CONDA_OFFLINE"] = env["MAMBA_OFFLINE"] = "true"
    # conda-lock uses the last of several specs for one name: a pin replaces the recipe's own spec.
    pins = [f"{package.name} =={package.version} {package.build}" for package in keep if not _missed(asked, package)]
    for more in [pins, []] if pins else [[]]:  # all kept packages pinned, then without pins
        with tempfile.TemporaryDirectory(prefix="envbuild-conda-lock-") as folder:
            work = Path(folder)
            _write_inputs(work, recipe, target, [*specs, *more], list(channels))
            done = process.run(
                [
                    sys.executable, "-P", "-m", "conda_lock", "lock", "--conda", program,
                    "--file", work / "environment.yml", "--platform", conda_platform(target),
                    "--virtual-package-spec", work / "virtual-packages.yml",
                    "--lockfile", work / "conda-lock.yml",
                ],
                env=env,
                cwd=work,
                check=False,
            )  # fmt: skip
            if done.returncode == 0:
                text = (work / "conda-lock.yml").read_text(encoding="utf-8")
                packages = _packages(text, target, channels)
                break
    else:
        raise _failure(done, recipe, target, program)
    for package in packages:
        for spec in _missed(asked, package):
            raise LockError(
                f"{spec.where}: conda-lock chose {package.stem}, which is not {spec.text!r}",
                "it takes the last of several specs for one name: make them one",
            )
    return packages


def _missed(specs: Sequence[Spec], package: CondaPackage) -> list[Spec]:
    """Return those of `specs` that `package` does not satisfy. Raises RecipeError for an invalid match spec."""
    from rattler import MatchSpec, PackageRecord
    from rattler.exceptions import InvalidMatchSpecError
    from rattler.package import BuildString

    record = PackageRecord(package.name, package.version, BuildString(package.build), 0, package.subdir)
    missed = []
    for spec in specs:
        try:
            if spec.name == package.name and not MatchSpec(spec.text, strict=True).matches(record):
                missed.append(spec)
        except InvalidMatchSpecError as error:
            raise bad_spec(spec, str(error)) from None
    return missed


def _failure(done: subprocess.CompletedProcess[str], recipe: LoadedRecipe, target: Target, program: str) -> LockError:
    printed = hide(done.stderr)
    if found := _REFUSAL.search(printed):
        return unsatisfiable(recipe, target, found["text"].strip(), recipe_specs(recipe, target))
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
    return LockError(
        f"{recipe.path}: target {target.name}: conda-lock failed (exit {done.returncode}): {last}",
        f"does it work with {program}? leave --solver away to let envbuild solve by itself",
    )


def _write_inputs(folder: Path, recipe: LoadedRecipe, target: Target, specs: list[str], channels: list[str]) -> None:
    """Write environment.yml and virtual-packages.yml as JSON, which is valid YAML."""
    environment = {
        "name": recipe.recipe.name,
        "channels": channels,
        "dependencies": specs,
        "platforms": [conda_platform(target)],
    }
    virtual = {
        name: f"{version} {build}" if name == "__archspec" else version
        for name, version, build in virtual_packages(recipe, target)
    }
    known = {"subdirs": {conda_platform(target): {"packages": virtual}}}
    (folder / "environment.yml").write_text(json.dumps(environment), encoding="utf-8")
    (folder / "virtual-packages.yml").write_text(json.dumps(known), encoding="utf-8")


def _packages(text: str, target: Target, channels: dict[str, str]) -> tuple[CondaPackage, ...]:
    packages = parse_packages(text, "conda-lock's result").get(conda_platform(target), ())
    if not packages:
        raise LockError("conda-lock's result has no packages")
    return tuple(
        replace(package, url=canonical_url(package.url, channels), depends=canonical_depends(package.depends))
        for package in packages
    )
