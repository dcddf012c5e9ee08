"""Conda lock of one target: exact packages by hash, and the packages that pip adds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from envbuild.lock.format import Lock, LockedPackage
from envbuild.recipe.targets import Target

_PLATFORMS = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}


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

    `recipe_digest` covers every part of the recipe that affects the lock. `packages` are sorted by name. `pip`
    holds the packages that uv adds; it has none if the recipe requests none.
    """

    recipe: str
    target: str
    recipe_digest: str
    packages: tuple[CondaPackage, ...]
    pip: Lock

    @property
    def digest(self) -> str:
        """sha256 of the packages to install, independent of the file's layout and of their source."""
        content = [
            self.target,
            [[p.name, p.version, p.build, p.subdir, p.sha256] for p in self.packages],
            self.pip.digest,
        ]
        return "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def python_version(self) -> str:
        """Exact version of Python."""
        return next(p.version for p in self.packages if p.name == "python")


def conda_platform(target: Target) -> str:
    """Return the platform in conda's spelling: linux-64 or linux-aarch64."""
    return _PLATFORMS[target.arch]


def conda_lock_name(target: Target) -> str:
    """Return the name of the file, beside the recipe, with the conda packages of all targets of one accelerator.

    conda-lock.yml has one set of packages per platform, so CPU and CUDA targets need separate files. micromamba
    requires the suffix `conda-lock.yml`.
    """
    return f"{target.accelerator}.conda-lock.yml"


def pip_lock_name(target: Target) -> str:
    """Return the name of the file, beside the recipe, with the packages that pip adds to `target`'s conda packages."""
    return f"{target.name}.conda.requirements.txt"


def no_pip(recipe: str, target: str, python: str, platform: str, recipe_digest: str) -> Lock:
    """Return an empty pip lock, for a recipe without pip requirements."""
    packages: tuple[LockedPackage, ...] = ()
    return Lock(recipe, target, python, platform, recipe_digest, packages)
