"""Readers of locks of Python packages: uv.lock, pylock.toml (PEP 751), poetry.lock and Pipfile.lock.

Sources: docs.astral.sh/uv, "Lockfile" (version 1); packaging.python.org, "pylock.toml specification" (lock-version
1.0); poetry's `poetry.lock` (lock-version 2.x); Pipfile.lock's `pipfile-spec` 6. Other versions are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from envbuild.errors import UsageError
from envbuild.files import parse_json
from envbuild.imports.pip_files import HASHES
from envbuild.imports.poetry import poetry_specifier
from envbuild.imports.statement import INDEX, OWN, SOURCE, Statement, check_version, git_address, lost, text_of
from envbuild.names import normalise
from envbuild.toml import list_at, read, table_at, value_at

# Format → key of its version, accepted versions, key of its packages.
_FORMATS = {
    "uv.lock": (("version",), "1", "package"),
    "pylock.toml": (("lock-version",), r"1\.0", "packages"),
    "poetry.lock": (("metadata", "lock-version"), r"2\.[0-9]+", "package"),
}
_ELSEWHERE = {"git", "url", "path", "directory", "vcs", "archive", "file", "virtual", "editable"}
_REMOTE = {"git", "url", "vcs", "archive"}
_EXTRA = r"extra == ['\"]([^'\"]+)['\"]"
_CLAUSE = re.compile(r"""(?:extra (?:==|!=) ['"][^'"]*['"]|['"][^'"]*['"] (?:not )?in (?:extras|dependency_groups))""")


def read_toml_lock(path: Path) -> Iterator[Statement]:
    """Yield the pins of a uv.lock, pylock.toml or poetry.lock, and uv's direct requirements. Raises UsageError."""
    name = "pylock.toml" if path.name.startswith("pylock") else path.name
    keys, known, packages = _FORMATS[name]
    document = read(path, UsageError)
    check_version(path, name, value_at(document.data, *keys), known)
    for where in (("requires-python",), ("metadata", "python-versions")):
        if python := value_at(document.data, *where):
            yield Statement("python", poetry_specifier(str(python)) or str(python), document.where(*where))
    seen = {""}
    for number, row in enumerate(map(table_at, list_at(document.data, packages))):
        at, source = document.where(packages, number), table_at(row, "source")
        kind = str(source.get("type") or next(iter(source), ""))
        if kind in ("virtual", "editable") and source.get(kind) == ".":
            yield from _own(row, at)
            continue
        names = [str(one) for one in list_at(row, "groups") or ["main"]]
        group = "" if "main" in names and not row.get("optional") else " ".join(names)
        if address := _address(row, source):
            yield _pin(row.get("name"), f" @ {address}", _markers(row), at, group)
        elif ({kind, *row} if name == "pylock.toml" else {kind}) & _ELSEWHERE:
            yield lost(f"{row.get('name')} {row.get('version', '')} {source or ''}", at, SOURCE, group)
        else:
            yield _pin(row.get("name"), row.get("version"), _markers(row), at, group)
            registry = str(source.get("registry") or source.get("url") or row.get("index") or "")
            if registry not in seen:
                seen.add(registry)
                yield Statement("index", registry, at) if "/whl/" in registry else lost(registry, at, INDEX)
    yield lost("url, hash, size", str(path), HASHES)


def _own(row: Mapping[str, Any], place: str) -> Iterator[Statement]:
    """Yield the requirements of the project to which a uv.lock belongs."""
    yield Statement("name", str(row.get("name")), place)
    metadata = table_at(row, "metadata")
    for group, found in {"": metadata.get("requires-dist"), **table_at(metadata, "requires-dev")}.items():
        for one in map(table_at, list_at(found)):
            marker = str(one.get("marker", ""))
            extras = ",".join(str(item) for item in list_at(one, "extras"))
            rest = re.sub(rf"(?: and )?{_EXTRA}(?: and )?", "", marker)
            text = f"{one.get('name')}{f'[{extras}]' if extras else ''}{one.get('specifier', '')}"
            text = f"{text} ; {rest}" if rest else text
            own = group or " ".join(re.findall(_EXTRA, marker))
            if normalise(str(one.get("name"))) == normalise(str(row.get("name"))):
                yield lost(text, place, OWN, own)
            elif _ELSEWHERE & one.keys() - _REMOTE:  # what is remote has its address in its own row
                yield lost(one, place, SOURCE, own)
            else:
                yield Statement("requirement", text, place, own)


def _address(row: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    """Return the address of a locked package: of its git commit, or of its file with the sha256; "" for neither."""
    vcs, archive, url = table_at(row, "vcs"), table_at(row, "archive"), str(source.get("url", ""))
    if "git" in source:  # uv: URL?rev=REF&subdirectory=FOLDER#COMMIT
        try:
            parts = urlsplit(str(source["git"]))
        except ValueError:  # brackets that are no IPv6 address
            return ""
        about = {"git": parts._replace(query="", fragment="").geturl(), "rev": parts.fragment}
        return git_address(dict(parse_qsl(parts.query)) | about)
    if vcs.get("type") == "git":
        return git_address(vcs | {"git": vcs.get("url", ""), "rev": vcs.get("commit-id")})
    if source.get("type") == "git":
        return git_address(dict(source) | {"git": url, "rev": source.get("resolved_reference")})
    if source.get("type", "url") != "url":  # an index of poetry's
        return ""
    files = [value_at(archive, "hashes", "sha256"), *(
        value_at(one, "hash") for one in (row.get("sdist"), *list_at(row, "wheels"), *list_at(row, "files"))
    )]  # fmt: skip
    hashes = {str(one).removeprefix("sha256:") for one in files if one}
    url = str(archive.get("url", "")) or url
    return f"{url}#sha256={hashes.pop()}" if url and len(hashes) == 1 else ""


def _markers(row: Mapping[str, Any]) -> str:
    """Return the marker of a locked package, with true in the place of clauses about extras and groups."""
    given = row.get("resolution-markers") or row.get("markers") or row.get("marker") or []
    given = table_at(given).get("main", []) if isinstance(given, dict) else given
    found = [f"({one})" for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)]
    return _CLAUSE.sub("python_version >= '3'", " or ".join(dict.fromkeys(found)))


def _pin(name: object, version: object, marker: str, place: str, group: str) -> Statement:
    if not isinstance(name, str) or not isinstance(version, str):
        return lost(f"{name} {version}", place, "no name and version", group)
    text = name + (version if " @ " in version else f"=={version}")
    return Statement("pin", f"{text}{f' ; {marker}' if marker else ''}", place, group)


def read_pipfile_lock(path: Path) -> Iterator[Statement]:
    """Yield the pins of a Pipfile.lock; those of other categories than `default` have their name as group."""
    text = text_of(path)
    try:
        data = table_at(parse_json(text))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    meta, lines = table_at(data, "_meta"), text.split("\n")
    check_version(path, "Pipfile.lock", meta.get("pipfile-spec"), "6")
    if python := value_at(meta, "requires", "python_version"):
        yield Statement("python", f"=={python}.*", str(path))
    for one in map(table_at, list_at(meta, "sources")):
        yield Statement("index", str(one.get("url")), str(path))
    for category in data.keys() - {"_meta"}:
        start = next((number for number, line in enumerate(lines) if line.strip().startswith(f'"{category}":')), 0)
        for name, row in table_at(data, category).items():
            numbers = (number for number in range(start, len(lines)) if lines[number].strip().startswith(f'"{name}":'))
            place, about = f"{path}:{next(numbers, 0) + 1}", table_at(row)
            group = "" if category == "default" else category
            address = git_address(about | {"rev": about.get("ref")})
            if not address and (not isinstance(about.get("version"), str) or _ELSEWHERE & about.keys()):
                yield lost(f"{name} {row}", place, SOURCE)
            else:
                extras = ",".join(map(str, list_at(about, "extras")))
                full = f"{name}[{extras}]" if extras else name
                version = f" @ {address}" if address else about["version"].removeprefix("==")
                yield _pin(full, version, _markers(about), place, group)
    yield lost("hashes", str(path), HASHES)
