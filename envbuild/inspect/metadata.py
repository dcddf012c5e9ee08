"""Inventories of artifacts, from readers of the few files with metadata about installed packages.

Sources: PyPA "Core metadata" (METADATA, PKG-INFO), "Recording installed projects" (RECORD), dpkg 1.21
(/var/lib/dpkg/status, and status.d of distroless images), os-release(5); the records in conda-meta as conda and rattler
write them: the package's index.json, its origin (`url`, `channel`, `fn`, `sha256`), and in paths_data a row for each
file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.parser import HeaderParser
from typing import Any

from envbuild.base.files import parse_json
from envbuild.base.masking import redact
from envbuild.base.packages import json_digest, record_digest
from envbuild.base.text import normalise
from envbuild.contract import layer_lists
from envbuild.contract.conda_meta import conda_packages
from envbuild.contract.installed import record_rows
from envbuild.contract.state import LAYER_LISTS, PREFIX
from envbuild.inspect.facts import CONDA, VENV, CondaRecord, DebianPackage, Inventory, Item, PythonPackage, SourceBuilt

_DIST_INFO = re.compile(r"/site-packages/[^/]+\.(?:dist-info/METADATA|egg-info(?:/PKG-INFO)?)$")
_META = re.compile(r"(?:^|/)conda-meta/(?:[^/]+\.json|history)$")
# Errors from reading a file that is not a record.
_SENSELESS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_ENTRY_POINT = "unix_python_entry_point"
# Larger files are not what their names say, and are treated like any other file.
MAX_SIZE = 16 << 20
# Limits that keep memory below 500 MB; torch has 20,000 rows, and no METADATA comes near.
_MOST_ROWS, _MAX_HEAD = 500_000, 1 << 20
_INFO = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/]+)\.(?:dist-info/(METADATA|RECORD)|egg-info(?:/(PKG-INFO))?)$")
_LAYER = re.compile(rf"(?:^|/){LAYER_LISTS}/[^/]+\.json$")
_STATUS = re.compile(r"^var/lib/dpkg/(?:status$|status\.d/[^/]+$)")
_FIELD = re.compile(r"^([A-Za-z-]+):(.*)$", re.MULTILINE)
# Rows about the installer and the location, not about the distribution.
_OWN = ("/INSTALLER", "/REQUESTED", "/RECORD", "/direct_url.json", "/uv_cache.json", ".pyc")
_TEXTS = ("os-release", "envbuild.json", "pyvenv.cfg")

# The content of one such file, in a form for JSON; None for a file that says nothing.
Note = Any
Reader = Callable[[bytes], Note]


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
        match = _META.search(path) if "conda-meta/" in path else None
        if match:
            yield path[: match.start()]


def records(notes: Mapping[str, Any]) -> tuple[CondaRecord, ...]:
    """Return every conda package in `notes` (path → note)."""
    conda_records = []
    for folder, note in _noted(notes):
        conda_records.append(
            CondaRecord(location=folder, **{name: text for name, text in note.items() if name != "recorded"})
        )
    return tuple(sorted(conda_records, key=lambda p: (p.name, p.location, p.version, p.build)))


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
        fields = {
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
    if not fields["name"]:
        return {}
    try:
        # Rows with another original path are left out: their path has a file of another package.
        rows = [row for row in record["paths_data"]["paths"] if not row.get("original_path")]
        (package,) = conda_packages([{**record, "paths_data": {"paths": rows}}])
        size = sum(number for row in rows if isinstance(number := row.get("size_in_bytes"), int))
        return {**fields, "record": package.record, "recorded": dict(_recorded(rows)), "size": size}
    except _SENSELESS:  # from a conda that did not write rows yet
        return {**fields, "record": "", "recorded": {}}


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


def interest(path: str) -> Reader | None:
    """Return the reader of the file at `path`, None for files without metadata."""
    match = _INFO.search(path)
    if match:
        return _record if match[2] == "RECORD" else _metadata
    if _LAYER.search(path):
        return _layer
    if _STATUS.search(path):
        return None if path.endswith(".md5sums") else _debian
    return _text if path.rpartition("/")[2] in _TEXTS else reader_of(path)


def digested(pieces: Iterable[bytes], reader: Reader | None) -> tuple[str, bool, Note]:
    """Return the sha256 of a file's content, whether it begins with `#!`, and the note of `reader` on it."""
    digest, head, kept = hashlib.sha256(), b"", list[bytes]()
    for piece in pieces:
        digest.update(piece)
        head = head or piece[:2]
        if reader:
            kept.append(piece)
    return digest.hexdigest(), head == b"#!", reader(b"".join(kept)) if reader else None


def root_inventory(files: Mapping[str, Item], notes: Mapping[str, Note], env: Mapping[str, str]) -> Inventory:
    """Return the inventory of a root file system, in the layers of an image or in a squashfs.

    `notes` are the results of `interest`, by path. `env` holds the variables of programs in the root, of which
    VIRTUAL_ENV, CONDA_PREFIX and PATH locate the environment.
    """
    release = _pairs(str(notes.get("usr/lib/os-release") or notes.get("etc/os-release") or ""))
    system = {name: value.strip("\"'") for name, value in release if not name.startswith("#")}
    return inventory(files, notes, *_environment(env, files), debian=_debian_packages(notes), os=system)


def inventory(
    files: Mapping[str, Item], notes: Mapping[str, Note], prefix: str | None, environment: str, **more: Any
) -> Inventory:
    """Return the inventory with the environment of the kind `environment` in the folder `prefix`."""
    start = f"{prefix}/" if prefix else ""
    own = notes if prefix is not None else {}
    return Inventory(
        files,
        _python_packages(files, notes),
        prefix=prefix,
        config={name.lower(): value for name, value in _pairs(str(own.get(f"{start}pyvenv.cfg", "")))},
        state=state_of(str(own.get(f"{start}envbuild.json", ""))),
        environment=environment,
        conda=records(notes),
        recorded=recorded_files(notes),
        built=source_built(notes),
        **more,
    )


def _environment(env: Mapping[str, str], files: Mapping[str, Item]) -> tuple[str | None, str]:
    """Return the folder of the environment that programs in the root use, and its kind."""
    conda = set(environments(files))
    named = [env.get("VIRTUAL_ENV", ""), env.get("CONDA_PREFIX", ""), PREFIX]
    # Images that people make with conda often set only PATH.
    named += [folder.removesuffix("/bin") for folder in env.get("PATH", "").split(":")]
    for folder in (name.strip("/") for name in named):
        if folder and folder in conda:
            return folder, CONDA
        if folder and f"{folder}/pyvenv.cfg" in files:
            return folder, VENV
    return None, ""


def extra_of(device: tuple[int, int], xattrs: tuple[tuple[str, bytes], ...]) -> str:
    """Return device numbers and extended attributes in the form of an Item's `extra`."""
    extra = "" if device == (0, 0) else "{},{} ".format(*device)
    return extra + " ".join(f"{k}={hashlib.sha256(v).hexdigest()}" for k, v in sorted(xattrs))


def _python_packages(paths: Iterable[str], notes: Mapping[str, Note]) -> tuple[PythonPackage, ...]:
    """Return every distribution among `paths`, sorted by name."""
    package_rows: dict[str, dict[str, Any]] = {}
    for path in paths:
        match = _INFO.search(path)
        if match:
            raw, _, version = match[1].partition("-")
            folder = path[: match.end(1)]
            about = package_rows.setdefault(folder, {"name": raw, "version": re.sub(r"-py\d.*", "", version)})
            about |= {name: text for name, text in (notes.get(path) or {}).items() if text}
    packages = (
        PythonPackage(
            location=folder.rpartition("/")[0],
            info=f"{folder}.dist-info",
            **{**about, "name": normalise(about["name"]), "licenses": tuple(about.get("licenses", ()))},
        )
        for folder, about in package_rows.items()
    )
    return tuple(sorted((p for p in packages if p.name), key=lambda p: (p.name, p.location, p.version, p.record)))


def _debian_packages(notes: Mapping[str, Note]) -> tuple[DebianPackage, ...]:
    packages = {DebianPackage(*map(str, row)) for path, note in notes.items() if _STATUS.search(path) for row in note}
    return tuple(sorted(packages, key=lambda p: (p.name, p.arch, p.version)))


def source_built(notes: Mapping[str, Note]) -> tuple[SourceBuilt, ...]:
    """Return every source layer, sorted by name; `notes` are the results of `interest`, by path."""
    packages = []
    for path, note in notes.items():
        match = _LAYER.search(path)
        if match and note:
            own = {"location": path[: match.start()], "licences": tuple(note["licences"])}
            packages.append(SourceBuilt(**{**note, **own}))
    return tuple(sorted(packages, key=lambda package: (package.name, package.location)))


def _pairs(text: str) -> list[tuple[str, str]]:
    """Return the lines NAME=VALUE of os-release(5), or of pyvenv.cfg (PEP 405)."""
    pairs = (line.partition("=") for line in text.splitlines())
    return [(name.strip(), value.strip()) for name, sign, value in pairs if sign]


def state_of(text: str) -> dict[str, Any]:
    """Return a JSON object such as envbuild.json, {} if it is invalid."""
    try:
        data = parse_json(text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def portable_digest(record: bytes) -> str:
    """Return the sha256 of the rows of a RECORD that do not depend on the installer and the location.

    Leaves out scripts (they name their interpreter), bytecode and the installer's own files.
    """
    rows = sorted(
        row
        for row in record_rows(record.decode("utf-8", "replace"))
        if row and not row[0].endswith(_OWN) and not (row[0].startswith("../") and "/bin/" in row[0])
    )
    return json_digest(rows)


def _record(data: bytes) -> Note:
    if data.count(b"\n") + data.count(b"\r") > _MOST_ROWS:
        return None
    rows = record_rows(data.decode("utf-8", "replace"))
    # At most 18 digits: more are no size of a file, and Python refuses to convert thousands.
    size = sum(int(row[2]) for row in rows if len(row) > 2 and re.fullmatch(r"[0-9]{1,18}", row[2]))
    return {"record": record_digest(data), "content": portable_digest(data), "size": size}


def _layer(data: bytes) -> Note:
    try:
        known = layer_lists.parse_list(data)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return {
        "name": known.name,
        "version": known.version,
        "source": known.sha256,
        "files": known.digest,
        "licences": list(known.licences),
    }


def _metadata(data: bytes) -> Note:
    # The description, which may be long, follows the first empty line.
    head = re.split(rb"\r?\n\r?\n", data[:_MAX_HEAD], maxsplit=1)[0].decode("utf-8", "replace")
    message = HeaderParser().parsestr(head)
    fields = {"name": "Name", "version": "Version", "expression": "License-Expression"}
    texts = {name: " ".join(str(message[field] or "").split()) for name, field in fields.items()}
    return {**texts, "licenses": _licenses(message.get_all("Classifier") or [], message["License"])}


def _licenses(classifiers: Iterable[Any], field: Any) -> list[str]:
    """Return the licences in classifiers; if there are none, a License field that is a name and not a text."""
    named = [
        str(text).rpartition("::")[2].strip()
        for text in classifiers
        if str(text).startswith("License ::") and not str(text).strip().endswith("OSI Approved")
    ]
    short = str(field or "").strip()
    if not named and short and short != "UNKNOWN" and "\n" not in short and len(short) <= 80:
        named = [short]
    return list(dict.fromkeys(named))


def _debian(data: bytes) -> Note:
    rows = []
    for stanza in re.split(r"\n[ \t]*\n", data.decode("utf-8", "replace").replace("\r\n", "\n")):
        fields = {name: value.strip() for name, value in _FIELD.findall(stanza)}
        # Removed packages are listed as long as their configuration exists; status.d has no Status.
        if fields.get("Package") and fields.get("Status", "ok installed").endswith(" installed"):
            rows.append([fields["Package"], fields.get("Version", ""), fields.get("Architecture", "")])
    return rows


def _text(data: bytes) -> Note:
    return data.decode("utf-8", "replace")
