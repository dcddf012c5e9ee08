"""Packages that pip adds to conda packages: uv resolves them with the conda packages as fixed wheels."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.lock.conda import CondaPackage, conda_data
from envbuild.lock.format import Lock
from envbuild.lock.resolve import Resolution, resolve
from envbuild.names import normalise
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

# In the local part of a version (PEP 440): no index has such a version, and uv's explanations name conda.
_LOCAL = "conda"


def provided(packages: Iterable[CondaPackage]) -> dict[str, str]:
    """Return the Python distributions in conda packages: normalised name → version with `+conda`.

    A package contains a distribution when it depends on Python. The distribution has the package's name, except
    for the names in data/conda.toml. Versions that are invalid under PEP 440 are left out.
    """
    from packaging.version import InvalidVersion, Version

    names = conda_data()["distributions"]
    found: dict[str, str] = {}
    for package in packages:
        distribution = normalise(names.get(package.name, package.name))
        if distribution and not {"python", "python_abi"}.isdisjoint(package.needs):
            with contextlib.suppress(InvalidVersion):
                version = Version(package.version)
                found[distribution] = f"{version.public}+{version.local + '.' if version.local else ''}{_LOCAL}"
    return found


def resolve_pip(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    packages: Iterable[CondaPackage],
    *,
    keep: Lock | None = None,
    offline: bool = False,
) -> Resolution:
    """Return the packages that pip adds to `packages` for the requirements in [conda].

    Versions in `keep` are kept while they fit. A distribution in a conda package is never taken from an index.
    Raises LockError with uv's explanation when the requirements conflict with the conda packages.
    """
    there = provided(packages)
    with tempfile.TemporaryDirectory(prefix="envbuild-conda-pip-") as folder:
        stubs = Path(folder)
        for name, version in there.items():
            _stub(stubs, name, version)
        try:
            return resolve(
                recipe, target, environment, recipe.recipe.conda.requirements, recipe.conda_digest(target),
                provided=there, stubs=stubs, keep=keep, offline=offline,
            )  # fmt: skip
        except LockError as error:
            if f"+{_LOCAL}" not in error.message and f".{_LOCAL}" not in error.message:
                raise
            raise LockError(
                error.message + f"\n  note: versions with +{_LOCAL} are those of the conda packages",
                "change the requirement in [conda], or the version of the conda package",
            ) from None


def _stub(folder: Path, name: str, version: str) -> None:
    """Write a wheel that holds only its name and version (wheel format 1.0, core metadata 2.1)."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: envbuild\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}\n")
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"])
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(zipfile.ZipInfo(path), text)
