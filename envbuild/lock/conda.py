"""Conda lock of one target: exact packages by hash, the packages that pip adds, and their forms for other tools."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from envbuild.base.errors import LockError
from envbuild.base.packages import json_digest
from envbuild.base.text import normalise
from envbuild.lock.format import Lock, wheel_files, without_credentials
from envbuild.recipe.targets import Target

_text = json.dumps  # YAML's strings in double quotes
# A version, build or platform.
WORD = re.compile(r"[^\s/#\"'\\]+")
# A match spec's name, and what follows: "numpy >=1.21", also "numpy>=1.21" of old channels.
_SPEC_NAME = re.compile(r"((?:[\w./-]+::)?[\w.-]+)(.*)", re.DOTALL)
# Spaces that separate nothing: ">=1.8, <2" and ">= 1.8".
_LOOSE_SPACE = re.compile(r" ?([,|]) ?|([<>=!~]) ")


@dataclass(frozen=True, slots=True)
class CondaPackage:
    """One conda package.

    `url` is canonical: the URL at its channel, never at a mirror, and without credentials. `md5` and `sha256` are
    hexadecimal, `depends` holds match specs ("numpy >=1.21"), `subdir` is a platform or "noarch". `size` is the file
    size in bytes, 0 if unknown: channels report it to a solver, but the lock does not store it.
    """

    name: str
    version: str
    build: str
    subdir: str
    url: str
    md5: str
    sha256: str
    depends: tuple[str, ...] = ()
    size: int = field(default=0, compare=False)

    @property
    def needs(self) -> list[str]:
        """Names of the packages that it depends on."""
        return [spec.partition(" ")[0] for spec in self.depends]

    @property
    def file_name(self) -> str:
        """File name: NAME-VERSION-BUILD.conda or .tar.bz2."""
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """NAME-VERSION-BUILD, the name of the package in caches and in conda-meta."""
        return f"{self.name}-{self.version}-{self.build}"

    @property
    def channel(self) -> str:
        """URL of the package's channel."""
        return self.url.rsplit("/", 2)[0]


@dataclass(frozen=True, slots=True)
class CondaLock:
    """Contents of a target's conda environment.

    `recipe_digest` covers what affects the lock in the recipe, `packages` are sorted by name, `pip` is what uv adds.
    Spans in `exclude_newer` of the recipe counted back from `as_of`, "" without such a span.
    """

    recipe: str
    target: str
    recipe_digest: str
    packages: tuple[CondaPackage, ...]
    pip: Lock
    as_of: str = ""

    @property
    def digest(self) -> str:
        """sha256 of the packages to install, independent of the file's layout and of their source."""
        packages = [[p.name, p.version, p.build, p.subdir, p.sha256] for p in self.packages]
        content = [self.target, packages, self.pip.digest]
        return json_digest(content)

    @property
    def versions(self) -> dict[str, str]:
        """Version of each package by its name; a conda package overrides pip's of the same name."""
        return self.pip.versions | {package.name: package.version for package in self.packages}

    def knows(self, name: str) -> bool:
        """Return whether the lock has a conda or pip package called `name`."""
        return not self.versions.keys().isdisjoint((name.lower(), normalise(name)))


def conda_platform(target: Target) -> str:
    """Return the platform in conda's spelling: linux-64 or linux-aarch64."""
    return {"x86_64": "linux-64", "aarch64": "linux-aarch64"}[target.arch]


def canonical_depends(specs: Iterable[str]) -> tuple[str, ...]:
    """Return match specs in the form that conda-lock.yml can hold: one for each name, sorted by name.

    The spec of a name accepts the packages that all its specs accept: versions are joined by commas, alternatives
    (`1.*|2.*`) in parentheses, followed by the build string. Raises LockError if the specs of a name have different
    build strings and neither matches the other, because a match spec has only one.
    """
    versions: dict[str, list[str]] = {}
    builds: dict[str, str] = {}
    for spec in specs:
        name, rest = _split_spec(spec)
        version, _, build = rest.partition(" ")
        if version.startswith("=") and not version.startswith("=="):
            # conda's rule: with a build string, "=1.2" means ==1.2; without one, 1.2.*
            version = f"={version}" if build else f"{version[1:].removesuffix('.*')}.*"
        versions.setdefault(name, []).append(version)
        before = builds.get(name, "")
        if before and build and not fnmatchcase(before, build):
            if not fnmatchcase(build, before):
                raise LockError(
                    f"the dependencies on {name} have two build strings, {before} and {build}; conda-lock's format"
                    " has room for one",
                    "report it to the maintainers of the package; an older build of it may have only one",
                )
            builds[name] = build
        else:
            builds[name] = before or build
    return tuple(f"{name} {_all_of(versions[name], builds[name])}".strip() for name in sorted(versions))


def _split_spec(spec: str) -> tuple[str, str]:
    """Return a match spec's name and the rest, in which one space separates version and build string."""
    match = _SPEC_NAME.match(spec.strip())
    name, rest = match.groups() if match else (spec.strip(), "")
    return name.lower(), _LOOSE_SPACE.sub(r"\1\2", " ".join(rest.split()))


def _all_of(versions: Iterable[str], build: str) -> str:
    """Return one version part that accepts the versions that all of `versions` accept, with the build string."""
    bounds = list(dict.fromkeys(version for version in versions if version))
    bounds = [version for version in bounds if version != "*"] or bounds
    if len(bounds) > 1:
        bounds = [f"({version})" if "|" in version else version for version in bounds]
    return f"{','.join(bounds) or '*' * bool(build)} {build}".strip()


def file_parts(url: str, name: str, version: str) -> tuple[str, str]:
    """Return (subdir, build) from a URL .../SUBDIR/NAME-VERSION-BUILD.conda or .tar.bz2. Raises ValueError else."""
    folder, _, file = unquote(url).rpartition("/")
    subdir = folder.rpartition("/")[2]
    stem = file.removesuffix(".conda").removesuffix(".tar.bz2")
    parts = stem.rsplit("-", 2)
    if stem == file or len(parts) != 3 or (parts[0].lower(), parts[1]) != (name, version):
        raise ValueError(f"the URL of {name} is not that of {name} {version}")
    if not WORD.fullmatch(parts[2]):
        raise ValueError(f"the URL of {name} names no build")
    return subdir, parts[2]


def entry(
    name: str, version: str, manager: str, platform: str, depends: Sequence[str], url: str, hashes: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of one package in conda-lock.yml; `manager` is conda or pip."""
    yield f"- name: {_text(name)}"
    yield f"  version: {_text(version)}"
    yield f"  manager: {_text(manager)}"
    yield f"  platform: {_text(platform)}"
    yield "  dependencies:" if depends else "  dependencies: {}"
    for spec in depends:
        needed, _, rest = spec.partition(" ")
        yield f"    {_text(needed)}: {_text(rest)}"
    yield f"  url: {_text(url)}"
    yield "  hash:"
    for kind, digest in hashes.items():
        yield f"    {kind}: {_text(digest)}"
    yield '  category: "main"'
    yield "  optional: false"


def pip_entries(lock: CondaLock, pylock: str) -> str:
    """Return the packages that pip adds as entries of conda-lock.yml, to append to the output of `conda_format.render`.

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
            for wheel in wheel_files(listed.get(package.name, {}))
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
    lines = [f"name: {_text(lock.recipe)}", "channels:", *(f"- {_text(channel)}" for channel in channels)]
    lines += ["- nodefaults", "dependencies:", *(f"- {_text(name)}" for name in names)]
    if lock.pip.packages:
        lines += ["- pip:", *(f"  - {_text(f'{p.name}=={p.version}')}" for p in lock.pip.packages)]
    return "\n".join(lines) + "\n"


def explicit_text(lock: CondaLock) -> str:
    """Return conda's explicit list: URLs with md5, each after its dependencies, and pip's packages in comments."""
    lines = [f"# {lock.recipe}, {lock.target}; install with: conda create --name NAME --file THIS"]
    lines += [f"# platform: {conda_platform(Target.parse(lock.target))}", "@EXPLICIT"]
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


def export_name(kind: str, recipe: str, target: Target) -> str:
    """Return the name of an exported file; a `conda-lock` file holds all targets of an accelerator."""
    if kind == "conda-lock":
        return f"{recipe}-{target.accelerator}.conda-lock.yml"
    return f"{recipe}-{target.name}." + {"environment": "yml", "explicit": "txt"}[kind]
