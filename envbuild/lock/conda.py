"""Conda lock of one target: exact packages by hash, and the packages that pip adds."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from envbuild.lock.format import Lock
from envbuild.names import normalise
from envbuild.recipe.targets import Target

# A version, build or platform.
WORD = re.compile(r"[^\s/#\"'\\]+")


@dataclass(frozen=True, slots=True)
class CondaPackage:
    """One conda package.

    `url` is canonical: the URL at its channel, never at a mirror, and without credentials. `md5` and `sha256` are
    hexadecimal, `depends` holds match specs ("numpy >=1.21"), `subdir` is a platform or "noarch".
    """

    name: str
    version: str
    build: str
    subdir: str
    url: str
    md5: str
    sha256: str
    depends: tuple[str, ...] = ()

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
    """

    recipe: str
    target: str
    recipe_digest: str
    packages: tuple[CondaPackage, ...]
    pip: Lock

    @property
    def digest(self) -> str:
        """sha256 of the packages to install, independent of the file's layout and of their source."""
        packages = [[p.name, p.version, p.build, p.subdir, p.sha256] for p in self.packages]
        content = [self.target, packages, self.pip.digest]
        return "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def versions(self) -> dict[str, str]:
        """Version of each package by its name; a conda package overrides pip's of the same name."""
        return self.pip.versions | {package.name: package.version for package in self.packages}

    def knows(self, name: str) -> bool:
        """Return whether `name` is a package of the lock, conda's or pip's."""
        return not self.versions.keys().isdisjoint((name.lower(), normalise(name)))


def conda_platform(target: Target) -> str:
    """Return the platform in conda's spelling: linux-64 or linux-aarch64."""
    return {"x86_64": "linux-64", "aarch64": "linux-aarch64"}[target.arch]


@functools.cache
def conda_data() -> dict[str, Any]:
    """Return the contents of data/conda.toml."""
    from importlib import resources

    text = resources.files("envbuild.data").joinpath("conda.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def canonical_depends(specs: Iterable[str]) -> tuple[str, ...]:
    """Return match specs in the form that the format can hold: one per name, sorted by name.

    Versions of several specs for one name are joined; a spec that names a build is the most specific and kept alone.
    """
    found: dict[str, str] = {}
    for spec in specs:
        name, _, rest = spec.strip().partition(" ")
        name, rest = name.lower(), " ".join(rest.split())
        before = found.get(name, "")
        if " " in before or not rest or rest == before:
            rest = before
        elif before and " " not in rest and rest != "*" and before != "*":
            rest = f"{before},{rest}"
        found[name] = rest
    return tuple(f"{name} {found[name]}".strip() for name in sorted(found))


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
