"""Installed files, and whether they match the RECORDs of their distributions.

The RECORD file (PyPA "Recording installed projects", PEP 376 and 627) names every file of a distribution with its
sha256 and size. The files are on this host, or in an image that envbuild reads without running it.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from envbuild.base.elf import HEAD, Elf, elf_machine, file_head, read_elf
from envbuild.base.files import open_regular, read_regular
from envbuild.base.packages import SLIM_FILE, record_digest, top_level
from envbuild.base.text import normalise
from envbuild.gpus import Containers, read_gpu_code


@dataclass(frozen=True)
class Distribution:
    """An installed distribution; `record` is the sha256 of its sorted RECORD, `modules` are its top-level ones.

    `slim` lists the removed parts of a slim wheel, as its metadata names them.
    """

    name: str
    version: str
    record: str
    modules: tuple[str, ...] = ()
    slim: Mapping[str, Any] = field(default_factory=dict, compare=False)


class Files(Protocol):
    """Files by their absolute paths; all methods except `target` follow links. They raise OSError."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""

    def walk(self, folder: str) -> Iterable[str]:
        """Return every file below `folder` and every link that leads to no folder, in a fixed order."""

    def read(self, path: str) -> bytes:
        """Return the content of a regular file."""

    def head(self, path: str) -> bytes:
        """Return the first HEAD bytes of a regular file, b"" for anything else."""

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""

    def digest(self, path: str, algorithm: str = "sha256") -> bytes:
        """Return the digest of a regular file. Raises ValueError for an unknown algorithm."""

    def target(self, path: str) -> str:
        """Return the text of a symbolic link, "" for any other existing path."""

    def real(self, path: str) -> str:
        """Return `path` without symbolic links; raises no error."""

    def is_folder(self, path: str) -> bool:
        """Return whether there is a folder at `path`."""

    def gpu_code(self, path: str) -> Containers:
        """Return the containers of code for GPUs in an ELF file."""

    def elf(self, path: str) -> Elf | None:
        """Return the ELF file at `path` with its symbols, None for any other or a missing file; raises no error."""

    def library_path(self) -> list[str]:
        """Return the folders of LD_LIBRARY_PATH that the files themselves set, as images do."""


class HostFiles:
    """The files of this host."""

    def names(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def walk(self, folder: str) -> Iterable[str]:
        return walk_files(Path(folder))

    def read(self, path: str) -> bytes:
        return read_regular(path)

    def head(self, path: str) -> bytes:
        return file_head(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def digest(self, path: str, algorithm: str = "sha256") -> bytes:
        return file_digest(path, algorithm)

    def target(self, path: str) -> str:
        return os.readlink(path) if stat.S_ISLNK(os.lstat(path).st_mode) else ""

    def real(self, path: str) -> str:
        return os.path.realpath(path)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def gpu_code(self, path: str) -> Containers:
        with open_regular(path) as stream:
            return read_gpu_code(stream)

    def elf(self, path: str) -> Elf | None:
        with suppress(OSError):
            return read_elf(Path(path), symbols=True) if elf_machine(file_head(path)) else None
        return None

    def library_path(self) -> list[str]:
        return []


HOST = HostFiles()


class ReadFiles(HostFiles):
    """The files of this host; `heads` has the first bytes of files that were read already, by path."""

    def __init__(self, heads: Mapping[str, bytes]) -> None:
        self._heads = heads

    def head(self, path: str) -> bytes:
        known = self._heads.get(path)
        return file_head(path) if known is None else known


def distributions(
    site_packages: Path, without: Collection[str] = frozenset(), files: Files = HOST
) -> dict[str, Distribution]:
    """Return every distribution in `site_packages` by normalized name, except .dist-info folders in `without`.

    A second distribution with the same name is returned as "name (second)": otherwise one of them would be hidden from
    comparisons.
    """
    by_name: dict[str, Distribution] = {}
    for folder in sorted(set(files.names(str(site_packages))).difference(without)):
        if not folder.endswith((".dist-info", ".egg-info")):
            continue
        raw, _, version = folder.rsplit(".", 1)[0].partition("-")
        modules: tuple[str, ...] = ()
        slim: dict[str, Any] = {}
        try:
            record = files.read(f"{site_packages}/{folder}/RECORD")
            rows = record_rows(record.decode(errors="replace"))
            digest, modules = record_digest(record), top_level(row[0] for row in rows if row)
            if f"/{SLIM_FILE},".encode() in record:
                slim = _read_slim(f"{site_packages}/{folder}/{SLIM_FILE}", files)
        except OSError:
            digest = "missing"
        name = normalise(raw)
        by_name[f"{name} (second)" if name in by_name else name] = Distribution(name, version, digest, modules, slim)
    return by_name


def _read_slim(path: str, files: Files) -> dict[str, Any]:
    """Return the facts about a slim wheel for the receipt; {} for invalid metadata, whose RECORD check fails."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        did = json.loads(files.read(path))
        blanked = {path: {name: row[name] for name in ("original", "sha256")} for path, row in did["blanked"].items()}
        kept = {name: did[name] for name in ("rules", "wheel", "bytes")}
        return {**kept, "removed": len(did["removed"]), "blanked": blanked}
    return {}


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
    site_packages: Path,
    without: Collection[str] = frozenset(),
    others: Collection[str] = frozenset(),
    files: Files = HOST,
) -> FileReport:
    """Read every file that a RECORD names and compare size and sha256; list files that no RECORD names.

    Leaves out __pycache__, which Python renews by itself, the .dist-info folders in `without`, and unrecorded files
    whose absolute paths are in `others`.
    """
    report = FileReport()
    owned: set[str] = set(others)
    root = os.fspath(site_packages)
    for name in sorted(files.names(root)):
        if name in without or not name.endswith(".dist-info"):
            continue
        owned |= {os.path.join(site_packages, name, sign) for sign in ("RECORD.jws", "RECORD.p7s")}  # in no RECORD
        for relative, expected, size in _record_entries(f"{root}/{name}/RECORD", files):
            path = os.path.normpath(os.path.join(site_packages, relative))
            owned.add(path)
            if expected:
                report.check(relative, partial(_is_recorded, path, expected, size, files))
                report.bytes += size or 0
    for path in files.walk(root):
        if path not in owned and "/__pycache__/" not in path:
            report.unowned.append(os.path.relpath(path, root))
    return report


def walk_files(folder: Path) -> Iterator[str]:
    """Yield, in a fixed order, every file below `folder` and every link that leads to no folder; follow no links."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            yield os.path.join(parent, name)


def _record_entries(record: str, files: Files) -> Iterator[tuple[str, str, int | None]]:
    """Yield (path, digest, size) of each row."""
    try:
        # Paths may be any bytes, as in os.walk.
        for row in record_rows(files.read(record).decode("utf-8", "surrogateescape")):
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


def _is_recorded(path: str, expected: str, size: int | None, files: Files) -> bool:
    algorithm, _, encoded = expected.partition("=")
    if size is not None and files.size(path) != size:
        return False
    return base64.urlsafe_b64encode(files.digest(path, algorithm)).rstrip(b"=").decode() == encoded


def file_digest(path: str | Path, algorithm: str = "sha256", heads: dict[str, bytes] | None = None) -> bytes:
    """Return a file's digest, and put its first HEAD bytes into `heads`. Raises ValueError (algorithm) and OSError."""
    digest = hashlib.new(algorithm)
    with open_regular(path) as stream:
        block = stream.read(1 << 17)
        if heads is not None:
            heads[str(path)] = block[:HEAD]
        while block:
            digest.update(block)
            block = stream.read(1 << 17)
    return digest.digest()
