"""Reader of pyproject.toml: PEP 621, PEP 735, and the tables of poetry, pdm, flit, uv, pixi and conda-lock.

Sources: packaging.python.org, "pyproject.toml specification" and "Dependency Groups"; python-poetry.org, "Dependency
specification"; docs.astral.sh/uv; conda-lock's documentation, "pyproject.toml".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from envbuild.base.errors import UsageError
from envbuild.base.text import normalise
from envbuild.base.toml import Document, list_at, read, table_at, value_at
from envbuild.data import load_table
from envbuild.imports.conda_files import KINDS, conda_entries, conda_spec, pixi_default, pixi_entries
from envbuild.imports.pip_files import beside, pip_line, poetry_python, poetry_requirement, poetry_specifier
from envbuild.imports.signs import gpu_signs
from envbuild.imports.statement import (
    BOUND,
    COMMENT,
    EXCLUDED,
    INDEX,
    OTHER_SYSTEM,
    OWN,
    OWN_NAME,
    SOURCE,
    TOOL,
    UNUSED_INDEX,
    Statement,
    for_linux,
    git_address,
    linux_places,
    lost,
    python_of,
    split_extras,
    texts,
)
from envbuild.recipe.checks import requirement_parts
from envbuild.recipe.targets import ARCHES

_EXTRAS = ("project", "optional-dependencies")
# Arrays of requirements, and the group that they form; for tables of such arrays, None: their keys are the groups.
_ARRAYS: dict[tuple[str, ...], str | None] = {
    ("project", "dependencies"): "",
    _EXTRAS: None,
    ("dependency-groups",): None,
    ("tool", "flit", "metadata", "requires"): "",
    ("tool", "flit", "metadata", "requires-extra"): None,
    ("tool", "pdm", "dev-dependencies"): None,
    ("tool", "uv", "dev-dependencies"): "dev",
    ("tool", "rye", "dev-dependencies"): "dev",
}
_STRINGS = {
    ("project", "name"): "name",
    ("tool", "poetry", "name"): "name",
    ("project", "requires-python"): "python",
    ("tool", "flit", "metadata", "requires-python"): "python",
}
_INDEXES = (
    ("tool", "uv", "index"),
    ("tool", "poetry", "source"),
    ("tool", "pdm", "source"),
    ("tool", "rye", "sources"),
)
_DESCRIPTIONS: tuple[tuple[str, ...], ...] = (
    ("project", "description"),
    ("project", "keywords"),
    ("tool", "poetry", "description"),
)
_UV_INDEXES = ("index-url", "extra-index-url")
# Settings that change what uv resolves to, or builds.
_UV_OTHER = (
    *("find-links", "torch-backend", "prerelease", "resolution", "fork-strategy", "index-strategy", "no-index"),
    *("exclude-dependencies", "dependency-metadata", "required-environments", "conflicts", "no-sources"),
    *("no-build", "no-build-package", "no-binary", "no-binary-package", "only-binary", "extra-build-dependencies"),
    *(
        *("default-groups", "link-mode", "required-version", "package", "python-preference", "python-downloads"),
        "no-build-isolation",
        "no-build-isolation-package",
        "build-constraint-dependencies",
        "config-settings",
    ),
)
_UV_SETTINGS = (*_UV_INDEXES, *_UV_OTHER)
# Tables and values of [tool] that read_pyproject reads.
_READ: tuple[tuple[str, ...], ...] = (
    *_ARRAYS,
    *_INDEXES,
    *(("tool", "uv", *key) for key in (("sources",), ("constraint-dependencies",), ("override-dependencies",))),
    *(("tool", "uv", *pip, key) for pip in ((), ("pip",)) for key in _UV_SETTINGS),
    ("tool", "poetry", "dependencies"),
    ("tool", "poetry", "dev-dependencies"),
    ("tool", "poetry", "extras"),
    ("tool", "poetry", "group"),
    ("tool", "conda-lock"),
    ("tool", "pdm", "resolution"),
    ("tool", "pixi"),
)
# conda's platforms of the architectures.
_PLATFORMS = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}
_HATCH, _HATCH_KEYS = ("tool", "hatch", "envs"), ("dependencies", "extra-dependencies")
_HATCH_SETTINGS = {
    "python",
    "features",
    "env-vars",
    "template",
    "matrix",
    "pre-install-commands",
    "post-install-commands",
}
_CONDA_ONLY = re.compile(
    r"pytorch(?:-(?:cuda|gpu|cpu|mutex))?|cudatoolkit|cuda-(?:version|nvcc|cudart|libraries)|cudnn|nccl"
)
_POETRY, _CONDA_LOCK = ("tool", "poetry"), ("tool", "conda-lock")


def builds_package(path: Path) -> bool:
    """Return whether a pyproject.toml has a build system and no setting that excludes packaging."""
    data = read(path, UsageError).data
    is_package = value_at(data, "tool", "uv", "package") is not False
    is_package = is_package and value_at(data, *_POETRY, "package-mode") is not False
    return "build-system" in data and is_package and bool(table_at(data, "project") or table_at(data, *_POETRY))


def read_pyproject(path: Path) -> Iterator[Statement]:
    """Yield the statements of a pyproject.toml. Raises UsageError when it is not TOML."""
    document = read(path, UsageError)
    data = document.data
    for keys, kind in _STRINGS.items():
        if isinstance(text := value_at(data, *keys), str):
            yield Statement(kind, text, document.where(*keys))
    in_default = pixi_default(document, ("tool", "pixi"))  # extras and groups are features of pixi, too
    for place, own in _arrays(document):
        statements = texts(document, place, "requirement", "" if own in in_default else own)
        yield from _sourced(document, _without_own(document, statements))
    for name, about in table_at(data, *_HATCH).items():
        for key in _HATCH_KEYS:
            yield from texts(document, (*_HATCH, name, key), "requirement", name)
        for key in _HATCH_SETTINGS & table_at(about).keys():
            value, at = about[key], document.where(*_HATCH, name, key)
            for variable, text in value.items() if isinstance(value, dict) else [("", value)]:
                yield lost(f"[{'.'.join((*_HATCH, name))}] {key} {variable}".rstrip() + f" = {text}", at, TOOL)
    yield from texts(document, ("tool", "uv", "constraint-dependencies"), "constraint")
    yield from texts(document, ("tool", "uv", "override-dependencies"), "override")
    yield from python_of(list(map(str, list_at(data, "tool", "uv", "environments"))), document.where("tool", "uv"))
    for name, version in table_at(data, "tool", "pdm", "resolution", "overrides").items():
        text = str(version)
        override = (
            f"{name} @ {text}" if "://" in text else f"{name}{text if re.match('[<>=!~]', text) else f'=={text}'}"
        )
        yield Statement("override", override, document.where("tool", "pdm", "resolution", "overrides", name))
    for text in list_at(data, "tool", "pdm", "resolution", "excludes"):
        yield lost(f"excludes = {text}", document.where("tool", "pdm", "resolution", "excludes"), TOOL)
    yield from _dynamic(document)
    for statement in texts(document, ("build-system", "requires"), "lost"):
        yield replace(statement, reason="builds the project's own wheel")
    yield from _uv_settings(document)
    for keys in _INDEXES:
        yield from _indexes(document, keys)
    yield from _poetry(document)
    for name, value in table_at(data, *_CONDA_LOCK).items():
        keys = (*_CONDA_LOCK, name)
        if name == "dependencies":
            yield from conda_entries(document, keys)
        elif name in KINDS:
            yield from texts(document, keys, KINDS[name])
        else:
            yield lost(f"{name} = {value}", document.where(*keys), TOOL)
    yield from pixi_entries(document, ("tool", "pixi"))
    yield from _unread(document)


def _unread(document: Document) -> Iterator[Statement]:
    """Yield the signs of GPUs in classifiers, and in settings of tools that this module does not read."""
    data, checkers = document.data, load_table("gpu_signs")["checkers"]
    settings: list[tuple[str, ...]] = [("project", "classifiers")]
    for name in table_at(data, "tool"):
        settings += [] if name in checkers else _leaves(data, ("tool", name))
    for keys in _DESCRIPTIONS:
        value = value_at(data, *keys)
        words = " ".join(map(str, value)) if isinstance(value, list) else str(value or "")
        comment = Statement("comment", f"{keys[-1]} = {words}", document.where(*keys), reason=COMMENT)
        yield from [comment] if gpu_signs([comment]) else []
    for keys in settings:
        is_hatch = keys[:3] == _HATCH and not {*_HATCH_KEYS, *_HATCH_SETTINGS}.isdisjoint(keys[4:])
        if is_hatch or any(keys[: len(read)] == read for read in _READ):
            continue
        value = value_at(data, *keys)
        for text in value if isinstance(value, list) else [value]:
            statement = lost(f"[{'.'.join(keys[:-1])}] {keys[-1]} = {text}", document.where(*keys), TOOL)
            yield from [statement] if gpu_signs([statement]) else []


def _leaves(data: Mapping[str, Any], keys: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the keys of all values below `keys` that are no tables."""
    value = value_at(data, *keys)
    return [path for name in value for path in _leaves(data, (*keys, name))] if isinstance(value, dict) else [keys]


def _dynamic(document: Document) -> Iterator[Statement]:
    """Yield the requirements in the files that setuptools or hatch-requirements-txt reads for [project] dynamic.

    Sources: setuptools, "Dynamic Metadata"; hatch-requirements-txt, README.
    """
    data, place = document.data, document.where("project", "dynamic")
    folder = document.path.parent
    setuptools = ("tool", "setuptools", "dynamic")
    hatch = ("tool", "hatch", "metadata", "hooks", "requirements_txt")
    extras = table_at(data, *setuptools, "optional-dependencies")
    files = {
        "dependencies": {
            "": value_at(data, *setuptools, "dependencies", "file")
            or value_at(data, *hatch, "files")
            or value_at(data, *hatch, "filename")
        },
        "optional-dependencies": {name: value_at(about, "file") for name, about in extras.items()}
        | dict(table_at(data, *hatch, "optional-dependencies")),
    }
    dynamic = list_at(data, "project", "dynamic")
    for key in [key for key in files if key in dynamic]:
        for group, given in files[key].items():
            for name in [given] if isinstance(given, str) else list_at(given):
                for statement in pip_line(f"-r {shlex.quote(str(name))}", place, beside(folder)):
                    yield replace(statement, group=group)
        if not any(files[key].values()):
            yield lost(key, place, "dynamic: name the file that has them with --from")


def _sourced(document: Document, statements: Iterator[Statement]) -> Iterator[Statement]:
    """Yield the requirements `statements`; unsupported sources in [tool.uv.sources] are marked as not carried."""
    known = _uv_sources(document)
    for statement in statements:
        own = [] if statement.reason else known.get(requirement_parts(statement.text)[0], [])
        sources = [about for about in own if _applies(about, statement)]
        if any({"workspace", "path"} & about.keys() for about in sources):
            yield replace(statement, reason=OWN_NAME)
        elif sources and all("url" in about for about in sources):
            yield replace(statement, reason=f"its source is {sources[0]['url']}: write NAME @ URL#sha256=HEX")
        else:
            yield statement


def _applies(source: Mapping[str, Any], requirement: Statement) -> bool:
    """Return whether an entry of [tool.uv.sources] applies to a requirement: on Linux, and for its extra or group."""
    groups = {normalise(name) for name in requirement.group.split()}
    group = normalise(_group_of(source))
    return for_linux(str(source.get("marker", ""))) and (not group or group in groups)


def _group_of(source: Mapping[str, Any]) -> str:
    """Return the extra or group of an entry of [tool.uv.sources], from its keys or its marker; "" for all."""
    named = re.search(r"\bextra\s*==\s*['\"]([^'\"]+)['\"]", str(source.get("marker", "")))
    return str(source.get("extra") or source.get("group") or (named[1] if named else ""))


def _required(document: Document) -> dict[str, list[str]]:
    """Return normalised project name → groups ("" for none) whose requirements contain it."""
    groups: dict[str, list[str]] = {}
    for place, group in _arrays(document):
        for statement in texts(document, place, "requirement", group):
            if not statement.reason:
                groups.setdefault(requirement_parts(statement.text)[0], []).append(statement.group)
    return groups


def _arrays(document: Document) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys of each array of requirements, and its group."""
    for array, group in _ARRAYS.items():
        if group is not None:
            yield array, group
        else:
            yield from (((*array, name), name) for name in table_at(document.data, *array))


def _uv_sources(document: Document) -> dict[str, list[Mapping[str, Any]]]:
    """Return normalised project name → entries of [tool.uv.sources]."""
    table = table_at(document.data, "tool", "uv", "sources")
    return {
        normalise(name): [table_at(table) for table in (given if isinstance(given, list) else [given])]
        for name, given in table.items()
    }


def _uv_settings(document: Document) -> Iterator[Statement]:
    """Yield the indexes and sources in the settings of uv."""
    data = document.data
    for root in (("tool", "uv"), ("tool", "uv", "pip")):
        table = table_at(data, *root)
        for key in _UV_INDEXES:
            given = table.get(key, [])
            for url in [given] if isinstance(given, str) else list_at(given):
                yield Statement("index", str(url), document.where(*root, key))
        for key in _UV_OTHER:
            value, reason = table.get(key, []), EXCLUDED if key == "exclude-dependencies" else TOOL
            for name, inner in value.items() if isinstance(value, dict) else [("", value)]:
                head = f"[{'.'.join((*root, key))}] {name}" if name else key
                for item in inner if isinstance(inner, list) else [inner]:
                    yield lost(f"{head} = {item}", document.where(*root, key, *filter(None, [name])), reason)
        if "exclude-newer" in table:
            yield Statement("age", _age(table["exclude-newer"]), document.where(*root, "exclude-newer"))
        for name, age in table_at(table, "exclude-newer-package").items():
            text, at = f"exclude-newer of {name} = {age}", document.where(*root, "exclude-newer-package", name)
            yield lost(text, at, "a recipe limits the age of all packages, or of those of an index")
    required = _required(document)
    for name, given in table_at(data, "tool", "uv", "sources").items():
        at = document.where("tool", "uv", "sources", name)
        for about in map(table_at, given if isinstance(given, list) else [given]):
            address, group, marker = git_address(about), _group_of(about), str(about.get("marker", ""))
            users = [
                group_name
                for group_name in required.get(normalise(name), [])
                if not group or normalise(group_name) == normalise(group)
            ]
            if not for_linux(marker):
                yield lost(f"{name} = {about}", at, OTHER_SYSTEM, group)
            elif address and users:
                yield from (Statement("requirement", f"{name} @ {address}", at, user) for user in users)
            elif address:
                yield lost(f"{name} = {about}", at, "no requirement here names this package", group)
            elif "index" in about:
                yield lost(f"{name} = {about}", at, BOUND, "" if "" in users else " ".join(users) or group)
            elif not {"workspace", "path", "url"} & about.keys():  # those are named at the requirement
                yield lost(f"{name} = {about}", at, SOURCE, group)


def _age(value: object) -> str:
    """Return uv's `exclude-newer` as a recipe writes it, where uv's form differs: P7D and "1w" are spans."""
    text = str(value)
    span = re.fullmatch(r"P(\d+)([DW])|PT(\d+)(H)|(\d+) ?([hdw]|hours?|days?|weeks?)(?: ago)?", text, re.I)
    number, unit = [part for part in span.groups() if part] if span else ("", "")
    return f"{int(number)} {({'h': 'hours', 'd': 'days', 'w': 'weeks'})[unit[0].lower()]}" if span else text


def _indexes(document: Document, keys: tuple[str, ...]) -> Iterator[Statement]:
    """Yield the named indexes at `keys`, of uv, poetry or pdm.

    An index that packages name as their source belongs to the extras or groups of these packages. It is not carried if
    they are for other systems, or if it is explicit and no package names it.
    """
    uses: dict[str, list[tuple[str, str]]] = {}  # the index → group and marker of each package that names it
    required = _required(document)
    for name, about in [(name, about) for name, given in _uv_sources(document).items() for about in given]:
        # A package that only extras require needs its index with these alone.
        groups = [group] if (group := _group_of(about)) else required.get(name, [""])
        uses.setdefault(str(about.get("index")), []).extend((group, str(about.get("marker", ""))) for group in groups)
    for group, about in [(group, about) for group, _, about, _ in _poetry_entries(document) if "source" in about]:
        system = str(about.get("platform", ""))
        marker = f"sys_platform == '{system}'" if re.fullmatch(r"\w+", system) else str(about.get("markers", ""))
        marker, extras = split_extras(marker)
        uses.setdefault(str(about.get("source")), []).append((extras or group, marker))
    for number, row in enumerate(map(table_at, list_at(document.data, *keys))):
        place, url = document.where(*keys, number), str(row.get("url"))
        for key in sorted({"include_packages", "exclude_packages"} & row.keys()):  # pdm
            yield lost(f"{key} = {row[key]}", document.where(*keys, number, key), INDEX)
        if row.get("type") == "find_links" or row.get("format") == "flat":
            yield lost(f"find-links {url}", place, "find-links belong to pip's configuration, which envbuild reads")
            continue
        used = uses.get(str(row.get("name")), [])
        if row.get("default") is True or row.get("priority") in ("default", "primary"):
            yield lost(
                f"default = true of {url}", place, "the site's pip configuration decides whether PyPI is asked, too"
            )
        if "exclude-newer" in row:
            yield lost(f"exclude-newer = {row['exclude-newer']}", place, "say it of its URL in [exclude_newer_index]")
        here = [group for group, marker in used if for_linux(marker)]
        arches = [
            arch for arch in ARCHES if not used or any(for_linux(marker, linux_places([arch])) for _, marker in used)
        ]
        platform = _PLATFORMS[arches[0]] if len(arches) == 1 else ""
        if used and not here:
            yield lost(url, place, OTHER_SYSTEM)
        elif not used and (row.get("explicit") is True or row.get("priority") == "explicit"):
            yield lost(url, place, UNUSED_INDEX)
        else:
            yield Statement("index", url, place, "" if "" in here else " ".join(dict.fromkeys(here)), platform)


def _without_own(
    document: Document, statements: Iterator[Statement], seen: frozenset[str] = frozenset()
) -> Iterator[Statement]:
    """Yield the statements `statements`; "pkg[a,b]" of the project pkg itself becomes the requirements of a and b."""
    own = value_at(document.data, "project", "name")
    extras = {normalise(name): name for name in table_at(document.data, *_EXTRAS)}
    for statement in statements:
        if statement.reason or not isinstance(own, str) or requirement_parts(statement.text)[0] != normalise(own):
            yield statement
            continue
        named = re.match(r"[^\[;@]*\[([^]]*)\]", statement.text)
        asked = {normalise(name.strip()) for name in named[1].split(",")} if named else set()
        if not asked or not asked <= extras.keys():
            yield replace(statement, reason=OWN)
        for name in [extras[name] for name in extras if name in asked - seen]:
            inner = texts(document, (*_EXTRAS, name), statement.kind, statement.group)
            yield from _without_own(document, inner, seen | asked)


def _poetry(document: Document) -> Iterator[Statement]:
    poetry = table_at(document.data, *_POETRY)
    conda_lock = table_at(document.data, *_CONDA_LOCK)
    is_conda = bool(conda_lock) and conda_lock.get("default-non-conda-source") != "pip"
    extras: dict[str, list[str]] = {}
    for name, names in table_at(poetry, "extras").items():
        at = document.where(*_POETRY, "extras", name)
        yield lost(f"{name} = {names}", at, f"an extra: carry it with --extra {name}", name)
        for item in list_at(names):
            extras.setdefault(normalise(str(item)), []).append(name)
    for group, name, about, place in _poetry_entries(document):
        if name == "python":
            yield from poetry_python(str(about.get("version")), place)
            continue
        optional = " ".join(extras.get(normalise(name), ["optional"])) if about.get("optional") else ""
        version = poetry_specifier(str(about.get("version", "*")))
        # conda-lock reads poetry's dependencies as packages of conda; PyPI has others under these names.
        if is_conda and _CONDA_ONLY.fullmatch(name) and about.get("source") != "pypi" and version is not None:
            yield conda_spec("conda", f"{name} {version}".strip(), place, group or optional)
        else:
            yield from poetry_requirement(name, about, place, group or optional)


def _poetry_entries(document: Document) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Yield (group, name, table, place) of each of poetry's dependencies; a version counts as a table with it."""
    tables: dict[tuple[str, ...], str] = {(*_POETRY, "dependencies"): "", (*_POETRY, "dev-dependencies"): "dev"}
    groups = table_at(document.data, *_POETRY, "group")
    tables |= {(*_POETRY, "group", name, "dependencies"): name for name in groups}
    for keys, group in tables.items():
        for name, given in table_at(document.data, *keys).items():
            for item in given if isinstance(given, list) else [given]:
                about = item if isinstance(item, dict) else {"version": item}
                yield group, name, about, document.where(*keys, name)
