"""conda-lock as the solver, for sites that require the solution of conda, mamba or micromamba."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from envbuild.base import process
from envbuild.base.errors import HostError, LockError
from envbuild.base.packages import channel_url
from envbuild.environment import Environment
from envbuild.lock import conda_solve
from envbuild.lock.conda import CondaPackage, canonical_depends, conda_platform
from envbuild.lock.conda_format import parse_packages
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
    """Return the conda to solve with: $ENVBUILD_CONDA, else the first of its kinds on PATH. Raises HostError."""
    if importlib.util.find_spec("conda_lock") is None:
        raise HostError(
            "--solver conda-lock: conda-lock is not installed",
            "pip install conda-lock, or leave the option away: envbuild solves by itself",
        )
    named = environment.variables.get(_VARIABLE)
    for program in [named] if named else _PROGRAMS:
        if found := shutil.which(program, path=environment.variables.get("PATH")):
            return found
    if named:
        raise HostError(f"{_VARIABLE}={named} is no program", "set it to a conda, mamba or micromamba")
    raise HostError(
        f"--solver conda-lock needs one of {', '.join(_PROGRAMS)} on PATH",
        f"install one, set {_VARIABLE}, or leave the option away: envbuild solves by itself",
    )


def solve_by_conda_lock(
    recipe: LoadedRecipe, target: Target, environment: Environment, *, keep: Collection[CondaPackage], offline: bool
) -> tuple[CondaPackage, ...]:
    """Solve with conda-lock and return what `conda_solve.solve` returns.

    Channels are read through the site's first mirror. conda handles credentials itself here (.condarc and netrc).
    Raises HostError when conda-lock or conda is missing, and LockError with conda-lock's output when it fails.
    """
    program = find_conda(environment)
    canonical = [channel_url(name) for name in recipe.recipe.conda.channels]
    channels = {split_credentials(environment.site.mirrored(one)[0].rstrip("/"))[0]: one for one in canonical}
    asked = conda_solve.recipe_specs(recipe, target)
    env = conda_solve.network_variables(environment)
    if offline:
        env["CONDA_OFFLINE"] = env["MAMBA_OFFLINE"] = "true"
    # conda-lock uses the last of several specs for one name: a pin replaces the recipe's own spec.
    pins = [f"{package.name} =={package.version} {package.build}" for package in keep if not _missed(asked, package)]
    for more in [pins, []] if pins else [[]]:  # all kept packages pinned, then without pins
        with tempfile.TemporaryDirectory(prefix="conda-lock-", dir=env.get("TMPDIR")) as folder:
            work = Path(folder)
            _write_inputs(work, recipe, target, [*(spec.text for spec in asked), *more], list(channels))
            command: list[str | Path] = [
                sys.executable,
                "-P",
                "-m",
                "conda_lock",
                "lock",
                "--conda",
                program,
                "--file",
                work / "environment.yml",
                "--platform",
                conda_platform(target),
                "--virtual-package-spec",
                work / "virtual-packages.yml",
                "--lockfile",
                work / "conda-lock.yml",
            ]
            done = process.run(command, env=env, cwd=work, check=False)
            if done.returncode == 0:
                text = (work / "conda-lock.yml").read_text(encoding="utf-8")
                break
    else:
        printed = conda_solve.hide(done.stderr)
        if found := _REFUSAL.search(printed):
            raise conda_solve.unsatisfiable(recipe, target, found["text"].strip(), asked)
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
        raise LockError(
            f"{recipe.path}: target {target.name}: conda-lock failed (exit {done.returncode}): {last}",
            f"does it work with {program}? leave --solver away to let envbuild solve by itself",
        )
    packages = parse_packages(text, "conda-lock's result").get(conda_platform(target), ())
    if not packages:
        raise LockError("conda-lock's result has no packages")
    for package in packages:
        for spec in _missed(asked, package):
            raise LockError(
                f"{spec.where}: conda-lock chose {package.stem}, which is not {spec.text!r}",
                "it takes the last of several specs for one name: make them one",
            )
    urls = [conda_solve.canonical_url(package.url, channels) for package in packages]
    return tuple(
        replace(package, url=url, depends=canonical_depends(package.depends))
        for package, url in zip(packages, urls, strict=True)
    )


def _missed(specs: Sequence[conda_solve.Spec], package: CondaPackage) -> list[conda_solve.Spec]:
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
            raise conda_solve.bad_spec(spec, str(error)) from None
    return missed


def _write_inputs(folder: Path, recipe: LoadedRecipe, target: Target, specs: list[str], channels: list[str]) -> None:
    """Write environment.yml and virtual-packages.yml as JSON, which is valid YAML."""
    platform = conda_platform(target)
    environment = {"name": recipe.recipe.name, "channels": channels, "dependencies": specs, "platforms": [platform]}
    virtual = {
        name: f"{version} {build}" if name == "__archspec" else version
        for name, version, build in conda_solve.virtual_packages(recipe, target)
    }
    known = {"subdirs": {platform: {"packages": virtual}}}
    (folder / "environment.yml").write_text(json.dumps(environment), encoding="utf-8")
    (folder / "virtual-packages.yml").write_text(json.dumps(known), encoding="utf-8")
