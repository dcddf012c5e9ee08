"""The data that can be read from an artifact of any kind: settings, packages, files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from envbuild.interpreter import minor_of

if TYPE_CHECKING:
    from envbuild.image.layout import Blobs
    from envbuild.image.limits import ImageLimits
    from envbuild.image.registry import Registry

VENV, CONDA, IMAGE, SQUASHFS, SIF = "venv", "conda", "image", "squashfs", "sif"
# Kinds of environments in a folder of the host.
FOLDERS = (VENV, CONDA)
# Kinds of files that contain a whole file system.
SQUASHED = (SQUASHFS, SIF)
# Fields that envbuild.json (contract/state.py) and `Description` have in common.
IN_STATE = (
    "recipe",
    "recipe_digest",
    "lock_digest",
    "plan_digest",
    "target",
    "python",
    "python_version",
    "interpreter",
    "envbuild",
)


@dataclass(frozen=True, slots=True)
class Item:
    """A path of an artifact.

    `sha256` is the digest of a file's content, "" if it was not read. A hard link appears as the file to which it
    leads. `script` says whether the content begins with `#!`. `extra` holds device numbers and extended attributes as
    text, for comparisons.
    """

    kind: str
    mode: int = 0
    size: int = 0
    sha256: str = ""
    target: str = ""
    uid: int = 0
    gid: int = 0
    script: bool = False
    extra: str = ""


@dataclass(frozen=True, slots=True)
class PythonPackage:
    """An installed distribution; `location` is its folder, relative to the artifact's root.

    `record` is the digest of its RECORD (`envbuild.base.packages`), `content` that of the rows that do not depend
    on the installer; both are "" without a RECORD. `expression` is its SPDX licence expression, `licenses` are the
    licences in its classifiers or its License field; `info` is its .dist-info folder. `size` is the sum of the sizes
    in RECORD.
    """

    name: str
    version: str
    location: str
    record: str = ""
    content: str = ""
    expression: str = ""
    licenses: tuple[str, ...] = ()
    info: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class CondaRecord:
    """A package that a conda-meta folder records.

    `location` is the folder of that environment, relative to the artifact's root. `channel` is a URL without
    credentials, `archive` the format of the package's file (`conda` or `tar.bz2`), `sha256` that file's digest in
    hexadecimal, and `license` the licence that the package names. `record` is the digest of its list of files
    (`envbuild.base.packages.conda_digest`), `size` the bytes of those files. All of these may be "", the size 0.
    """

    name: str
    version: str
    build: str
    location: str
    subdir: str = ""
    channel: str = ""
    archive: str = "conda"
    sha256: str = ""
    license: str = ""
    record: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class SourceBuilt:
    """A source layer in an environment; `location` is that environment's folder, relative to the artifact's root.

    `source` is the sha256 of the source archive in hexadecimal, `files` the digest of the installed files, `licences`
    are the paths of licence texts below `location`.
    """

    name: str
    version: str
    location: str
    source: str = ""
    files: str = ""
    licences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """A package that dpkg's database lists as installed."""

    name: str
    version: str
    arch: str


@dataclass(frozen=True, slots=True)
class LayerFact:
    """A layer of an image, listed from the lowest up: the digests of its blob and its tar, its stored size in bytes."""

    digest: str
    diff_id: str
    size: int
    title: str


@dataclass(frozen=True, slots=True)
class Description:
    """An artifact's own description; missing data is "" or None.

    `identity` is the same wherever the artifact is: an image's configuration digest, an environment's state digest.
    `digest` is an image's manifest digest, "" if it has no manifest of its own (daemons, docker archives). For a file
    with a file system in it, `digest` is the digest of the file, `identity` that of the file system, and `filesystem`
    says how it is stored. `place` is the file or folder, None if there is none. `env` may hold secrets: show it only
    through `masked`. `stored` is in bytes.
    """

    kind: str
    spelling: str
    identity: str = ""
    digest: str = ""
    place: Path | None = None
    recipe: str = ""
    recipe_digest: str = ""
    lock_digest: str = ""
    base_lock_digest: str = ""
    plan_digest: str = ""
    target: str = ""
    platform: str = ""
    python: str = ""
    python_version: str = ""
    interpreter: str = ""
    base: str = ""
    base_digest: str = ""
    envbuild: str = ""
    created: str = ""
    stored: int | None = None
    layers: tuple[LayerFact, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict, repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    entrypoint: tuple[str, ...] = field(default=(), repr=False)
    cmd: tuple[str, ...] = field(default=(), repr=False)
    workdir: str = ""
    user: str = ""
    filesystem: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The content of an artifact; paths are relative to its root.

    `prefix` is the environment's folder ("" for a venv or conda environment, None for an image without one) and
    `environment` its kind, VENV or CONDA, "" without one. `os` is os-release(5), `config` the environment's pyvenv.cfg,
    `state` its envbuild.json; each is empty if missing. `recorded` has, by path, the files of conda packages in `bin`,
    those that describe a Python package, and those into which conda wrote the path of their environment: the sha256 in
    the environment and the one in the package, "" for a file that is not in it, such as the script of an entry point.
    `built` are the source layers.
    """

    files: Mapping[str, Item]
    python: tuple[PythonPackage, ...] = ()
    debian: tuple[DebianPackage, ...] = ()
    prefix: str | None = None
    os: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""
    conda: tuple[CondaRecord, ...] = ()
    recorded: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    built: tuple[SourceBuilt, ...] = ()

    @property
    def size(self) -> int:
        """The bytes of all files; a file counts once for each of its names."""
        return sum(item.size for item in self.files.values())

    @property
    def own_conda(self) -> tuple[CondaRecord, ...]:
        """The conda packages of the environment itself, without other environments beside or inside it."""
        return tuple(package for package in self.conda if package.location == self.prefix)


def completed(about: Description, contents: Inventory | None) -> Description:
    """Return `about` with missing fields from envbuild.json, and Python's version from the conda packages."""
    if contents is None:
        return about
    state = contents.state
    fields: dict[str, Any] = {
        name: str(state[name]) for name in IN_STATE if not getattr(about, name) and state.get(name)
    }
    about = replace(about, **fields)
    version = next((p.version for p in contents.own_conda if p.name == "python"), "")
    if about.python or not version:
        return about
    return replace(about, python=minor_of(version), python_version=version)


@dataclass(frozen=True, slots=True)
class ArtifactReader:
    """An artifact of any kind, opened for reading; `read` is called with the value of `hashes`.

    `layers` brings an image's layers to this machine, and returns their files in the order of `about.layers`.
    """

    about: Description
    read: Callable[[bool], Inventory]
    layers: Callable[[], Sequence[Path]] = tuple

    def contents(self, *, hashes: bool) -> Inventory:
        """Return the content of the artifact; without `hashes`, digests of files may be "". Raises BuildError."""
        return self.read(hashes)


class ReadStore(Protocol):
    """The folders in which a reader keeps listings of layers, and blobs that it fetched or unpacked."""

    @property
    def root(self) -> Path: ...

    @property
    def blobs(self) -> Blobs: ...

    def folder(self, *parts: str) -> Path:
        """Return a folder below `root`, which is created if it is missing. Raises BuildError."""

    def working(self, *parts: str) -> AbstractContextManager[Path]:
        """Return a new folder below `parts`, which is removed at the end of the context. Raises BuildError."""


class ReadSite(Protocol):
    """The settings of a site that reading depends on."""

    @property
    def limits(self) -> ImageLimits: ...


class ReadAccess(Protocol):
    """The means of a reader: limits, folders, and the ways to a daemon and to registries. An Environment has them."""

    @property
    def variables(self) -> Mapping[str, str]: ...

    @property
    def site(self) -> ReadSite: ...

    @property
    def store(self) -> ReadStore: ...

    def registry(self, image: str) -> Registry:
        """Return the registry of `image`."""


@dataclass(frozen=True, slots=True)
class Request:
    """An artifact to open.

    `rest` follows the form's name, `arch` (x86_64, aarch64) is None for any architecture. `stack` gets everything that
    must be closed or removed afterwards.
    """

    spelling: str
    rest: str
    arch: str | None
    access: ReadAccess
    stack: ExitStack
