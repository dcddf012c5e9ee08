"""Survey of a site-packages folder: its distributions, and whether its files match their RECORDs.

The RECORD file (PyPA "Recording installed projects", PEP 376 and 627) names every file of a distribution with its
sha256 and size.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from envbuild.fingerprint import record_digest
from envbuild.names import normalise


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
            digest = record_digest((site_packages / folder / "RECORD").read_bytes())
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
        except (OSError, ValueError):
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
    try:
        with record.open(newline="", encoding="utf-8") as stream:
            for path, digest, size in ((*row, "", "")[:3] for row in csv.reader(stream) if row):
                yield path, digest, int(size) if size.isdigit() else None
    except OSError:
        return


def _is_recorded(path: str, expected: str, size: int | None) -> bool:
    algorithm, _, wanted = expected.partition("=")
    if size is not None and os.stat(path).st_size != size:
        return False
    return base64.urlsafe_b64encode(file_digest(path, algorithm)).rstrip(b"=").decode() == wanted


def file_digest(path: str | Path, algorithm: str = "sha256") -> bytes:
    """Return the digest of a file, as hashlib.file_digest does from Python 3.11 on.

    Raises ValueError for an unknown algorithm, and OSError.
    """
    digest = hashlib.new(algorithm)
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(1 << 17):
            digest.update(block)
    return digest.digest()
