"""The conda lock of one target: exact packages by hash, and what pip adds to them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from envbuild.lock.format import Lock, LockedPackage
from envbuild.recipe.targets import Target

_PLATFORMS = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}


@dataclass(frozen=True, slots=True)
class CondaPackage:
    """One conda package. `url` is canonical: that of its channel, never of a mirror, never with credentials.

    `md5` and `sha256` are hexadecimal, `depends` match specs ("numpy >=1.21"); `subdir` is a platform
    or "noarch".
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
        """NAME-VERSION-BUILD.conda or .tar.bz2."""
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """NAME-VERSION-BUILD: what caches and conda-meta call it."""
        return f"{self.name}-{self.version}-{self.build}"

    @property
    def channel(self) -> str:
        """The URL of its channel."""
        return self.url.rsplit("/", 2)[0]


@dataclass(frozen=True, slots=True)
class CondaLock:
    """What a target's conda environment is made of. `recipe_digest` covers all of the recipe that decides it.

    `packages` are in the order of names; `pip` is what uv adds, without packages where the recipe asks for none.
    """

    recipe: str
    target: str
    recipe_digest: str
    packages: tuple[CondaPackage, ...]
    pip: Lock

    @property
    def digest(self) -> str:
        """sha256 of what will be installed, independent of layout and of where it comes from."""
        content = [
            self.target,
            [[p.name, p.version, p.build, p.subdir, p.sha256] for p in self.packages],
            self.pip.digest,
        ]
        return "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def python_version(self) -> str:
        """Python's exact version."""
        return next(p.version for p in self.packages if p.name == "python")


def conda_platform(target: Target) -> str:
    """The platform as conda spells it: linux-64 or linux-aarch64."""
    return _PLATFORMS[target.arch]


def conda_lock_name(target: Target) -> str:
    """The file, beside the recipe, with the conda packages of all targets of one accelerator.

    conda-lock.yml has one set of packages a platform, so that cpu and CUDA targets have a file each. It ends
    as micromamba wants it.
    """
    return f"{target.accelerator}.conda-lock.yml"


def pip_lock_name(target: Target) -> str:
    """The file, beside the recipe, with what pip adds to the conda packages of `target`."""
    return f"{target.name}.conda.requirements.txt"


def no_pip(recipe: str, target: str, python: str, platform: str, recipe_digest: str) -> Lock:
    """The pip part of a recipe that asks for none."""
    packages: tuple[LockedPackage, ...] = ()
    return Lock(recipe, target, python, platform, recipe_digest, packages)
