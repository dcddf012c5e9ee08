"""Lists of the files of source layers in an environment, and whether the files match them.

`share/envbuild/layers/NAME.json` lists every file of a layer: its path below the environment's root, its size in bytes
and its sha256 (hexadecimal), or the text of a link.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.base.files import parse_json, sha256_of
from envbuild.base.packages import json_digest
from envbuild.contract.installed import HOST, FileReport, Files, walk_files
from envbuild.contract.state import LAYER_LISTS, list_path

_FORMAT = 1


@dataclass(frozen=True)
class LayerFile:
    """A file of a layer, or a link, which has a `target` and neither size nor digest."""

    path: str
    size: int = 0
    sha256: str = ""
    target: str = ""
    executable: bool = False

    @property
    def mode(self) -> int:
        """The permissions of the installed file."""
        return 0o755 if self.executable else 0o644

    def row(self) -> dict[str, Any]:
        """Return the file's row in the list."""
        if self.target:
            return {"path": self.path, "target": self.target}
        row: dict[str, Any] = {"path": self.path, "size": self.size, "sha256": self.sha256}
        return {**row, "executable": True} if self.executable else row

    def is_at(self, path: str, files: Files = HOST) -> bool:
        """Return whether `path` is this file. Raises OSError."""
        target = files.target(path)
        if self.target or target:
            return target == self.target
        return files.size(path) == self.size and files.digest(path).hex() == self.sha256


@dataclass(frozen=True)
class LayerList:
    """The list of a layer's files; `sha256` is the digest of the source archive."""

    name: str
    version: str
    sha256: str
    files: tuple[LayerFile, ...]

    @property
    def licences(self) -> tuple[str, ...]:
        """The paths of the licence texts among the files."""
        return tuple(file.path for file in self.files if file.path.startswith(f"share/licenses/{self.name}/"))

    @property
    def digest(self) -> str:
        """sha256 of the installed files: paths, contents, links, permission to execute."""
        rows = [[f.path, f.sha256 or f"-> {f.target}", f.executable] for f in self.files]
        return json_digest(sorted(rows))

    def render(self) -> bytes:
        """Return the text of the list, the same each time."""
        data = {
            "format": _FORMAT,
            "name": self.name,
            "version": self.version,
            "source": self.sha256,
            "licences": self.licences,
            "files": [file.row() for file in self.files],
        }
        return (json.dumps(data, indent=1) + "\n").encode()

    def write(self, root: Path) -> None:
        """Write the list into the environment at `root`."""
        path = root / list_path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.render())


def list_files(folder: Path, digest: Callable[[Path], str] = sha256_of) -> tuple[LayerFile, ...]:
    """Return every file and link below `folder`, sorted by path; `digest` returns the sha256 of a file.

    Raises ValueError for an entry of another type, and OSError.
    """
    linked = (
        path
        for parent, folders, _ in os.walk(folder)
        for path in (os.path.join(parent, name) for name in folders)
        if os.path.islink(path)
    )
    files = []
    for path in (*walk_files(folder), *linked):
        info = os.lstat(path)
        name = os.path.relpath(path, folder)
        if stat.S_ISLNK(info.st_mode):
            files.append(LayerFile(name, target=os.readlink(path)))
        elif stat.S_ISREG(info.st_mode):
            sha256 = digest(Path(path))
            files.append(LayerFile(name, info.st_size, sha256, executable=bool(info.st_mode & 0o111)))
        else:
            raise ValueError(f"{name} is neither file nor link")
    return tuple(sorted(files, key=lambda row: row.path))


def parse_list(text: bytes) -> LayerList:
    """Return the list in `text`. Raises ValueError, KeyError or TypeError for an invalid one."""
    data = parse_json(text)
    if not isinstance(data, dict) or data["format"] != _FORMAT:
        raise ValueError("another format")
    files = tuple(_file(row) for row in data["files"])
    return LayerList(str(data["name"]), str(data["version"]), str(data["source"]), files)


def _file(row: Mapping[str, Any]) -> LayerFile:
    path = str(row["path"])
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path} is not below the environment")
    if "target" in row:
        return LayerFile(path, target=str(row["target"]))
    if type(row["size"]) is not int:
        raise ValueError(f"the size of {path} is no number")
    return LayerFile(path, row["size"], str(row["sha256"]), executable=row.get("executable") is True)


def check_layers(root: Path, report: FileReport | None, files: Files = HOST) -> dict[str, str]:
    """Return name → digest of the layers' lists, "" for an invalid one; add differences of their files to `report`."""
    faults: dict[str, str] = {}
    lists = f"{root}/{LAYER_LISTS}"
    for name in sorted(files.names(lists)) if files.is_folder(lists) else ():
        if not name.endswith(".json"):
            continue
        try:
            known = parse_list(files.read(f"{lists}/{name}"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            faults[name.removesuffix(".json")] = ""
            continue
        faults[known.name] = known.digest
        for row in known.files if report else ():
            assert report is not None
            report.bytes += row.size
            report.check(f"{row.path} (layer {known.name})", partial(row.is_at, f"{root}/{row.path}", files))
    return faults
