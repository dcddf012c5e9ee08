"""Readers of the few files in an artifact that say what is installed.

Sources: PyPA "Core metadata" (METADATA, PKG-INFO), "Recording installed projects" (RECORD), dpkg 1.21
(/var/lib/dpkg/status, and status.d of distroless images), os-release(5). conda's records: conda_meta.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.parser import HeaderParser
from typing import Any

from envbuild.artifacts import installed
from envbuild.fingerprint import record_digest
from envbuild.inspect.conda_meta import reader_of
from envbuild.inspect.facts import DebianPackage, PythonPackage, SourceBuilt
from envbuild.names import normalise

# Larger files are not what their names say, and are treated like any other file.
MAX_SIZE = 64 << 20
_INFO = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/]+)\.(?:dist-info/(METADATA|RECORD)|egg-info(?:/(PKG-INFO))?)$")
_LAYER = re.compile(rf"(?:^|/){installed.LAYER_LISTS}/[^/]+\.json$")
_STATUS = re.compile(r"^var/lib/dpkg/(?:status$|status\.d/[^/]+$)")
# Rows about the installer and the location, not about the distribution.
_OWN = ("/INSTALLER", "/REQUESTED", "/RECORD", "/direct_url.json", "/uv_cache.json", ".pyc")
_TEXTS = ("os-release", "envbuild.json", "pyvenv.cfg")

# The content of one such file, in a form for JSON.
Note = Any


def interest(path: str) -> Callable[[bytes], Note] | None:
    """Return the reader of the file at `path`, None for the many files that say nothing."""
    found = _INFO.search(path)
    if found:
        return _record if found[2] == "RECORD" else _metadata
    if _LAYER.search(path):
        return _layer
    if _STATUS.search(path):
        return None if path.endswith(".md5sums") else _debian
    return _text if path.rpartition("/")[2] in _TEXTS else reader_of(path)


def python_packages(paths: Iterable[str], notes: Mapping[str, Note]) -> tuple[PythonPackage, ...]:
    """Return every distribution among `paths`, sorted by name; `notes` are the results of `interest`, by path."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        match = _INFO.search(path)
        if match:
            folder = path[: match.end(1)]
            about = found.setdefault(folder, {"stem": match[1]})
            note = notes.get(path)
            if isinstance(note, dict):
                about.update(note)
    packages = []
    for folder, about in found.items():
        raw, _, version = str(about["stem"]).partition("-")
        packages.append(
            PythonPackage(
                normalise(about.get("name") or raw),
                about.get("version") or re.sub(r"-py\d.*", "", version),
                folder.rpartition("/")[0],
                about.get("record", ""),
                about.get("content", ""),
                about.get("expression", ""),
                tuple(about.get("licenses", ())),
                f"{folder}.dist-info",
            )
        )
    named = (package for package in packages if package.name)
    return tuple(sorted(named, key=lambda p: (p.name, p.location, p.version, p.record)))


def debian_packages(notes: Mapping[str, Note]) -> tuple[DebianPackage, ...]:
    """Return every Debian package in `notes`."""
    found = {DebianPackage(*map(str, row)) for path, note in notes.items() if _STATUS.search(path) for row in note}
    return tuple(sorted(found, key=lambda p: (p.name, p.arch, p.version)))


def source_built(notes: Mapping[str, Note]) -> tuple[SourceBuilt, ...]:
    """Return every source layer, sorted by name; `notes` are the results of `interest`, by path."""
    found = []
    for path, note in notes.items():
        match = _LAYER.search(path)
        if match and note:
            own = {"location": path[: match.start()], "licences": tuple(note["licences"])}
            found.append(SourceBuilt(**{**note, **own}))
    return tuple(sorted(found, key=lambda one: (one.name, one.location)))


def os_release(text: str) -> dict[str, str]:
    """Return os-release(5) as a dictionary; invalid lines are skipped."""
    pairs = (line.partition("=") for line in text.splitlines() if line[:1] not in ("", "#"))
    return {name.strip(): value.strip().strip("\"'") for name, sign, value in pairs if sign}


def settings_of(text: str) -> dict[str, str]:
    """Return pyvenv.cfg (PEP 405) as a dictionary."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip().lower(): value.strip() for name, sign, value in pairs if sign}


def state_of(text: str) -> dict[str, Any]:
    """Return envbuild.json as a dictionary, {} if it is invalid: then it says nothing."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def portable_digest(record: bytes) -> str:
    """Return the sha256 of the rows of a RECORD that do not depend on the installer and the location.

    Left out are scripts (they name their interpreter), bytecode and the installer's own files.
    """
    rows = sorted(
        row
        for row in csv.reader(io.StringIO(record.decode("utf-8", "replace"), newline=""))
        if row and not row[0].endswith(_OWN) and "/bin/" not in f"/{_outside(row[0])}"
    )
    return "sha256:" + hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _outside(path: str) -> str:
    """Return `path` if it leads out of site-packages, "" otherwise."""
    return path if path.startswith("../") else ""


def _record(data: bytes) -> Note:
    return {"record": record_digest(data), "content": portable_digest(data)}


def _layer(data: bytes) -> Note:
    try:
        known = installed.parse_list(data)
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
    head = re.split(rb"\r?\n\r?\n", data, maxsplit=1)[0].decode("utf-8", "replace")
    message = HeaderParser().parsestr(head)
    return {
        "name": _one_line(message["Name"]),
        "version": _one_line(message["Version"]),
        "expression": _one_line(message["License-Expression"]),
        "licenses": list(_licenses(message.get_all("Classifier") or [], message["License"])),
    }


def _licenses(classifiers: Iterable[Any], field: Any) -> Iterator[str]:
    """Yield the licences in classifiers; if there are none, a License field that is a name and not a text."""
    named = [
        str(text).rpartition("::")[2].strip()
        for text in classifiers
        if str(text).startswith("License ::") and not str(text).strip().endswith("OSI Approved")
    ]
    short = str(field or "").strip()
    if not named and short and short != "UNKNOWN" and "\n" not in short and len(short) <= 80:
        named = [short]
    yield from dict.fromkeys(named)


def _one_line(value: Any) -> str:
    return " ".join(str(value or "").split())


def _debian(data: bytes) -> Note:
    rows = []
    for stanza in re.split(r"\n[ \t]*\n", data.decode("utf-8", "replace").replace("\r\n", "\n")):
        fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*?)[ \t]*$", stanza, re.MULTILINE))
        # Removed packages are listed as long as their configuration exists; status.d has no Status.
        if fields.get("Package") and fields.get("Status", "ok installed").endswith(" installed"):
            rows.append([fields["Package"], fields.get("Version", ""), fields.get("Architecture", "")])
    return rows


def _text(data: bytes) -> Note:
    return data.decode("utf-8", "replace")
