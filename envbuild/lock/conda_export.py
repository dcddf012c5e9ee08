"""Export of conda locks for other tools: pip's packages for conda-lock.yml, environment.yml, explicit lists."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envbuild.errors import LockError
from envbuild.lock.conda import CondaLock, CondaPackage, conda_platform
from envbuild.lock.conda_format import entry
from envbuild.lock.format import without_credentials
from envbuild.names import normalise
from envbuild.recipe.targets import Target


def pip_entries(lock: CondaLock, pylock: str) -> str:
    """Return the packages that pip adds as entries of conda-lock.yml, after those that `conda_format.render` writes.

    conda-lock lists them with `manager: pip`, each with one locked wheel: a platform wheel before a `none-any` one,
    among equals the first by URL. `pylock` is the resolution (PEP 751) with the URLs. Raises LockError for a package
    without a locked wheel in it.
    """
    listed = {normalise(row["name"]): row for row in tomllib.loads(pylock).get("packages", [])}
    platform = conda_platform(Target.parse(lock.target))
    lines: list[str] = []
    for package in lock.pip.packages:
        wheels = [
            (_address(wheel), wheel["hashes"]["sha256"])
            for wheel in listed.get(package.name, {}).get("wheels", [])
            if wheel.get("hashes", {}).get("sha256") in package.hashes
        ]
        if not wheels:
            raise LockError(f"{package.name}=={package.version}: its resolution names no wheel")
        url, sha256 = min(wheels, key=lambda wheel: ("none-any" in wheel[0], wheel[0]))
        lines += entry(package.name, package.version, "pip", platform, (), url, {"sha256": sha256})
    return "".join(f"{line}\n" for line in lines)


def _address(wheel: Mapping[str, Any]) -> str:
    return without_credentials(wheel.get("url") or Path(str(wheel.get("path"))).absolute().as_uri())


def environment_text(lock: CondaLock, channels: Sequence[str]) -> str:
    """Return environment.yml (conda's documentation, "Managing environments") with exact versions and builds."""
    names = [f"{p.name}={p.version}={p.build}" for p in lock.packages]
    if lock.pip.packages and not any(p.name == "pip" for p in lock.packages):
        names.append("pip")
    lines = [f"name: {json.dumps(lock.recipe)}", "channels:", *(f"- {json.dumps(channel)}" for channel in channels)]
    lines += ["- nodefaults", "dependencies:", *(f"- {json.dumps(name)}" for name in names)]
    if lock.pip.packages:
        lines += ["- pip:", *(f"  - {json.dumps(f'{p.name}=={p.version}')}" for p in lock.pip.packages)]
    return "\n".join(lines) + "\n"


def explicit_text(lock: CondaLock) -> str:
    """Return conda's explicit list: URLs with md5, each after its dependencies, and pip's packages in comments."""
    lines = [
        f"# {lock.recipe}, {lock.target}; install with: conda create --name NAME --file THIS",
        f"# platform: {conda_platform(Target.parse(lock.target))}",
        "@EXPLICIT",
    ]
    lines += [f"{package.url}#{package.md5}" for package in topological_order(lock.packages)]
    lines += [f"# pip {added.name}=={added.version} --hash=sha256:{added.hashes[0]}" for added in lock.pip.packages]
    return "\n".join(lines) + "\n"


def topological_order(packages: Sequence[CondaPackage]) -> list[CondaPackage]:
    """Return `packages`, each after its dependencies; a dependency cycle is broken at an arbitrary package."""
    by_name = {package.name: package for package in packages}
    seen: set[str] = set()
    ordered: list[CondaPackage] = []

    def visit(package: CondaPackage) -> None:
        if package.name not in seen:
            seen.add(package.name)
            for name in package.needs:
                if name in by_name:
                    visit(by_name[name])
            ordered.append(package)

    for package in packages:
        visit(package)
    return ordered


def file_name(kind: str, recipe: str, target: Target) -> str:
    """Return the name of an exported file; a `conda-lock` file holds all targets of an accelerator."""
    if kind == "conda-lock":
        return f"{recipe}-{target.accelerator}.conda-lock.yml"
    return f"{recipe}-{target.name}." + {"environment": "yml", "explicit": "txt"}[kind]
