"""Survey of a site-packages folder: its distributions, and whether its files match their RECORDs.

The RECORD file (PyPA "Recording installed projects", PEP 376 and 627) names every file of a distribution with
its sha256 and size.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

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

    A second distribution with the same name is returned as "name (second)": otherwise one of them would be
    hidden from comparisons.
    """
    found: dict[str, Distribution] = {}
    with os.scandir(site_packages) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if entry.name.endswith((".dist-info", ".egg-info")) and entry.name not in without
        )
    for folder in names:
        stem = folder.rsplit(".", 1)[0]
        raw, _, version = stem.partition("-")
        name = normalise(raw)
        record = _record_digest(site_packages / folder / "RECORD")
        key = f"{name} (second)" if name in found else name
        found[key] = Distribution(name, version, record)
    return found


def names_and_versions(site_packages: Path) -> dict[str, str]:
    """Return normalized name → version from folder names alone, as a quick form of `distributions`."""
    found: dict[str, str] = {}
    for entry in os.listdir(site_packages):
        if entry.endswith(".dist-info"):
            raw, _, version = entry[: -len(".dist-info")].partition("-")
            found[normalise(raw)] = version
    return found


def _record_digest(record: Path) -> str:
    try:
        return record_digest(record.read_bytes())
    except OSError:
        return "missing"


@dataclass
class FileReport:
    """The comparison of all files with the RECORDs. Paths are relative to site-packages."""

    files: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    unowned: list[str] = field(default_factory=list)


def check_files(
    site_packages: Path, without: Collection[str] = frozenset(), others: Collection[str] = frozenset()
) -> FileReport:
    """Read every file that a RECORD names and compare size and sha256; list files that no RECORD names.

    Left out are __pycache__, which Python writes and renews by itself, the .dist-info folders in `without`, and
    those files without a RECORD whose absolute paths are in `others`.
    """
    report = FileReport()
    owned: set[str] = set(others)
    for folder in sorted(site_packages.glob("*.dist-info")):
        if folder.name in without:
            continue
        for relative, expected, size in _record_entries(folder / "RECORD"):
            path = os.path.normpath(os.path.join(site_packages, relative))
            owned.add(path)
            if not expected:
                continue
            state = _compare(path, expected, size)
            if state is not None:
                (report.missing if state == "missing" else report.altered).append(relative)
            report.files += 1
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
            for row in csv.reader(stream):
                if row:
                    size = int(row[2]) if len(row) > 2 and row[2].isdigit() else None
                    yield row[0], row[1] if len(row) > 1 else "", size
    except OSError:
        return


def digest_of(stream: IO[bytes], algorithm: str) -> bytes:
    """Return the digest of the rest of `stream`, as hashlib.file_digest does from Python 3.11 on.

    Raises ValueError for an unknown algorithm.
    """
    digest = hashlib.new(algorithm)
    while block := stream.read(1 << 17):
        digest.update(block)
    return digest.digest()


def _compare(path: str, expected: str, size: int | None) -> str | None:
    algorithm, _, wanted = expected.partition("=")
    try:
        with open(path, "rb", buffering=0) as stream:
            if size is not None and os.fstat(stream.fileno()).st_size != size:
                return "altered"
            digest = digest_of(stream, algorithm)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError):
        return "altered"
    return None if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == wanted else "altered"
