"""Readers of locks of Python packages: uv.lock, pylock.toml (PEP 751), poetry.lock, Pipfile with its Pipfile.lock.

Sources: docs.astral.sh/uv, "Lockfile" (version 1); packaging.python.org, "pylock.toml specification" (lock-version
1.0); poetry's `poetry.lock` (lock-version 1.0 to 2.x); Pipfile.lock's `pipfile-spec` 6. Other versions are refused.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from envbuild.base.errors import UsageError
from envbuild.base.files import parse_json, read_small
from envbuild.base.packages import CHANNEL_ALIAS
from envbuild.base.text import normalise
from envbuild.base.toml import Document, list_at, read, table_at, value_at
from envbuild.contract.conda_meta import is_conda
from envbuild.imports.pip_files import HASHES, poetry_python, poetry_requirement
from envbuild.imports.statement import (
    BOUND,
    FOREIGN_FILE,
    INDEX,
    OTHER_SYSTEM,
    OWN,
    OWN_NAME,
    SOURCE,
    TOOL,
    TRUST,
    Statement,
    always_on_linux,
    check_version,
    for_linux,
    git_address,
    linux_places,
    lost,
    project_of,
    python_of,
    requirement_text,
    text_of,
)
from envbuild.inspect.facts import PythonPackage
from envbuild.inspect.reader import is_venv, open_artifact
from envbuild.recipe.model import PYTHONS
from envbuild.recipe.targets import VERSION_FILE, accelerator_of, torch_builds
from envbuild.run_environment import load_environment

# Format → key of its version, accepted versions, key of its packages.
_FORMATS = {
    "uv.lock": (("version",), "1", "package"),
    "pylock.toml": (("lock-version",), r"1\.0", "packages"),
    "poetry.lock": (("metadata", "lock-version"), r"(?:1\.[01]|2\.[0-9]+)", "package"),
}
_ELSEWHERE = {"git", "url", "path", "directory", "vcs", "archive", "file", "virtual", "editable"}
_REMOTE = {"git", "url", "vcs", "archive"}
_FOLDERS = {"path", "directory", "virtual", "editable"}
_FOREIGN = (
    "its wheels in the lock are for another operating system: its version is carried, of which an index may have others"
)
_EXTRA = r"extra == ['\"]([^'\"]+)['\"]"
_CLAUSE = re.compile(r"""(?:extra (?:==|!=) ['"][^'"]*['"]|['"][^'"]*['"] (?:not )?in (?:extras|dependency_groups))""")


def read_toml_lock(path: Path, groups: Collection[str] = ()) -> Iterator[Statement]:
    """Yield the pins of a uv.lock, pylock.toml or poetry.lock, and uv's direct requirements. Raises UsageError.

    `groups` are the extras and groups to carry; they choose among uv's pins for conflicting extras.
    """
    name = "pylock.toml" if path.name.startswith("pylock") else path.name
    keys, known, packages = _FORMATS[name]
    document = read(path, UsageError)
    check_version(path, name, value_at(document.data, *keys), known)
    for where in (("requires-python",), ("metadata", "python-versions")):
        if python := value_at(document.data, *where):
            yield from poetry_python(str(python), document.where(*where))
    extras: dict[str, list[str]] = {}
    for extra, items in table_at(document.data, "extras").items():
        for item in list_at(items):
            extras.setdefault(project_of(str(item)), []).append(extra)
    seen = {("", "")}
    rows = [table_at(row) for row in list_at(document.data, packages)]
    uses = _uses_of_uv(rows, groups) if name == "uv.lock" else _uses_of_poetry(rows) if name == "poetry.lock" else {}
    for number, row in enumerate(rows):
        at, source = document.where(packages, number), table_at(row, "source")
        kind = str(source.get("type") or next(iter(source), ""))
        if _is_own(row):
            yield from _own(row, at)
            continue
        names = [str(group) for group in list_at(row, "groups") or [row.get("category", "main")]]  # poetry 1: category
        if row.get("optional") and names == ["main"]:  # of poetry's extras
            names = extras.get(normalise(str(row.get("name"))), ["optional"])
        group = "" if "main" in names and not row.get("optional") else " ".join(names)
        use = uses.get(number, _Use(group))
        if use.reason:
            yield lost(f"{row.get('name')}=={row.get('version')}", at, use.reason, use.group)
            continue
        group = use.group
        marker = use.marker or _markers(row)
        if address := _address(row, source):
            yield _pin(row.get("name"), f" @ {address}", marker, at, group)
        elif ({kind, *row} if name == "pylock.toml" else {kind}) & _ELSEWHERE:
            reason = OWN_NAME if {kind, *row} & _FOLDERS else SOURCE
            yield lost(f"{row.get('name')} {row.get('version', '')} {source or ''}", at, reason, group)
        else:
            yield _pin(row.get("name"), row.get("version"), marker, at, group)
            wheels = _wheels(row) if name == "pylock.toml" else []
            if wheels and all(map(FOREIGN_FILE.search, wheels)):
                yield lost(wheels[0], at, _FOREIGN, group)
            registry = str(source.get("registry") or source.get("url") or row.get("index") or "")
            if (registry, group) not in seen and (registry, "") not in seen:
                seen.add((registry, group))
                is_pytorch = "/whl/" in registry or any(map(accelerator_of, registry.split("/")[3:]))
                yield Statement("index", registry, at, group) if is_pytorch else lost(registry, at, INDEX, group)
    yield from _python_of_wheels(document) if name == "pylock.toml" else ()
    yield from _manifest(document)
    yield lost("url, hash, size", str(path), HASHES)


def _wheels(row: Mapping[str, Any]) -> list[str]:
    """Return the file names of the wheels of a package in a pylock.toml, [] if it has a source archive, too."""
    rows = [] if row.get("sdist") else list_at(row, "wheels")
    return [posixpath.basename(str(value_at(wheel, "name") or value_at(wheel, "url"))) for wheel in rows]


def _python_of_wheels(document: Document) -> Iterator[Statement]:
    """Yield the Pythons that can install each package of a pylock.toml, unless that is each Python."""
    fitting, place = set[str](), ""
    for number, row in enumerate(map(table_at, list_at(document.data, "packages"))):
        matches = [re.search(r"-cp3(\d+)-cp3\d+-[^-]+\.whl$", wheel) for wheel in _wheels(row)]
        of_row = {f"3.{match[1]}" for match in matches if match}
        if matches and all(matches) and always_on_linux(_markers(row)) and not list_at(row, "groups"):
            fitting = fitting & of_row if place else of_row
            place = place or document.where("packages", number)
    others = [f"!={python}.*" for python in PYTHONS if python not in fitting]
    if len(fitting) == 1 or (fitting and len(others) == len(PYTHONS)):
        yield Statement("python", f"=={min(fitting)}.*", place)
    elif fitting and others:
        yield Statement("python", ",".join(others), place)


def _manifest(document: Document) -> Iterator[Statement]:
    """Yield the overrides and constraints of a uv.lock, and the Pythons for which it is.

    Source: docs.astral.sh/uv, "Lockfile", [manifest] and supported-markers.
    """
    for key, kind in (("overrides", "override"), ("constraints", "constraint")):
        place = document.where("manifest", key)
        for row in map(table_at, list_at(document.data, "manifest", key)):
            if _ELSEWHERE & row.keys():
                yield lost(row, place, SOURCE)
                continue
            yield Statement(kind, _requirement(row, str(row.get("marker") or "")), place)
    markers = [str(marker) for marker in list_at(document.data, "supported-markers")]
    yield from python_of(markers, document.where("supported-markers"))


@dataclass(frozen=True, slots=True)
class _Use:
    """Use of a locked package on Linux: by `group` ("" is always), under `marker`; unused if there is a `reason`."""

    group: str = ""
    marker: str = ""
    reason: str = ""


# Architecture and Python.
_Place = tuple[str, str]
_PLACES = linux_places()


def _uses_of_uv(rows: Sequence[Mapping[str, Any]], chosen: Collection[str]) -> dict[int, _Use]:
    """Return package number → use for a uv.lock, by following the dependencies from the project.

    The markers of dependencies name the project's extras that need them: extra-8-my-train-gpu.
    Source: docs.astral.sh/uv, "Lockfile" and "Conflicting dependencies".
    """
    own = next((number for number, row in enumerate(rows) if _is_own(row)), None)
    if own is None:
        return {}
    tables = [table_at(rows[own], key) for key in ("optional-dependencies", "dev-dependencies")]
    known = {normalise(name): name for table in tables for name in table}
    active = [known[normalise(name)] for name in chosen if normalise(name) in known]
    now = {place: _reached(rows, own, active, place) for place in _PLACES}
    by_group = {name: {place: _reached(rows, own, [name], place) for place in _PLACES} for name in known.values()}
    needed = {need.get("name") for row in rows for need in _needs_of(row)}
    uses: dict[int, _Use] = {}
    for number, row in enumerate(rows):
        if row.get("name") not in needed:
            continue
        places = [place for place in _PLACES if number in now[place]]
        others = [
            name for name, numbers in by_group.items() if any(number in row_numbers for row_numbers in numbers.values())
        ]
        if places:
            uses[number] = _Use("", _marker_of(places))
        elif others:
            uses[number] = _Use(" ".join(name for name in others if name not in active) or others[0])
        else:
            uses[number] = _Use(reason=OTHER_SYSTEM)
    return uses


def _is_own(row: Mapping[str, Any]) -> bool:
    source = table_at(row, "source")
    return "." in (source.get("virtual"), source.get("editable"))


def _reached(rows: Sequence[Mapping[str, Any]], own: int, groups: Sequence[str], place: _Place) -> set[int]:
    """Return the numbers of the packages that the project needs with its extras and groups `groups` at one place."""
    by_name: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        by_name.setdefault(str(row.get("name")), []).append(number)
    name = normalise(str(rows[own].get("name")))
    switched = {f"{kind}-{len(name)}-{name}-{normalise(group)}" for kind in ("extra", "group") for group in groups}
    reached: set[int] = set()
    asked = {(own, extra) for extra in ("", *groups)}
    left = list(asked)
    while left:
        number, extra = left.pop()
        reached.add(number)
        for needed in _needs_of(rows[number], extra):
            if not _is_true(str(needed.get("marker", "")), place, switched):
                continue
            for other in by_name.get(str(needed.get("name")), []):
                fits = all(needed[key] == rows[other].get(key) for key in ("version", "source") if key in needed)
                for more in ("", *map(str, list_at(needed, "extra"))) if fits else ():
                    if (other, more) not in asked:
                        asked.add((other, more))
                        left.append((other, more))
    return reached - {own}


def _needs_of(row: Mapping[str, Any], extra: str | None = None) -> list[dict[str, Any]]:
    """Return the dependencies of a package in a uv.lock: without extras (""), of one extra, or all of them (None)."""
    tables = {"": row.get("dependencies")}
    for key in ("optional-dependencies", "dev-dependencies"):
        for name, given in table_at(row, key).items():
            tables[name] = [*list_at(tables.get(name)), *list_at(given)]
    tables_used = tables.values() if extra is None else [tables.get(extra)]
    return [table_at(item) for table in tables_used for item in list_at(table)]


def _is_true(marker: str, place: _Place, extras: Collection[str] = ()) -> bool:
    """Return whether a marker is true on Linux at `place` with the active `extras`."""
    switched = re.sub(
        r"extra (==|!=) ['\"]([^'\"]*)['\"]",
        lambda match: f"python_version {'>=' if (match[2] in extras) is (match[1] == '==') else '<'} '3'",
        marker,
    )
    return for_linux(switched, (place,))


def _marker_of(places: Sequence[_Place]) -> str:
    """Return a marker for `places`, "" for all places; it also covers Pythons between the lowest and the highest."""
    arches = list(dict.fromkeys(arch for arch, _ in places))
    used = [python for python in PYTHONS if any(version == python for _, version in places)]
    parts = [f"platform_machine == '{arches[0]}'"] if len(arches) == 1 else []
    parts += [f"python_version >= '{used[0]}'"] if used[0] != PYTHONS[0] else []
    parts += [f"python_version <= '{used[-1]}'"] if used[-1] != PYTHONS[-1] else []
    return " and ".join(parts)


def _uses_of_poetry(rows: Sequence[Mapping[str, Any]]) -> dict[int, _Use]:
    """Return the packages of a poetry.lock that are unused on Linux: every dependency on them is for other systems.

    The lock omits the project's own dependencies, so a package without dependants counts as used.
    """
    needs: dict[str, list[tuple[int, str]]] = {}  # name → number of the package that needs it, and the marker
    for number, row in enumerate(rows):
        for name, given in table_at(row, "dependencies").items():
            for constraint in given if isinstance(given, list) else [given]:
                needs.setdefault(normalise(name), []).append((number, str(table_at(constraint).get("markers", ""))))
    unused: set[int] = set()
    changed = True
    while changed:
        changed = False
        for number, row in enumerate(rows):
            uses = needs.get(normalise(str(row.get("name"))), [])
            if number not in unused and uses and not any(by not in unused and for_linux(marker) for by, marker in uses):
                unused.add(number)
                changed = True
    return {number: _Use(reason=OTHER_SYSTEM) for number in unused}


def _own(row: Mapping[str, Any], place: str) -> Iterator[Statement]:
    """Yield the requirements of the project to which a uv.lock belongs."""
    yield Statement("name", str(row.get("name")), place)
    metadata = table_at(row, "metadata")
    for group, rows in {"": metadata.get("requires-dist"), **table_at(metadata, "requires-dev")}.items():
        for requirement_row in map(table_at, list_at(rows)):
            marker = str(requirement_row.get("marker", ""))
            text = _requirement(requirement_row, re.sub(rf"(?: and )?{_EXTRA}(?: and )?", "", marker))
            own = group or " ".join(re.findall(_EXTRA, marker))
            if normalise(str(requirement_row.get("name"))) == normalise(str(row.get("name"))):
                yield lost(text, place, OWN, own)
            elif _ELSEWHERE & requirement_row.keys() - _REMOTE:  # what is remote has its address in its own row
                yield lost(requirement_row, place, OWN_NAME, own)
            else:
                yield Statement("requirement", text, place, own)


def _requirement(row: Mapping[str, Any], marker: str) -> str:
    """Return the requirement in a row of a uv.lock, with another marker."""
    return requirement_text(row.get("name"), list_at(row, "extras"), str(row.get("specifier", "")), marker)


def _address(row: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    """Return the address of a locked package: its git commit, or its file with the sha256; "" for index packages."""
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
    files = [
        value_at(archive, "hashes", "sha256"),
        *(
            value_at(file_row, "hash")
            for file_row in (row.get("sdist"), *list_at(row, "wheels"), *list_at(row, "files"))
        ),
    ]
    hashes = {str(file).removeprefix("sha256:") for file in files if file}
    url = str(archive.get("url", "")) or url
    return f"{url}#sha256={hashes.pop()}" if url and len(hashes) == 1 else ""


def _markers(row: Mapping[str, Any]) -> str:
    """Return the marker of a locked package; clauses about extras and groups are replaced by true."""
    given = row.get("resolution-markers") or row.get("markers") or row.get("marker") or []
    given = table_at(given).get("main", []) if isinstance(given, dict) else given
    clauses = [f"({clause})" for clause in (given if isinstance(given, list) else [given]) if isinstance(clause, str)]
    return _CLAUSE.sub("python_version >= '3'", " or ".join(dict.fromkeys(clauses)))


def _pin(name: object, version: object, marker: str, place: str, group: str) -> Statement:
    if not isinstance(name, str) or not isinstance(version, str):
        return lost(f"{name} {version}", place, "no name and version", group)
    text = name + (version if " @ " in version else f"=={version}")
    return Statement("pin", f"{text}{f' ; {marker}' if marker else ''}", place, group)


_NO_CATEGORIES = ("source", "requires", "scripts", "pipenv")
_CATEGORIES = {"packages": "", "dev-packages": "develop"}
_SETTINGS = {"extras", "editable", "path", "file", "index", "git", "ref", "subdirectory", "version", "markers"}


def read_pipfile(path: Path) -> Iterator[Statement]:
    """Yield the statements of a Pipfile; the group of other packages than those of [packages] is the category."""
    document = read(path, UsageError)
    for key in ("python_version", "python_full_version"):
        if python := value_at(document.data, "requires", key):
            yield Statement("python", f"=={str(python).removesuffix('.*')}.*", document.where("requires", key))
            break
    for key, value in table_at(document.data, "pipenv").items():
        yield lost(f"{key} = {value}", document.where("pipenv", key), TOOL)
    tables = {name: table_at(table) for name, table in document.data.items() if name not in _NO_CATEGORIES}
    for number, row in enumerate(map(table_at, list_at(document.data, "source"))):
        # An index that packages name belongs to their categories.
        indexes = [(name, value_at(given, "index")) for name, table in tables.items() for given in table.values()]
        users = [name for name, index in indexes if index is not None and index == row.get("name")]
        group = " ".join(dict.fromkeys(_CATEGORIES.get(name, name) for name in users))
        if row.get("verify_ssl") is False:
            yield lost(f"verify_ssl = false of {row.get('url')}", document.where("source", number), TRUST)
        yield Statement(
            "index", str(row.get("url")), document.where("source", number), "" if "packages" in users else group
        )
    for category, table in tables.items():
        group = _CATEGORIES.get(category, category)
        for name, given in table.items():
            place, about = document.where(category, name), given if isinstance(given, dict) else {"version": given}
            yield from poetry_requirement(name, _as_poetry(about), place, group)
            if "index" in about:
                yield lost(f"{name}: index = {about['index']}", place, BOUND, group)


def _as_poetry(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return pipenv's table of a package as Poetry's: other names of keys are variables of markers."""
    markers = [str(about["markers"])] if "markers" in about else []
    markers += [f"{key} {value}" for key, value in about.items() if key not in _SETTINGS and isinstance(value, str)]
    kept = {key: value for key, value in about.items() if key in _SETTINGS and key not in ("index", "editable")}
    kept |= {"rev": kept.pop("ref")} if "ref" in kept else {}
    joined = " and ".join(f"({marker})" if len(markers) > 1 else marker for marker in markers)
    return kept | {"markers": joined} if markers else kept


def read_pipfile_lock(path: Path) -> Iterator[Statement]:
    """Yield the pins of a Pipfile.lock; the group is the category, "" for `default`."""
    text = text_of(path)
    try:
        data = table_at(parse_json(text))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    meta, lines = table_at(data, "_meta"), text.split("\n")
    check_version(path, "Pipfile.lock", meta.get("pipfile-spec"), "6")
    if python := value_at(meta, "requires", "python_version"):
        yield Statement("python", f"=={python}.*", str(path))
    for source_row in map(table_at, list_at(meta, "sources")):
        yield Statement("index", str(source_row.get("url")), str(path))
    for category in [name for name in data if name != "_meta"]:
        start = _line_of_table(lines, category, 0)
        for name, row in table_at(data, category).items():
            place, about = f"{path}:{_line_of_table(lines, name, start) + 1}", table_at(row)
            group = "" if category == "default" else category
            address = git_address(about | {"rev": about.get("ref")})
            if not address and (not isinstance(about.get("version"), str) or _ELSEWHERE & about.keys()):
                yield lost(f"{name} {row}", place, SOURCE)
            else:
                full = requirement_text(name, list_at(about, "extras"), "")
                version = f" @ {address}" if address else about["version"].removeprefix("==")
                yield _pin(full, version, _markers(about), place, group)
    yield lost("hashes", str(path), HASHES)


def _line_of_table(lines: Sequence[str], name: str, start: int) -> int:
    """Return the index of the first of `lines` from `start` where the object `name` begins, 0 if there is none."""
    begin = re.compile(rf'\s*"{re.escape(name)}"\s*:\s*\{{')  # "index" may be a package, and is a key of all
    return next((number for number in range(start, len(lines)) if begin.match(lines[number])), 0)


def is_environment(path: Path) -> bool:
    """Return whether `path` is the folder of a venv or conda environment."""
    return path.is_dir() and (is_conda(path) or is_venv(path))


def read_installed(path: Path) -> Iterator[Statement]:
    """Yield a pin for each installed package, and a requirement for each requested by a user. Raises EnvbuildError."""
    with open_artifact(str(path.absolute()), load_environment(), None) as opened:
        inventory, about = opened.contents(hashes=False), opened.about
    if about.python:
        yield Statement("python", f"=={about.python}.*", f"{path}/pyvenv.cfg")
    for package in inventory.own_conda:
        place = f"{path}/conda-meta/{package.name}-{package.version}-{package.build}.json"
        yield Statement("conda-pin", f"{package.name} {package.version} {package.build}", place)
    for channel in dict.fromkeys(package.channel for package in inventory.own_conda if package.channel):
        yield Statement("channel", channel.removeprefix(f"{CHANNEL_ALIAS}/"), f"{path}/conda-meta")
    requested = {
        distribution.name for distribution in inventory.python if f"{distribution.info}/REQUESTED" in inventory.files
    }
    for installed in inventory.python:
        place = f"{path}/{installed.info}"
        if _content(path, installed, "INSTALLER").strip() == "conda":
            continue
        if normalise(installed.name) == "ddp-train":
            yield lost(f"{installed.name}=={installed.version}", place, "envbuild's trainer, which every artifact gets")
            continue
        try:
            origin = table_at(parse_json(_content(path, installed, "direct_url.json") or "{}"))
        except ValueError:
            origin = {}
        if origin:
            yield lost(f"{installed.name} @ {origin.get('url')}", place, SOURCE)
            continue
        if installed.name in requested:
            yield Statement("requirement", installed.name, place)
        yield Statement("pin", f"{installed.name}=={installed.version}", place)
        if normalise(installed.name) == "torch":
            for name, version in torch_builds(_content(path, installed, f"../{VERSION_FILE}")).items():
                parts = version.split(".")
                tag = f"cu{''.join(parts)}" if name == "cuda" else f"rocm{'.'.join(parts[:2])}"
                yield Statement("accelerator", tag, place)


def _content(path: Path, package: PythonPackage, name: str) -> str:
    try:
        return read_small(path / package.info / name).decode(errors="replace") if package.info else ""
    except OSError:
        return ""
