"""What is built from source for an artifact: described so that every builder makes the same of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuildWheel:
    """A wheel whose headers or libraries a build reads, such as CUDA's: any file with one of `hashes` (sha256)."""

    name: str
    version: str
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch file on this host, and its sha256."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """One layer that is built from source.

    `system` is "autotools", "make" or "wheel". `url` is where the archive comes from, `sha256` (hexadecimal) says
    which one it is. `configure` holds options of configure (autotools) or variables of make, all of them: nothing is
    left to what the build machine happens to have. In options {prefix} stands for the artifact's environment,
    {NAME} for where the layer NAME is, {cuda} for CUDA's headers. `requires` are layers that come before.
    `tools` are programs that a build needs, `packages` the Debian packages that have them and libraries.
    `licences` are patterns of licence files in the source. `check` is a command of the artifact, with its arguments,
    that shows that the layer works. `environment` is what the build depends on besides: the compiler of a host,
    the digest of a builder image, the packages that a Python project is compiled against; "" until it is known.
    `build` are the wheels that the build of a Python project runs: pip, setuptools, cmake.
    """

    name: str
    version: str
    target: str
    system: str
    url: str
    sha256: str
    configure: tuple[str, ...] = ()
    patches: tuple[Patch, ...] = ()
    requires: tuple[str, ...] = ()
    wheels: tuple[BuildWheel, ...] = ()
    tools: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    environment: str = ""
    build: tuple[BuildWheel, ...] = ()

    @property
    def digest(self) -> str:
        """`sha256:…` of all that decides the layer's files, but for the layers that it requires."""
        content = [
            "source", 1, self.name, self.version, self.target, self.system, self.sha256, self.configure,
            [patch.sha256 for patch in self.patches], self.requires,
            [[wheel.name, wheel.version] for wheel in self.wheels], self.packages, self.environment,
        ]  # fmt: skip
        if self.build:  # a layer without them has the digest that it always had
            content.append([[wheel.name, wheel.version] for wheel in self.build])
        return "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class HostLayer:
    """A layer that the nodes have at `path` (libfabric of a Slingshot system)."""

    name: str
    version: str
    path: str
