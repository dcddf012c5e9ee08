"""The files of a source layer in an environment, and the list that records them.

`share/envbuild/layers/NAME.json` is for a layer what RECORD is for a wheel: for each file its path below the
environment's root, size in bytes and sha256 (hexadecimal), for each link its text. Needs only Python 3.9:
environments are surveyed by their own interpreters.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.artifacts.installed import FileReport, digest_of, walk_files

FOLDER = "share/envbuild/layers"
FORMAT = 1


@dataclass(frozen=True)
class LayerFile:
    """A file of a layer, or a link, which has a `target` and neither size nor digest."""

    path: str
    size: int = 0
    sha256: str = ""
    target: str = ""
    executable: bool = False


@dataclass(frozen=True)
class LayerList:
    """The list of a layer's files; `sha256` is the digest of the source archive, `licences` are paths of texts."""

    name: str
    version: str
    sha256: str
    licences: tuple[str, ...]
    files: tuple[LayerFile, ...]

    @property
    def digest(self) -> str:
        """sha256 of the installed files: paths, contents, links, permission to execute."""
        rows = [[f.path, f.sha256 or f"-> {f.target}", f.executable] for f in self.files]
        return "sha256:" + hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()

    def render(self) -> bytes:
        """Return the text of the list, the same each time."""
        data = {
            "format": FORMAT,
            "name": self.name,
            "version": self.version,
            "source": self.sha256,
            "licences": list(self.licences),
            "files": [_row(one) for one in self.files],
        }
        return (json.dumps(data, indent=1) + "\n").encode()


def list_path(name: str) -> str:
    """Return the path of the list of the layer `name`, below the environment's root."""
    return f"{FOLDER}/{name}.json"


def list_files(folder: Path, known: Mapping[str, str] = {}) -> tuple[LayerFile, ...]:
    """Return every file and link below `folder`, sorted by path; `known` has sha256 of files that need not be read.

    Raises ValueError for an entry of another type, and OSError.
    """
    found = []
    for path in walk_files(folder):
        info = os.lstat(path)
        name = os.path.relpath(path, folder)
        if stat.S_ISLNK(info.st_mode):
            found.append(LayerFile(name, target=os.readlink(path)))
        elif stat.S_ISREG(info.st_mode):
            executable = bool(info.st_mode & 0o111)
            digest = known.get(name) or _digest(path)
            found.append(LayerFile(name, info.st_size, digest, executable=executable))
        else:
            raise ValueError(f"{name} is neither file nor link")
    linked = (
        LayerFile(os.path.relpath(path, folder), target=os.readlink(path))
        for parent, folders, _ in os.walk(folder)
        for path in (os.path.join(parent, name) for name in folders)
        if os.path.islink(path)
    )
    return tuple(sorted([*found, *linked], key=lambda one: one.path))


def parse_list(text: bytes) -> LayerList:
    """Return the list in `text`. Raises ValueError, KeyError or TypeError for an invalid one."""
    data = json.loads(text)
    if not isinstance(data, dict) or data["format"] != FORMAT:
        raise ValueError("another format")
    files = tuple(_file(row) for row in data["files"])
    licences = tuple(map(str, data["licences"]))
    return LayerList(
        str(data["name"]), str(data["version"]), str(data["source"]), licences, files
    )  # fmt: skip


def check_layers(root: Path, report: FileReport) -> dict[str, str]:
    """Compare the files of all layers in the environment at `root` with their lists; add differences to `report`.

    Returns layer name → digest of the files in its list, "" for an invalid list.
    """
    found: dict[str, str] = {}
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            known = parse_list(path.read_bytes())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            found[path.stem] = ""
            continue
        found[known.name] = known.digest
        for one in known.files:
            report.files += 1
            report.bytes += one.size
            state = _compare(root / one.path, one)
            if state:
                wrong = report.missing if state == "missing" else report.altered
                wrong.append(f"{one.path} (layer {known.name})")
    return found


def quick_lists(root: Path) -> set[str]:
    """Return the names of the layers whose lists are in the environment at `root`."""
    return {path.stem for path in (root / FOLDER).glob("*.json")}


def licences_of(files: Iterable[LayerFile], name: str) -> tuple[str, ...]:
    """Return the paths of licence texts among the files of the layer `name`."""
    return tuple(one.path for one in files if one.path.startswith(f"share/licenses/{name}/"))


def _row(one: LayerFile) -> dict[str, Any]:
    if one.target:
        return {"path": one.path, "target": one.target}
    row: dict[str, Any] = {"path": one.path, "size": one.size, "sha256": one.sha256}
    return {**row, "executable": True} if one.executable else row


def _file(row: Mapping[str, Any]) -> LayerFile:
    path = str(row["path"])
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path} is not below the environment")
    if "target" in row:
        return LayerFile(path, target=str(row["target"]))
    executable = row.get("executable") is True
    return LayerFile(path, int(row["size"]), str(row["sha256"]), executable=executable)


def _compare(path: Path, wanted: LayerFile) -> str:
    """Return "missing", "altered", or "" for a file that matches the list."""
    try:
        info = os.lstat(path)
        if wanted.target:
            good = stat.S_ISLNK(info.st_mode) and os.readlink(path) == wanted.target
        else:
            good = stat.S_ISREG(info.st_mode) and info.st_size == wanted.size
            good = good and _digest(os.fspath(path)) == wanted.sha256
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError:
        return "altered"
    return "" if good else "altered"


def _digest(path: str) -> str:
    with open(path, "rb") as stream:
        return digest_of(stream, "sha256").hex()
