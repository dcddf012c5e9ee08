"""Source archives for tests: a small project of our own, and libfabric as Debian has it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.apt import no_archive, settings

from envbuild.recipe.sources import Patch, SourceLayer

AUTOTOOLS = Path(__file__).resolve().parent / "autotools"
# What `apt-get source` of trixie checks it by, too: https://tracker.debian.org/pkg/libfabric, 2.1.0-1.1.
_LIBFABRIC = "1a66369772d5bb151737214af1c478993e969cf298e8f9ed369e7a2ab8d8c6df"


@dataclass(frozen=True)
class SourceArchive:
    """A source archive on this machine."""

    path: Path
    sha256: str
    version: str

    @property
    def url(self) -> str:
        return self.path.as_uri()


def pack(name: str, into: Path, edits: Mapping[str, str | None] | None = None) -> SourceArchive:
    """The project `name` of lab/autotools as an archive in `into`. `edits` maps files to another text, None to none."""
    folder = into / f"{name}-1.0"
    shutil.copytree(AUTOTOOLS / name, folder)
    for path, text in (edits or {}).items():
        if text is None:
            (folder / path).unlink()
        else:
            (folder / path).write_text(text)
    archive = into / f"{name}-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    shutil.rmtree(folder)
    return SourceArchive(archive, _sha256(archive), "1.0")


def layer(archive: SourceArchive, name: str, arch: str, **other: object) -> SourceLayer:
    """The description of a layer that is built from `archive`; `other` fields as SourceLayer has them."""
    fields = {
        "name": name,
        "version": archive.version,
        "target": f"cpu-{arch}",
        "system": "autotools",
        "url": archive.url,
        "sha256": archive.sha256,
        "tools": ("make",),
        **other,
    }
    return SourceLayer(**fields)  # type: ignore[arg-type]


def patch(path: Path, text: str) -> Patch:
    """A patch file with this text."""
    path.write_text(text)
    return Patch(str(path), _sha256(path))


def missing() -> str | None:
    """Why Debian's source packages cannot be had on this machine, or None."""
    if shutil.which("apt-get") is None:
        return "not installed: apt-get"
    return no_archive("trixie")


def libfabric(into: Path) -> SourceArchive:
    """libfabric 2.1.0 as Debian's source package has it, without a configure script, by the host's apt."""
    apt = into / "apt"
    env = settings(apt, "trixie", "deb-src")
    said = ""
    # A mirror may have dropped the packaging of a superseded revision; the upstream archive alone is wanted.
    for command in (["update"], ["source", "--download-only", "--only-source", "--tar-only", "libfabric"]):
        done = subprocess.run(["apt-get", "-q", *command], cwd=into, env=env, capture_output=True, text=True)
        said += done.stderr
    shutil.rmtree(apt)
    found = sorted(into.glob("libfabric_2.1.0.orig.tar.*"))
    assert found, f"apt-get source libfabric brought nothing: {said}"
    assert _sha256(found[0]) == _LIBFABRIC, f"{found[0].name} has sha256 {_sha256(found[0])}"
    return SourceArchive(found[0], _LIBFABRIC, "2.1.0")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
