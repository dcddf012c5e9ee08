"""What is installed in a conda environment, and whether it is what conda-meta recorded.

Source: the records in conda-meta as conda and rattler write them: in paths_data a row for each file, with its
sha256 in the package and, where installing changed it, sha256_in_prefix. Needs nothing but Python 3.9.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from envbuild.artifacts.installed import (
    Distribution,
    FileReport,
    check_files,
    digest_of,
    distributions,
)
from envbuild.names import normalise
from envbuild.record import conda_digest

META = "conda-meta"
_DIST_INFO = b'.dist-info/METADATA"'
# Made at installing, with the prefix in it: the package does not hold it.
_ENTRY_POINT = "unix_python_entry_point"


def is_conda(root: Path) -> bool:
    """Whether the environment at `root` is one of conda's."""
    return (root / META).is_dir()


def read_records(root: Path) -> list[dict[str, Any]]:
    """The records in conda-meta, in the order of their file names. Raises OSError or ValueError."""
    return [json.loads(path.read_bytes()) for path in sorted((root / META).glob("*.json"))]


def conda_packages(records: list[dict[str, Any]]) -> list[Distribution]:
    """The packages of `records`; a digest is that of the files' list and depends on no prefix."""
    return [
        Distribution(
            str(record["name"]),
            str(record["version"]),
            conda_digest(
                (row.get("original_path") or row["_path"], _original(row))
                for row in _rows(record)
                if not row["_path"].endswith(".pyc")
            ),
        )
        for record in records
    ]


def owned_dist_infos(records: list[dict[str, Any]], site_packages: str) -> frozenset[str]:
    """Names of the .dist-info folders in `site_packages` (relative to the prefix) that conda packages brought."""
    start = site_packages + "/"
    return frozenset(
        row["_path"][len(start) :].partition("/")[0]
        for record in records
        for row in _rows(record)
        if row["_path"].startswith(start) and ".dist-info/" in row["_path"]
    )


def survey_conda(root: Path, site_packages: Path) -> tuple[dict[str, Distribution], FileReport]:
    """The packages of the conda environment at `root` by name, what pip added among them, and its files.

    Paths are relative to `root`. Bytecode is left out: Python renews it.
    """
    inside = os.path.relpath(site_packages, root)
    try:
        records = read_records(root)
        found = {package.name: package for package in conda_packages(records)}
        owned = owned_dist_infos(records, inside)
        files = {row["_path"]: row for record in records for row in _rows(record)}
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not as any installer writes it: then nothing is known, and everything is another than was locked.
        return {}, FileReport(altered=[META])
    for name, distribution in distributions(site_packages, owned).items():
        found[f"{name} (pip)" if name in found else name] = distribution
    others = {os.path.join(root, path) for path in files}
    report = check_files(site_packages, owned, others)
    for paths in (report.missing, report.altered, report.unowned):
        paths[:] = [os.path.normpath(os.path.join(inside, path)) for path in paths]
    for path, row in files.items():
        if not path.endswith(".pyc"):
            _check(os.path.join(root, path), path, row, report)
    return found, report


def quick_names(root: Path, site_packages: Path) -> set[tuple[str, str]]:
    """(name, version) of all that is installed, from file names; of conda-meta no more than that is understood.

    A package of conda is named as there, what pip added by its normalised name. Raises OSError.
    """
    found: set[tuple[str, str]] = set()
    owned: set[str] = set()
    for path in (root / META).glob("*.json"):
        name, _, version = path.stem.rpartition("-")[0].rpartition("-")
        found.add((name, version))
        owned |= _dist_infos(path.read_bytes())
    here = {name for name in os.listdir(site_packages) if name.endswith(".dist-info")}
    for folder in here - owned:
        name, _, version = folder[: -len(".dist-info")].partition("-")
        found.add((normalise(name), version))
    found |= {(folder, "missing") for folder in owned - here}
    return found


def _dist_infos(record: bytes) -> set[str]:
    """The .dist-info folders that a record names; found by a search, for parsing takes 50 times as long."""
    found = set()
    at = record.find(_DIST_INFO)
    while at >= 0:
        path = record[record.rfind(b'"', 0, at) + 1 : at]
        folder, _, name = path.rpartition(b"/")
        if folder.endswith(b"/site-packages"):
            found.add(os.fsdecode(name) + ".dist-info")
        at = record.find(_DIST_INFO, at + 1)
    return found


def _rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = record["paths_data"]["paths"]
    return rows


def _original(row: dict[str, Any]) -> str:
    return "" if row.get("path_type") == _ENTRY_POINT else str(row.get("sha256") or "")


def _check(path: str, relative: str, row: dict[str, Any], report: FileReport) -> None:
    """Compare one file or link with its row, and put what is wrong into `report`."""
    report.files += 1
    expected = row.get("sha256_in_prefix") or row.get("sha256")
    try:
        kind = row.get("path_type")
        if kind == "directory":
            good = os.path.isdir(path)
        elif kind == "softlink":
            text = hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
            # conda's own records have the digest of the file behind the link.
            good = expected in (None, text) or (os.path.isfile(path) and _digest(path) == expected)
        else:
            report.bytes += os.lstat(path).st_size
            good = not os.path.islink(path) and (expected is None or _digest(path) == expected)
    except FileNotFoundError:
        report.missing.append(relative)
        return
    except OSError:
        good = False
    if not good:
        report.altered.append(relative)


def _digest(path: str) -> str:
    with open(path, "rb", buffering=0) as stream:
        return digest_of(stream, "sha256").hex()
