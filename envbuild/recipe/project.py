"""`[project]`: the user's own code, and the requirements that it declares.

Sources: PyPA "pyproject.toml specification" and "Dependency Groups"; setuptools, "Configuring setuptools using
pyproject.toml" ([tool.setuptools.dynamic]).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from envbuild.base.errors import RecipeError
from envbuild.base.files import read_small
from envbuild.base.text import normalise
from envbuild.base.toml import Document, form, key, nearest, read, required, table_at, value_at
from envbuild.recipe.checks import requirement_problem

_MODULE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
# Files from which a build backend learns the project's name and metadata.
_METADATA = ("pyproject.toml", "setup.cfg", "setup.py")
_EXTRAS, _GROUPS = ("project", "optional-dependencies"), ("dependency-groups",)


@dataclass(frozen=True)
class ProjectTable:
    """`[project]`: the user's own code, which every artifact gets last. It is part of the plan, and of no lock."""

    path: str = required(
        "The project's folder, relative to the recipe's: with pyproject.toml ([project] or [build-system]) or setup.py"
        " a wheel is built of it, else its files are copied.",
        pattern=r"^\S(.*\S)?$",
        example="../..",
    )
    module: str = key(
        "",
        "Copy the files under this module path instead of building a wheel. Default without a pyproject.toml:"
        " the folder's name.",
        check=lambda text: form(_MODULE, "is not a module path, such as pkg or pkg.sub")(text) if text else None,
        example="pkg",
    )
    include: tuple[str, ...] = key(
        (),
        "Globs of the files to take. Default: those that git tracks, else all.",
        example=["src/**", "pyproject.toml"],
    )
    exclude: tuple[str, ...] = key((), "Globs of files to leave out.", example=["tests/**"])
    extras: tuple[str, ...] = key((), "Extras of the project that the lock covers too.", example=["train"])
    groups: tuple[str, ...] = key((), "Dependency groups that the lock covers too.", example=["eval"])

    def takes(self, path: str) -> bool:
        """Return whether the globs select the file at `path`, relative to the project's folder."""
        return _matches(path, self.include or ("*",)) and not _matches(path, self.exclude)


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The user's own code in the folder `root`.

    `name` is its distribution, "" if only its build backend knows it. `module` is the import path of a plain folder's
    files, "" for a project that becomes a wheel. `files` are (path, mode, sha256). `commit` is git's, with `-dirty`
    if tracked files have changed. With `editable`, an environment refers to the folder, without a commit. `where` is
    FILE:LINE:COL of its path in the recipe.
    """

    root: Path
    name: str
    module: str
    extras: tuple[str, ...]
    where: str
    files: tuple[tuple[str, int, str], ...] = ()
    commit: str = ""
    editable: bool = False

    @property
    def digest(self) -> str:
        """sha256 over all inputs of its files in an artifact; contents of files do not count if `editable`."""
        from envbuild.base.packages import json_digest

        files = [file for file in self.files if not self.editable or file[0] in _METADATA]
        content = [str(self.root) if self.editable else "", self.module, files]
        return json_digest(content)


def declared_code(document: Document, table: ProjectTable) -> OwnCode:
    """Return the project of a recipe, without its files. Raises RecipeError for a folder without a project."""
    where = document.where("project", "path")
    root = (document.path.parent / table.path).resolve()
    if not root.is_dir():
        raise RecipeError(f"{where}: 'path' in [project]: there is no folder {root}")
    data = _pyproject(root).data
    module = table.module
    if not module and not {"project", "build-system"} & data.keys() and not (root / "setup.py").is_file():
        module = root.name
        if form(_MODULE, "")(module):
            raise RecipeError(
                f"{where}: 'path' in [project]: {root} has no package, and {module!r} is not a module's name",
                'name one: module = "pkg" in [project]',
            )
    name = value_at(data, "project", "name")
    name = module.replace(".", "-") if module else name if isinstance(name, str) else ""
    return OwnCode(root, normalise(name), module, table.extras, where)


def _pyproject(root: Path) -> Document:
    path = root / "pyproject.toml"
    return read(path) if path.is_file() else Document(path, "", {})


def declared_requirements(code: OwnCode, table: ProjectTable, document: Document) -> Iterator[str]:
    """Yield the requirements in the pyproject.toml of `code`, with the extras and groups that `table` names.

    Requirements that only a build backend knows are left out. Raises RecipeError for invalid requirements.
    """
    from packaging.requirements import Requirement

    own = _pyproject(code.root)
    name = normalise(str(value_at(own.data, "project", "name") or ""))
    todo: list[tuple[str, tuple[str, ...]]] = [(code.where, ("project", "dependencies"))]
    for kind, parent in (("extras", _EXTRAS), ("groups", _GROUPS)):
        names = enumerate(getattr(table, kind))
        todo += [(document.where("project", kind, number), (*parent, normalise(extra))) for number, extra in names]
    for asked, keys in todo:  # which grows meanwhile
        for where, text in _entries(own, keys, asked):
            more: list[tuple[str, ...]] = []
            if isinstance(text, dict):
                more = [(*_GROUPS, normalise(str(text.get("include-group"))))]
            elif problem := requirement_problem(text):
                raise RecipeError(f"{where}: {problem} ([project] of {document.path})")
            elif normalise((parsed := Requirement(text)).name) == name:  # "pkg[a,b]" among its own extras
                more = [(*_EXTRAS, normalise(extra)) for extra in sorted(parsed.extras)]
            else:
                yield text
            todo += [(where, extra) for extra in more if all(extra != known for _, known in todo)]


def _entries(own: Document, keys: tuple[str, ...], asked: str) -> Iterator[tuple[str, Any]]:
    """Yield (position, entry) of the array at `keys`, or of the files that setuptools reads in its place.

    The last key is a normalised name. RecipeError names `asked`, the place of the reference, if the key is missing.
    """
    above, name = keys[:-1], keys[-1]
    known = {normalise(group): group for group in table_at(own.data, *above)}
    keys = (*above, known.get(name, name))
    entries, files = value_at(own.data, *keys), value_at(own.data, "tool", "setuptools", "dynamic", *keys[1:], "file")
    if entries is None:
        for file in files if isinstance(files, list) else [files] if isinstance(files, str) else ():
            try:
                lines = read_small(own.path.parent / str(file)).decode().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise RecipeError(f"{own.where('tool', 'setuptools', 'dynamic')}: {file}: {error}") from None
            texts = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
            yield from ((f"{own.path.parent / str(file)}:{number}", text) for number, text in texts if text)
        # Extras that a backend computes are compared with the lock when the wheel is built.
        computed = "project" not in own.data or "optional-dependencies" in str(value_at(own.data, "project", "dynamic"))
        if above == _GROUPS or (above == _EXTRAS and not computed):
            raise RecipeError(f"{asked}: {own.path} has no {'.'.join(keys)}{nearest(name, known.values())}")
        return
    for number, entry in enumerate(entries if isinstance(entries, list) else [None]):
        if not isinstance(entry, str) and not (isinstance(entry, dict) and above == _GROUPS):
            raise RecipeError(f"{own.where(*keys)}: expected an array of requirements")
        yield own.where(*keys, number), entry


def _matches(path: str, globs: Collection[str]) -> bool:
    """Return whether any glob matches `path` or a parent folder; a glob without a slash is compared with each name.

    `*` matches slashes, too.
    """
    names = path.split("/")
    around = ["/".join(names[:count]) for count in range(1, len(names) + 1)]
    return any(
        fnmatchcase(candidate, glob.strip("/"))
        for glob in globs
        for candidate in (around if "/" in glob.rstrip("/") else names)
    )
