"""Installed files, and whether they match their lists: RECORDs of distributions, lists of source layers.

The RECORD file (PyPA "Recording installed projects", PEP 376 and 627) names every file of a distribution with its
sha256 and size. `share/envbuild/layers/NAME.json` does it for a source layer: for each file its path below the
environment's root, size in bytes and sha256 (hexadecimal), for each link its text. Needs only Python 3.9: environments
are surveyed by their own interpreters.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.files import open_regular, parse_json, read_regular
from envbuild.fingerprint import record_digest
from envbuild.names import normalise

LAYER_LISTS = "share/envbuild/layers"
_FORMAT = 1


@dataclass(frozen=True)
class Distribution:
    """An installed distribution; `record` is the sha256 of its sorted RECORD."""

    name: str
    version: str
    record: str


def distributions(site_packages: Path, without: Collection[str] = frozenset()) -> dict[str, Distribution]:
    """Return every distribution in `site_packages` by normalized name, except .dist-info folders in `without`.

    A second distribution with the same name is returned as "name (second)": otherwise one of them would be hidden from
    comparisons.
    """
    found: dict[str, Distribution] = {}
    for folder in sorted(set(os.listdir(site_packages)).difference(without)):
        if not folder.endswith((".dist-info", ".egg-info")):
            continue
        raw, _, version = folder.rsplit(".", 1)[0].partition("-")
        try:
            digest = record_digest(read_regular(site_packages / folder / "RECORD"))
        except OSError:
            digest = "missing"
        name = normalise(raw)
        found[f"{name} (second)" if name in found else name] = Distribution(name, version, digest)
    return found


def names_and_versions(site_packages: Path) -> dict[str, str]:
    """Return normalized name → version from folder names alone, as a quick form of `distributions`."""
    stems = [entry[: -len(".dist-info")] for entry in os.listdir(site_packages) if entry.endswith(".dist-info")]
    return {normalise(raw): version for raw, _, version in (stem.partition("-") for stem in stems)}


@dataclass
class FileReport:
    """The comparison of all files with the RECORDs. Paths are relative to site-packages."""

    files: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    unowned: list[str] = field(default_factory=list)

    def check(self, name: str, is_intact: Callable[[], bool]) -> None:
        """Count the file `name`, and add it to the missing or the altered files if it is not intact."""
        self.files += 1
        try:
            intact = is_intact()
        except (FileNotFoundError, NotADirectoryError):
            self.missing.append(name)
            return
        except (OSError, ValueError, TypeError):  # TypeError: of an algorithm without a fixed length
            intact = False
        if not intact:
            self.altered.append(name)


def check_files(
    site_packages: Path, without: Collection[str] = frozenset(), others: Collection[str] = frozenset()
) -> FileReport:
    """Read every file that a RECORD names and compare size and sha256; list files that no RECORD names.

    Left out are __pycache__, which Python writes and renews by itself, the .dist-info folders in `without`, and those
    files without a RECORD whose absolute paths are in `others`.
    """
    report = FileReport()
    owned: set[str] = set(others)
    for folder in sorted(site_packages.glob("*.dist-info")):
        if folder.name in without:
            continue
        for relative, expected, size in _record_entries(folder / "RECORD"):
            path = os.path.normpath(os.path.join(site_packages, relative))
            owned.add(path)
            if expected:
                report.check(relative, partial(_is_recorded, path, expected, size))
                report.bytes += size or 0
    root = os.fspath(site_packages)
    for path in walk_files(site_packages):
        if path not in owned and "/__pycache__/" not in path:
            report.unowned.append(os.path.relpath(path, root))
    return report


def walk_files(folder: Path) -> Iterator[str]:
    """Yield, in a fixed order, every file below `folder` and every link that leads to no folder; follow no links."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            yield os.path.join(parent, name)


def _record_entries(record: Path) -> Iterator[tuple[str, str, int | None]]:
    """Yield (path, digest, size) of each row."""
    try:
        # Paths may be any bytes, as in os.walk.
        for row in record_rows(read_regular(record).decode("utf-8", "surrogateescape")):
            path, digest, size = (*row, "", "", "")[:3]
            if path:
                # More than 18 digits are the size of no file.
                yield path, digest, int(size) if size.isdecimal() and len(size) <= 18 else None
    except OSError:
        return


def record_rows(text: str) -> Iterator[list[str]]:
    """Yield the rows of a RECORD. A row that csv refuses, with a NUL or a huge field, is left out."""
    rows = csv.reader(io.StringIO(text, newline=""))
    while True:
        try:
            yield next(rows)
        except csv.Error:
            continue
        except StopIteration:
            return


def _is_recorded(path: str, expected: str, size: int | None) -> bool:
    algorithm, _, wanted = expected.partition("=")
    if size is not None and os.stat(path).st_size != size:
        return False
    return base64.urlsafe_b64encode(file_digest(path, algorithm)).rstrip(b"=").decode() == wanted


def file_digest(path: str | Path, algorithm: str = "sha256") -> bytes:
    """Return a file's digest, as hashlib.file_digest does since 3.11. Raises ValueError (algorithm) and OSError."""
    digest = hashlib.new(algorithm)
    with open_regular(path) as stream:
        while block := stream.read(1 << 17):
            digest.update(block)
    return digest.digest()


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
        """The permissions of the file wherever it is installed."""
        return 0o755 if self.executable else 0o644

    def row(self) -> dict[str, Any]:
        """Return the file's row in the list."""
        if self.target:
            return {"path": self.path, "target": self.target}
        row: dict[str, Any] = {"path": self.path, "size": self.size, "sha256": self.sha256}
        return {**row, "executable": True} if self.executable else row

    def is_at(self, path: Path) -> bool:
        """Return whether `path` is this file. Raises OSError."""
        info = os.lstat(path)
        if self.target:
            return stat.S_ISLNK(info.st_mode) and os.readlink(path) == self.target
        return stat.S_ISREG(info.st_mode) and info.st_size == self.size and file_digest(path).hex() == self.sha256


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
        return tuple(one.path for one in self.files if one.path.startswith(f"share/licenses/{self.name}/"))

    @property
    def digest(self) -> str:
        """sha256 of the installed files: paths, contents, links, permission to execute."""
        rows = [[f.path, f.sha256 or f"-> {f.target}", f.executable] for f in self.files]
        return "sha256:" + hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()

    def render(self) -> bytes:
        """Return the text of the list, the same each time."""
        data = {
            "format": _FORMAT, "name": self.name, "version": self.version, "source": self.sha256,
            "licences": self.licences, "files": [one.row() for one in self.files],
        }  # fmt: skip
        return (json.dumps(data, indent=1) + "\n").encode()

    def write(self, root: Path) -> None:
        """Write the list into the environment at `root`."""
        path = root / list_path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.render())


def list_path(name: str) -> str:
    """Return the path of the list of the layer `name`, below the environment's root."""
    return f"{LAYER_LISTS}/{name}.json"


def list_files(folder: Path, known: Mapping[str, str] = {}) -> tuple[LayerFile, ...]:
    """Return every file and link below `folder`, sorted by path; `known` has sha256 of files that need not be read.

    Raises ValueError for an entry of another type, and OSError.
    """
    linked = (
        path
        for parent, folders, _ in os.walk(folder)
        for path in (os.path.join(parent, name) for name in folders)
        if os.path.islink(path)
    )
    found = []
    for path in (*walk_files(folder), *linked):
        info = os.lstat(path)
        name = os.path.relpath(path, folder)
        if stat.S_ISLNK(info.st_mode):
            found.append(LayerFile(name, target=os.readlink(path)))
        elif stat.S_ISREG(info.st_mode):
            digest = known.get(name) or file_digest(path).hex()
            found.append(LayerFile(name, info.st_size, digest, executable=bool(info.st_mode & 0o111)))
        else:
            raise ValueError(f"{name} is neither file nor link")
    return tuple(sorted(found, key=lambda one: one.path))


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


def check_layers(root: Path, report: FileReport | None) -> dict[str, str]:
    """Return name → digest of the layers' lists, "" for an invalid one; add differences of their files to `report`."""
    found: dict[str, str] = {}
    for path in sorted((root / LAYER_LISTS).glob("*.json")):
        try:
            known = parse_list(read_regular(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            found[path.stem] = ""
            continue
        found[known.name] = known.digest
        for one in known.files if report else ():
            assert report is not None
            report.bytes += one.size
            report.check(f"{one.path} (layer {known.name})", partial(one.is_at, root / one.path))
    return found
