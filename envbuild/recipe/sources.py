"""Source layers of an artifact, specified so that every build gives the same result."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.base.packages import json_digest


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """One distribution: normalised `name` (PEP 503), exact `version`, sha256 of each fitting wheel."""

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

    `system` is "autotools", "make" or "wheel". `url` is the source of the archive, `sha256` (hexadecimal) identifies
    it. `configure` holds all options of configure (autotools) or all variables of make, so that nothing depends on the
    build host. In options, {prefix} is the artifact's environment, {NAME} the path of the layer NAME, and {cuda} the
    path of CUDA's headers. `requires` are layers that are built first. `tools` are programs that a build needs,
    `packages` the Debian packages with these programs and with libraries. `licences` are patterns of licence files in
    the source. `check` is a command of the artifact, with arguments, that tests the layer. `environment` names the
    build's other inputs: the compiler of a host, the digest of a builder image, the packages that a Python project is
    compiled against; it is "" until they are known. `wheels` are wheels that the build reads. `build` are wheels that
    the build of a Python project runs: pip, setuptools, cmake; if it is `isolated`, it sees no other packages.
    It is `locked` if its archive is that of a lock, and not of [layers]; `indexes` are the target's.
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
    wheels: tuple[LockedPackage, ...] = ()
    tools: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    environment: str = ""
    build: tuple[LockedPackage, ...] = ()
    isolated: bool = False
    locked: bool = False
    indexes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """`sha256:…` over all inputs of the layer's files, except the contents of the layers that it requires."""
        content = [
            "source",
            1,
            self.name,
            self.version,
            self.target,
            self.system,
            self.sha256,
            self.configure,
            [patch.sha256 for patch in self.patches],
            self.requires,
            [[wheel.name, wheel.version] for wheel in self.wheels],
            self.packages,
            self.environment,
        ]
        if self.build:  # keeps the digest of layers without build wheels unchanged
            content.append([[wheel.name, wheel.version] for wheel in self.build])
        if self.isolated:
            content.append("isolated")
        return json_digest(content)


@dataclass(frozen=True, slots=True)
class HostLayer:
    """A layer that the nodes provide at `path` (libfabric of a Slingshot system)."""

    name: str
    version: str
    path: str
