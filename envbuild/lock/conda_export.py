"""Export of conda locks for other tools: conda-lock.yml with pip's packages, environment.yml, explicit lists."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.errors import LockError
from envbuild.lock.conda import CondaLock, CondaPackage, conda_platform
from envbuild.lock.conda_format import CondaPart, render
from envbuild.lock.format import without_credentials
from envbuild.names import normalise
from envbuild.recipe.targets import Target


@dataclass(frozen=True, slots=True)
class PipFile:
    """One wheel in conda-lock's form: `url` without credentials, `sha256` hexadecimal."""

    name: str
    version: str
    url: str
    sha256: str


def pip_files(lock: CondaLock, pylock: str) -> tuple[PipFile, ...]:
    """Return one locked wheel for each package that pip adds: a platform wheel before a `none-any` one.

    Among equals the first by URL is chosen. `pylock` is the resolution (PEP 751) with the URLs. Raises LockError
    for a package without a locked wheel in it.
    """
    listed = {normalise(row["name"]): row for row in tomllib.loads(pylock).get("packages", [])}
    files = []
    for package in lock.pip.packages:
        wheels = sorted(
            (wheel for wheel in listed.get(package.name, {}).get("wheels", [])
             if wheel.get("hashes", {}).get("sha256") in package.hashes),
            key=lambda wheel: ("none-any" in _address(wheel), _address(wheel)),
        )  # fmt: skip
        if not wheels:
            raise LockError(f"{package.name}=={package.version}: its resolution names no wheel")
        wheel = wheels[0]
        files.append(PipFile(package.name, package.version, _address(wheel), wheel["hashes"]["sha256"]))
    return tuple(files)


def _address(wheel: Mapping[str, Any]) -> str:
    url = wheel.get("url")
    if url is None:
        url = Path(str(wheel.get("path"))).absolute().as_uri()
    return without_credentials(str(url))


def conda_lock_text(parts: Sequence[CondaPart], pip: Mapping[str, Sequence[PipFile]]) -> str:
    """Return the text of conda-lock.yml with all packages.

    `pip` maps a target to its wheels, which conda-lock lists with `manager: pip`.
    """
    lines = []
    for part in parts:
        for file in pip.get(part.target, ()):
            lines += [
                f"- name: {_text(file.name)}",
                f"  version: {_text(file.version)}",
                '  manager: "pip"',
                f"  platform: {_text(conda_platform(Target.parse(part.target)))}",
                "  dependencies: {}",
                f"  url: {_text(file.url)}",
                "  hash:",
                f"    sha256: {_text(file.sha256)}",
                '  category: "main"',
                "  optional: false",
            ]
    return render(parts) + "".join(f"{line}\n" for line in lines)


def environment_text(lock: CondaLock, channels: Sequence[str]) -> str:
    """Return environment.yml (conda's documentation, "Managing environments") with exact versions and builds."""
    lines = [f"name: {_text(lock.recipe)}", "channels:"]
    lines += [f"- {_text(channel)}" for channel in channels]
    lines += ["- nodefaults", "dependencies:"]
    lines += [f"- {_text(f'{p.name}={p.version}={p.build}')}" for p in lock.packages]
    if lock.pip.packages:
        lines += ['- "pip"'] if not any(p.name == "pip" for p in lock.packages) else []
        lines.append("- pip:")
        lines += [f"  - {_text(f'{p.name}=={p.version}')}" for p in lock.pip.packages]
    return "\n".join(lines) + "\n"


def explicit_text(lock: CondaLock) -> str:
    """Return conda's explicit list: URLs with md5, each package after its dependencies.

    The format has no pip packages; they are listed in comments, as conda-lock does.
    """
    lines = [
        f"# {lock.recipe}, {lock.target}; install with: conda create --name NAME --file THIS",
        f"# platform: {conda_platform(Target.parse(lock.target))}",
        "@EXPLICIT",
    ]
    lines += [f"{package.url}#{package.md5}" for package in topological_order(lock.packages)]
    for added in lock.pip.packages:
        lines.append(f"# pip {added.name}=={added.version} --hash=sha256:{added.hashes[0]}")
    return "\n".join(lines) + "\n"


def topological_order(packages: Sequence[CondaPackage]) -> list[CondaPackage]:
    """Return `packages`, each after its dependencies; a dependency cycle is broken at an arbitrary package."""
    by_name = {package.name: package for package in packages}
    done: dict[str, CondaPackage] = {}
    for first in packages:
        open_names = [(first.name, iter(_needs(first)))]
        seen = {first.name}
        while open_names:
            name, needs = open_names[-1]
            following = next((n for n in needs if n in by_name and n not in done and n not in seen), None)
            if following is None:
                done.setdefault(name, by_name[name])
                open_names.pop()
            else:
                seen.add(following)
                open_names.append((following, iter(_needs(by_name[following]))))
    return list(done.values())


def _needs(package: CondaPackage) -> list[str]:
    return [spec.partition(" ")[0] for spec in package.depends]


def file_name(kind: str, recipe: str, target: Target) -> str:
    """Return the name of an exported file; a `conda-lock` file holds all targets of an accelerator."""
    if kind == "conda-lock":
        return f"{recipe}-{target.accelerator}.conda-lock.yml"
    return f"{recipe}-{target.name}." + {"environment": "yml", "explicit": "txt"}[kind]


def _text(value: str) -> str:
    return json.dumps(value)
