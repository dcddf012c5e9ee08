"""Reader of the records in a conda environment's conda-meta folder.

Source: those records as conda and rattler write them: the package's index.json, its origin (`url`, `channel`, `fn`,
`sha256`), and in paths_data a row for each file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from envbuild.artifacts.conda_survey import conda_packages
from envbuild.base.masking import redact
from envbuild.inspect.facts import CondaRecord

_DIST_INFO = re.compile(r"/site-packages/[^/]+\.(?:dist-info/METADATA|egg-info(?:/PKG-INFO)?)$")
_META = re.compile(r"(?:^|/)conda-meta/(?:[^/]+\.json|history)$")
# Errors from reading a file that is not a record.
_SENSELESS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_ENTRY_POINT = "unix_python_entry_point"


def reader_of(path: str) -> Callable[[bytes], Any] | None:
    """Return the reader of the file at `path` if it is a conda record, else None.

    The reader returns a note, which is JSON: the package's data under the names of CondaRecord, and under `recorded`
    path → [sha256 in the environment, sha256 in the package]; {} for a file that is not a record.
    """
    return _read if _META.search(path) and path.endswith(".json") else None


def environments(paths: Iterable[str]) -> Iterator[str]:
    """Yield the folders of the conda environments to which `paths` of an artifact belong."""
    for path in paths:
        # An image has a hundred thousand paths: most need no search by regular expression.
        found = _META.search(path) if "conda-meta/" in path else None
        if found:
            yield path[: found.start()]


def records(notes: Mapping[str, Any]) -> tuple[CondaRecord, ...]:
    """Return every conda package in `notes` (path → note)."""
    found = []
    for folder, note in _noted(notes):
        found.append(CondaRecord(location=folder, **{name: text for name, text in note.items() if name != "recorded"}))
    return tuple(sorted(found, key=lambda p: (p.name, p.location, p.version, p.build)))


def recorded_files(notes: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return path in the artifact → digests of the file, for `Inventory.recorded`."""
    return {
        f"{folder}/{inside}" if folder else inside: (here, original)
        for folder, note in _noted(notes)
        for inside, (here, original) in note["recorded"].items()
    }


def _noted(notes: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the environment's folder and the note of each conda record."""
    return ((path[: meta.start()], note) for path, note in notes.items() if note and (meta := _META.search(path)))


def _read(data: bytes) -> Any:
    try:
        record = json.loads(data)
        said = {
            "name": str(record["name"]),
            "version": str(record["version"]),
            "build": str(record["build"]),
            "subdir": str(record.get("subdir") or ""),
            "channel": _channel(record),
            "archive": "tar.bz2" if str(record.get("fn")).endswith(".tar.bz2") else "conda",
            "sha256": str(record.get("sha256") or ""),
            "license": " ".join(str(record.get("license") or "").split()),
        }
    except _SENSELESS:
        return {}
    if not said["name"]:
        return {}
    try:
        # Rows with another original path are left out: their path has a file of another package.
        rows = [row for row in record["paths_data"]["paths"] if not row.get("original_path")]
        (package,) = conda_packages([{**record, "paths_data": {"paths": rows}}])
        size = sum(number for row in rows if isinstance(number := row.get("size_in_bytes"), int))
        return {**said, "record": package.record, "recorded": dict(_recorded(rows)), "size": size}
    except _SENSELESS:  # from a conda that did not write rows yet
        return {**said, "record": "", "recorded": {}}


def _channel(record: Mapping[str, Any]) -> str:
    url, subdir = str(record.get("url") or ""), str(record.get("subdir") or "")
    parts = url.rsplit("/", 2)
    if len(parts) == 3 and "://" in url and parts[1] == subdir:
        return redact(parts[0])
    return redact(str(record.get("channel") or "").rstrip("/").removesuffix(f"/{subdir}"))


def _recorded(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for row in rows:
        sha256, here = row.get("sha256"), row.get("sha256_in_prefix")
        if row.get("path_type") == _ENTRY_POINT:
            yield str(row["_path"]), [str(here or sha256 or ""), ""]
        elif row.get("path_type") == "softlink" or not sha256:
            continue
        elif row.get("prefix_placeholder") and here:
            yield str(row["_path"]), [str(here), str(sha256)]
        elif str(row["_path"]).startswith("bin/") or _DIST_INFO.search(str(row["_path"])):
            yield str(row["_path"]), [str(sha256), str(sha256)]
