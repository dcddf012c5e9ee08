"""Survey of a conda environment: its packages, and whether its files match the records in conda-meta.

Source: the records in conda-meta as conda and rattler write them: in paths_data a row for each file, with its
sha256 in the package and, if installing changed it, sha256_in_prefix.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.base.files import parse_json
from envbuild.base.packages import conda_digest, top_level
from envbuild.base.text import normalise
from envbuild.contract.installed import HOST, Distribution, FileReport, Files, check_files, distributions

META = "conda-meta"
# The .dist-info folders in a record, found by a text search: parsing takes 50 times as long.
_DIST_INFO = re.compile(rb'/site-packages/([^/"]+\.dist-info)/METADATA"')


def is_conda(root: Path, files: Files = HOST) -> bool:
    """Return whether `root` is a conda environment."""
    return files.is_folder(f"{root}/{META}")


def read_records(root: Path, files: Files = HOST) -> list[dict[str, Any]]:
    """Return the records in conda-meta, in the order of their file names. Raises OSError or ValueError."""
    names = sorted(name for name in files.names(f"{root}/{META}") if name.endswith(".json"))
    return [parse_json(files.read(f"{root}/{META}/{name}")) for name in names]


def conda_packages(records: list[dict[str, Any]]) -> list[Distribution]:
    """Return the packages of `records`; a digest covers the list of files and does not depend on the prefix."""
    packages = []
    for record in records:
        digest = conda_digest(_rows(record))
        inside = (row["_path"].partition("/site-packages/")[2] for row in _rows(record))
        packages.append(Distribution(str(record["name"]), str(record["version"]), digest, top_level(inside)))
    return packages


def recorded_files(records: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return the sha256 of the files of `records`, by path; bytecode, which compiling replaces, is left out."""
    return {
        row["_path"]: {row.get("sha256_in_prefix") or row["sha256"]}
        for record in records
        for row in _rows(record)
        if row.get("sha256")
        and row.get("path_type") not in ("softlink", "directory")
        and "__pycache__" not in row["_path"]
    }


def rewritten_files(records: list[dict[str, Any]]) -> frozenset[str]:
    """Return the paths of the files of `records` that installing changed: it wrote the prefix into them."""
    return frozenset(row["_path"] for record in records for row in _rows(record) if row.get("sha256_in_prefix"))


def owned_dist_infos(records: list[dict[str, Any]], site_packages: str) -> frozenset[str]:
    """Return the .dist-info folders in `site_packages` (relative to the prefix) that belong to conda packages."""
    start = site_packages + "/"
    return frozenset(
        row["_path"][len(start) :].partition("/")[0]
        for record in records
        for row in _rows(record)
        if row["_path"].startswith(start) and ".dist-info/" in row["_path"]
    )


def survey_conda(
    root: Path, site_packages: Path, known: FileReport | None = None, host: Files = HOST
) -> tuple[dict[str, Distribution], FileReport]:
    """Return the conda and pip packages of the environment at `root`, and its files, relative to it.

    `known` is the report on its files if they have been compared already.
    """
    inside = os.path.relpath(site_packages, root)
    try:
        records = read_records(root, host)
        packages = {package.name: package for package in conda_packages(records)}
        owned = owned_dist_infos(records, inside)
        files = {row["_path"]: row for record in records for row in _rows(record)}
    except (ValueError, KeyError, TypeError, AttributeError):
        # No installer writes such records: nothing is known, and everything differs from the lock.
        return {}, FileReport(altered=[META])
    for name, distribution in distributions(site_packages, owned, host).items():
        packages[f"{name} (pip)" if name in packages else name] = distribution
    if known is not None:
        return packages, known
    others = {os.path.join(root, path) for path in files}
    report = check_files(site_packages, owned, others, host)
    for paths in (report.missing, report.altered, report.unowned):
        paths[:] = [os.path.normpath(os.path.join(inside, path)) for path in paths]
    for path, row in files.items():
        if not path.endswith(".pyc"):
            report.check(path, partial(_is_intact, os.path.join(root, path), row, report, host))
    return packages, report


def quick_names(root: Path, site_packages: Path) -> set[tuple[str, str]]:
    """Return (name, version) of every installed package, from file names alone.

    Packages of conda have the name in conda-meta, packages from pip their normalized name. A missing .dist-info folder
    of a conda package is returned with the version "missing". Raises OSError.
    """
    names: set[tuple[str, str]] = set()
    owned: set[str] = set()
    for path in (root / META).glob("*.json"):
        name, _, version = path.stem.rpartition("-")[0].rpartition("-")
        names.add((name, version))
        owned |= {os.fsdecode(folder) for folder in _DIST_INFO.findall(path.read_bytes())}
    here = {name for name in os.listdir(site_packages) if name.endswith(".dist-info")}
    for folder in here - owned:
        name, _, version = folder[: -len(".dist-info")].partition("-")
        names.add((normalise(name), version))
    names |= {(folder, "missing") for folder in owned - here}
    return names


def _rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = record["paths_data"]["paths"]
    return rows


def _is_intact(path: str, row: dict[str, Any], report: FileReport, files: Files) -> bool:
    """Return whether a file or link matches its row. Raises OSError."""
    expected = row.get("sha256_in_prefix") or row.get("sha256")
    if row.get("path_type") == "directory":
        return files.is_folder(path)
    target = files.target(path)
    if row.get("path_type") == "softlink":
        text = hashlib.sha256(os.fsencode(target)).hexdigest()
        # Records by conda itself have the digest of the file behind the link.
        if not target or expected in (None, text):
            return bool(target)
        try:
            return bool(files.digest(path).hex() == expected)
        except FileNotFoundError:  # the link is there, but leads nowhere
            return False
    report.bytes += files.size(path)
    return not target and (expected is None or files.digest(path).hex() == expected)
