"""What can be seen of any artifact, whatever its kind: settings, packages, files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

VENV, IMAGE, SQUASHFS, SIF = "venv", "image", "squashfs", "sif"
# Kinds of files that hold a whole file system.
SQUASHED = (SQUASHFS, SIF)
# What envbuild.json says under the same names as `About` (artifacts/state.py).
_IN_STATE = ("recipe", "recipe_digest", "lock_digest", "plan_digest", "target", "python",
             "python_version", "interpreter", "envbuild")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Item:
    """A path of an artifact. `sha256` is of a file's content, "" when it was not read.

    A hard link is the file that it leads to. `script` tells that the content begins with `#!`. `extra`
    holds device numbers and extended attributes as text, for comparing.
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
    """An installed distribution; `location` is the folder it lies in, relative to the artifact's root.

    `record` is the digest of its RECORD (`envbuild.record`), `content` that of the rows that are the same
    however it was installed; both "" where it has none. `expression` is its SPDX licence expression,
    `licenses` what its classifiers or its License field say; `info` is its .dist-info folder.
    """

    name: str
    version: str
    location: str
    record: str = ""
    content: str = ""
    expression: str = ""
    licenses: tuple[str, ...] = ()
    info: str = ""


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """A package that dpkg's database lists as installed."""

    name: str
    version: str
    arch: str


@dataclass(frozen=True, slots=True)
class LayerFact:
    """A layer of an image, from the lowest: its blob, the digest of its tar, its size in bytes as stored."""

    digest: str
    diff_id: str
    size: int
    title: str


@dataclass(frozen=True, slots=True)
class About:
    """What an artifact says of itself; "" or None for what it does not say.

    `identity` is the same wherever the artifact lies: an image's configuration digest, a venv's state
    digest. `digest` is an image's manifest digest, "" where it has no manifest of its own (daemons, docker
    archives). `place` is the file or folder, None when there is none. `env` may hold secrets: it is
    shown through `masked`. `stored` is in bytes. Of a file with a file system in it, `digest` is that of the
    file, `identity` that of the file system, and `filesystem` says how it is stored.
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
class Contents:
    """What lies in an artifact. Paths are relative to its root; `prefix` is the environment's folder
    ("" for a venv, None for an image without one). `os` is os-release(5), `config` the environment's
    pyvenv.cfg, `state` its envbuild.json; each empty when it is not there."""

    files: Mapping[str, Item]
    python: tuple[PythonPackage, ...] = ()
    debian: tuple[DebianPackage, ...] = ()
    prefix: str | None = None
    os: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of all files, each name counted."""
        return sum(item.size for item in self.files.values())


def completed(about: About, contents: Contents | None) -> About:
    """`about`, with what it does not say taken from the environment's envbuild.json."""
    if contents is None or not contents.state:
        return about
    said = {
        name: str(contents.state[name])
        for name in _IN_STATE
        if not getattr(about, name) and contents.state.get(name)
    }
    return replace(about, **said)  # type: ignore[arg-type]


class Opened(Protocol):
    """An artifact of any kind, opened for looking into it."""

    @property
    def about(self) -> About: ...

    def contents(self, *, hashes: bool) -> Contents:
        """All that lies in it; files' digests may be "" unless `hashes`. Raises BuildError."""
        ...
