"""The list of a built layer's files, beside them in the store.

It is written last, so that a layer without it is incomplete.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SourceManifest:
    """The files of a built layer.

    `files` are (path, sha256 or "-> target" for a link, size in bytes), sorted by path; `glibc` is the newest glibc
    that they need, "" for none.
    """

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
    for here, folders, names in os.walk(tree):
        for name in names + [one for one in folders if os.path.islink(os.path.join(here, one))]:
            path = Path(here, name)
            short = path.relative_to(tree).as_posix()
            if path.is_symlink():
                found.append((short, f"-> {os.readlink(path)}", 0))
            else:
                with path.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                found.append((short, digest, path.stat().st_size))
    return tuple(sorted(found))


def write_manifest(folder: Path, manifest: SourceManifest) -> None:
    """Write `manifest` into `folder`."""
    data = {
        "format": _FORMAT, "name": manifest.name, "version": manifest.version, "glibc": manifest.glibc,
        "files": manifest.files,
    }  # fmt: skip
    (folder / NAME).write_text(json.dumps(data, indent=0) + "\n", encoding="utf-8")
    (folder / NAME).chmod(0o644)


def read_manifest(tree: Path) -> SourceManifest | None:
    """Return the manifest of the layer with the files in `tree`.

    Returns None when it is missing or invalid, or when a file is missing or has another size.
    """
    try:
        data = json.loads((tree.parent / NAME).read_text(encoding="utf-8"))
        files = tuple((str(path), str(what), int(size)) for path, what, size in data["files"])
        if data["format"] != _FORMAT:
            return None
        for path, what, size in files:
            stat = os.lstat(tree / path)
            if not what.startswith("-> ") and stat.st_size != size:
                return None
        return SourceManifest(str(data["name"]), str(data["version"]), files, str(data["glibc"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
