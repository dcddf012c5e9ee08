"""What pip adds to conda packages: resolved by uv, to which the conda packages appear as wheels that are fixed."""

from __future__ import annotations

import base64
import functools
import hashlib
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.lock.conda import CondaPackage
from envbuild.lock.format import Lock
from envbuild.lock.resolve import Resolution, ResolveRequest, resolve_wanted
from envbuild.names import normalise
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

# In a version's local part (PEP 440), so that no index has it, and uv's explanations name conda.
_LOCAL = "conda"


@functools.cache
def conda_data() -> dict[str, Any]:
    """data/conda.toml."""
    text = resources.files("envbuild.data").joinpath("conda.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def provided(packages: Iterable[CondaPackage]) -> dict[str, str]:
    """The Python distributions that conda packages hold: normalised name → version with `+conda`.

    A package holds one when it depends on Python; its name is the package's own but for those in
    data/conda.toml. A version that is none by PEP 440 is left out.
    """
    from packaging.version import InvalidVersion, Version

    names = conda_data()["distributions"]
    found: dict[str, str] = {}
    for package in packages:
        needs = {spec.partition(" ")[0] for spec in package.depends}
        distribution = normalise(names.get(package.name, package.name))
        if not distribution or not needs & {"python", "python_abi"}:
            continue
        try:
            version = Version(package.version)
        except InvalidVersion:
            continue
        local = f"{version.local}.{_LOCAL}" if version.local else _LOCAL
        found[distribution] = f"{version.public}+{local}"
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
    """What pip adds to `packages` for [conda]'s requirements; versions in `keep` stay where they still fit.

    Nothing that a conda package holds is taken from an index. Raises LockError with uv's explanation when the
    requirements do not go with the conda packages.
    """
    there = provided(packages)
    with tempfile.TemporaryDirectory(prefix="envbuild-conda-pip-") as folder:
        stubs = Path(folder)
        for name, version in there.items():
            _stub(stubs, name, version)
        wanted = ResolveRequest(
            recipe.recipe.conda.requirements,
            recipe.recipe.constraints,
            recipe.conda_digest(target),
            there,
            stubs,
        )
        try:
            return resolve_wanted(wanted, recipe, target, environment, keep=keep, offline=offline)
        except LockError as error:
            if f"+{_LOCAL}" not in error.message and f".{_LOCAL}" not in error.message:
                raise
            raise LockError(
                error.message
                + f"\n  note: versions with +{_LOCAL} are those of the conda packages",
                "change the requirement in [conda], or the version of the conda package",
            ) from None


def _stub(folder: Path, name: str, version: str) -> None:
    """A wheel with nothing but its name and version (wheel format 1.0, core metadata 2.1)."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: envbuild\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    rows = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(zipfile.ZipInfo(path), text)


def _digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
