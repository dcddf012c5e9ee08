"""Reader of pyproject.toml: PEP 621, PEP 735, and the tables of poetry, pdm, flit, uv, pixi and conda-lock.

Sources: packaging.python.org, "pyproject.toml specification" and "Dependency Groups"; python-poetry.org, "Dependency
specification"; docs.astral.sh/uv; conda-lock's documentation, "pyproject.toml".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from envbuild.errors import UsageError
from envbuild.imports.conda_files import KINDS, conda_entries, pixi_entries
from envbuild.imports.poetry import poetry_requirement, poetry_specifier
from envbuild.imports.statement import OWN, SOURCE, TOOL, Statement, git_address, lost, texts
from envbuild.names import normalise
from envbuild.recipe.checks import requirement_parts
from envbuild.toml import Document, list_at, read, table_at, value_at

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
}
_STRINGS = {
    ("project", "name"): "name",
    ("tool", "poetry", "name"): "name",
    ("project", "requires-python"): "python",
    ("tool", "flit", "metadata", "requires-python"): "python",
}
_INDEXES = (("tool", "uv", "index"), ("tool", "poetry", "source"), ("tool", "pdm", "source"))
_LOST = {("build-system", "requires"): "builds the project's own wheel", ("tool", "uv", "override-dependencies"): TOOL}
_POETRY, _CONDA_LOCK = ("tool", "poetry"), ("tool", "conda-lock")


def read_pyproject(path: Path) -> Iterator[Statement]:
    """Yield the statements of a pyproject.toml. Raises UsageError when it is not TOML."""
    document = read(path, UsageError)
    data = document.data
    for keys, kind in _STRINGS.items():
        if isinstance(text := value_at(data, *keys), str):
            yield Statement(kind, text, document.where(*keys))
    for array, group in _ARRAYS.items():
        for name in table_at(data, *array) if group is None else array[-1:]:
            place = (*array, name) if group is None else array
            found = texts(document, place, "requirement", name if group is None else group)
            yield from _without_own(document, found)
    yield from texts(document, ("tool", "uv", "constraint-dependencies"), "constraint")
    if "dependencies" in list_at(data, "project", "dynamic"):
        yield lost("dependencies", document.where("project", "dynamic"), "dynamic: name the file that has them")
    for keys, reason in _LOST.items():
        yield from (replace(one, reason=reason) for one in texts(document, keys, "lost"))
    for keys in _INDEXES:
        for number, one in enumerate(list_at(data, *keys)):
            yield Statement("index", str(value_at(one, "url")), document.where(*keys, number))
    required = {requirement_parts(str(one))[0] for one in list_at(data, "project", "dependencies")}
    for name, one in table_at(data, "tool", "uv", "sources").items():
        at, address = document.where("tool", "uv", "sources", name), git_address(table_at(one))
        if address and "marker" not in one and normalise(name) in required:
            yield Statement("requirement", f"{name} @ {address}", at)
        else:
            yield lost(f"{name} = {one}", at, f"{SOURCE}, or bind it in [indexes]")
    yield from _poetry(document)
    for name, one in table_at(data, *_CONDA_LOCK).items():
        keys = (*_CONDA_LOCK, name)
        if name == "dependencies":
            yield from conda_entries(document, keys)
        elif name in KINDS:
            yield from texts(document, keys, KINDS[name])
        else:
            yield lost(f"{name} = {one}", document.where(*keys), TOOL)
    yield from pixi_entries(document, ("tool", "pixi"))


def _without_own(
    document: Document, found: Iterator[Statement], seen: frozenset[str] = frozenset()
) -> Iterator[Statement]:
    """Yield the statements `found`; "pkg[a,b]" of the project pkg itself becomes what its extras a and b have."""
    own = value_at(document.data, "project", "name")
    extras = {normalise(name): name for name in table_at(document.data, *_EXTRAS)}
    for one in found:
        if one.reason or not isinstance(own, str) or requirement_parts(one.text)[0] != normalise(own):
            yield one
            continue
        named = re.match(r"[^\[;@]*\[([^]]*)\]", one.text)
        asked = {normalise(name.strip()) for name in named[1].split(",")} if named else set()
        if not asked or not asked <= extras.keys():
            yield replace(one, reason=OWN)
        for name in [extras[name] for name in extras if name in asked - seen]:
            inner = texts(document, (*_EXTRAS, name), one.kind, one.group)
            yield from _without_own(document, inner, seen | asked)


def _poetry(document: Document) -> Iterator[Statement]:
    poetry = table_at(document.data, *_POETRY)
    extras: dict[str, list[str]] = {}
    for name, found in table_at(poetry, "extras").items():
        at = document.where(*_POETRY, "extras", name)
        yield lost(f"{name} = {found}", at, f"an extra: carry it with --extra {name}", name)
        for one in list_at(found):
            extras.setdefault(normalise(str(one)), []).append(name)
    tables: dict[tuple[str, ...], str] = {(*_POETRY, "dependencies"): "", (*_POETRY, "dev-dependencies"): "dev"}
    tables |= {(*_POETRY, "group", name, "dependencies"): name for name in table_at(poetry, "group")}
    for keys, group in tables.items():
        for name, given in table_at(document.data, *keys).items():
            place = document.where(*keys, name)
            for one in given if isinstance(given, list) else [given]:
                about = one if isinstance(one, dict) else {"version": one}
                if name == "python":
                    yield Statement("python", poetry_specifier(str(about.get("version"))) or ">=3", place)
                    continue
                optional = " ".join(extras.get(normalise(name), ["optional"])) if about.get("optional") else ""
                yield from poetry_requirement(name, about, place, group or optional)
