"""The list of a built layer's files, beside them in the store; a layer without it is incomplete."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

_NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SourceManifest:
    """The files of a built layer as (path, sha256 or "-> target", bytes), and the newest glibc they need, or ""."""

    name: str
    version: str
    files: tuple[tuple[str, str, int], ...]
    glibc: str = ""

    @property
    def digest(self) -> str:
        """`sha256:…` of the list of files."""
        return "sha256:" + hashlib.sha256(json.dumps(self.files).encode()).hexdigest()


def list_files(tree: Path) -> tuple[tuple[str, str, int], ...]:
    """Return the files and links below `tree` for a manifest."""
    found = []
    for path in tree.rglob("*"):
        name = path.relative_to(tree).as_posix()
        if path.is_symlink():
            found.append((name, f"-> {os.readlink(path)}", 0))
        elif not path.is_dir():
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            found.append((name, digest, path.stat().st_size))
    return tuple(sorted(found))


def write_manifest(folder: Path, manifest: SourceManifest) -> None:
    """Write `manifest` into `folder`."""
    data = {"format": _FORMAT, "name": manifest.name, "version": manifest.version, "glibc": manifest.glibc}
    (folder / _NAME).write_text(json.dumps({**data, "files": manifest.files}, indent=0) + "\n", encoding="utf-8")
    (folder / _NAME).chmod(0o644)


def read_manifest(tree: Path) -> SourceManifest | None:
    """Return the manifest of the layer with the files in `tree`; None if it is invalid, or a file differs in size."""
    try:
        data = json.loads((tree.parent / _NAME).read_text(encoding="utf-8"))
        files = tuple((str(path), str(what), int(size)) for path, what, size in data["files"])
        sizes = ((os.lstat(tree / path).st_size, what, size) for path, what, size in files)
        if data["format"] != _FORMAT or any(now != size and not what.startswith("-> ") for now, what, size in sizes):
            return None
        return SourceManifest(str(data["name"]), str(data["version"]), files, str(data["glibc"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
