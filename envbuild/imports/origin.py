"""Imported recipes: written from a project's files, and updated when the files have changed.

`imported.toml` beside the recipe records the sources and the recipe generated from them. The next import is a
three-way merge: the recorded recipe, a recipe generated from the current sources, and the recipe with the user's edits.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envbuild.base import atomic
from envbuild.base.errors import EnvbuildError, RecipeError, UsageError
from envbuild.base.files import project_folder
from envbuild.base.progress import log
from envbuild.base.toml import Document, Keys, list_at, parse_toml, read, table_at, table_text, value_at
from envbuild.environment import Environment
from envbuild.imports import read_source
from envbuild.imports.compose import compose
from envbuild.imports.statement import Draft, Statement, project_of, pythons, recipe_name
from envbuild.imports.toml_edit import delete_value, rewrite, set_value
from envbuild.interpreter import HostPython
from envbuild.lock.offers import Offers, allowed_releases, reachable
from envbuild.pythons import choose_python
from envbuild.recipe.checks import applicable
from envbuild.recipe.find import FILE_NAME, command_word
from envbuild.recipe.load import LoadedRecipe, decode_recipe, load_recipe

# Arrays whose entries are packages.
_PACKAGES = ("requirements", "constraints", "dependencies", "conda")
# Keys of every recipe that say nothing of the sources.
_OWN = (("name",), ("description",))
# A place of a value: the keys, and for an entry of an array, which one: a package with its marker, or its text.
Place = tuple[Keys, str]


def merge(text: str, base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Merge the changes from `base` to `new` into the recipe `text`; return it, and a line for each conflict.

    Raises ValueError for a layout that cannot be edited.
    """
    mine, old, now = _flat(parse_toml(text)), _flat(base), _flat(new)
    conflicts, kept = [], set[Keys]()
    changed = [place for place in {**now, **old} if old.get(place) != now.get(place) and place[0] not in _OWN]
    gone = {place for place in changed if place not in now and mine.get(place) == old.get(place)}
    for place in changed:
        before, after, here = old.get(place), now.get(place), mine.get(place)
        if here == after or place[0][:2] in kept:
            continue
        if here != before:
            conflicts.append(_conflict(place, before, after, here))
        elif before is None and (other := _elsewhere(place, mine, gone)):
            conflicts.append(f"{_name(place)}: the sources have {after!r} now; the recipe keeps {other}")
        elif after is None and (own := _own_edits(place, mine, old)):
            conflicts.append(f"{_name(place)}: the sources have it no more; the recipe keeps it, with {own}")
            kept.add(place[0])
        else:
            text = _applied(text, place, before, after)
    return text, conflicts


def _flat(data: Mapping[str, Any], above: Keys = ()) -> dict[Place, Any]:
    """Return place → value for all values of a recipe, and an empty value for each target."""
    values: dict[Place, Any] = {}
    for key, value in data.items():
        keys = (*above, key)
        if isinstance(value, Mapping):
            if above == ("targets",):
                values[keys, ""] = {}
            values |= _flat(value, keys)
        elif isinstance(value, list):
            for item in value:
                values.setdefault((keys, _identity(keys, str(item))), item)
        else:
            values[keys, ""] = value
    return values


def _identity(keys: Keys, entry: str) -> str:
    if keys[-1] not in _PACKAGES:
        return entry
    name, _, marker = entry.partition(";")
    return project_of(name.strip()) + (f" ; {marker.strip()}" if marker else "")


def _elsewhere(place: Place, mine: Mapping[Place, Any], gone: set[Place]) -> str:
    """Return entry and list in which the recipe already requires the package of `place`; "" if there is none."""
    keys, entry = place
    if keys[-1] != "requirements" or keys[0] == "conda":
        return ""
    lists = [place for place in mine if place[0][-1] == "requirements" and place[0][0] != "conda" and place not in gone]
    # The same package may be in two targets, and not in one and for all.
    same = [
        place for place in lists if place[1] == entry and place[0] != keys and (len(place[0]) == 1 or len(keys) == 1)
    ]
    return f"{mine[same[0]]!r} in {'.'.join(map(str, same[0][0]))}" if same else ""


def _own_edits(place: Place, mine: Mapping[Place, Any], old: Mapping[Place, Any]) -> str:
    """Return the user's edits in a target, for a message: `KEY = VALUE, …`; "" if `place` is none."""
    keys, _ = place
    if len(keys) != 2 or keys[0] != "targets":
        return ""
    inside = [place for place in {**mine, **old} if place[0][:2] == keys and mine.get(place) != old.get(place)]
    return ", ".join(f"{_name(place)} = {mine.get(place)!r}" for place in inside)


def _applied(text: str, place: Place, before: Any, after: Any) -> str:
    """Return `text` with the value `before` at `place` replaced by `after`, or removed if `after` is None."""
    keys, entry = place
    known = value_at(parse_toml(text), *keys)
    if not entry:
        if after is not None:
            return set_value(text, keys, after)
        return text if known is None else _without(text, keys)
    if after is None:
        return delete_value(text, (*keys, known.index(before))) if isinstance(known, list) and before in known else text
    if not isinstance(known, list):
        return set_value(text, keys, [after])
    return set_value(text, (*keys, known.index(before) if before in known else len(known)), after)


def _without(text: str, keys: Keys) -> str:
    """Return `text` without the key, and without tables that become empty."""
    text, table = delete_value(text, keys), keys[:-1]
    is_left = table and table[0] != "targets" and value_at(parse_toml(text), *table) == {}
    return _without(text, table) if is_left else text


def _conflict(place: Place, before: Any, after: Any, here: Any) -> str:
    now = f"have {after!r} now" if after is not None else "have it no more"
    was = f" (before: {before!r})" if before is not None else ""
    kept = f"keeps {here!r}" if here is not None else "stays without it"
    return f"{_name(place)}: the sources {now}{was}; the recipe {kept}"


def _name(place: Place) -> str:
    keys, entry = place
    return ".".join(map(str, keys)) + (f": {entry}" if entry else "")


def compose_here(
    name: str, statements: Sequence[Statement], groups: Collection[str], target: str | None, environment: Environment
) -> Draft:
    """Return the draft of `compose`, if possible for a Python that this host has.

    The default Python is preferred. If this host lacks it and has another Python that the sources accept, envbuild
    looks for wheels on the indexes; it ignores indexes that do not answer.
    """
    usual = compose(name, statements, groups, target)
    if usual.data.get("environment") == "conda" or _is_here(str(usual.data["python"]), environment):
        return usual  # conda brings its Python
    for python in pythons():
        draft = compose(name, statements, groups, target, python)
        other = draft.data["python"] == python != usual.data["python"]
        if other and _is_here(python, environment) and _has_wheels(draft.loaded(Path(name)), environment):
            return draft
    return usual


def _is_here(python: str, environment: Environment) -> bool:
    try:
        return isinstance(choose_python(python, environment, offline=True), HostPython)
    except EnvbuildError:
        return False


def _has_wheels(loaded: LoadedRecipe, environment: Environment) -> bool:
    """Return whether each requirement on the indexes has an allowed release with a wheel for each target."""
    recipe = loaded.recipe
    for name, table in recipe.targets.items():
        target, _ = loaded.target(name)
        platform = target.platform(table.glibc)
        lines_of = applicable((*recipe.requirements, *table.requirements), recipe.python, platform)
        lines_of = {name: lines for name, lines in lines_of.items() if not any(line.url for line in lines)}
        limits = applicable(recipe.constraints, recipe.python, platform)
        indexes, unreached = reachable(table.indexes, environment, False)
        releases = Offers(environment, indexes, False).releases(lines_of)
        for project, lines in lines_of.items():
            project_releases = allowed_releases(releases[project], [*lines, *limits.get(project, ())], recipe.python)
            unknown = not project_releases and (unreached or not releases[project])
            if not unknown and not any(release.fits(recipe.python, platform) for release in project_releases):
                return False
    return True


ORIGIN = "imported.toml"
_HEAD = """\
# Written by `envbuild init`: the sources of this recipe, and the recipe that they gave. Keep it with the recipe:
# `envbuild init --update` tells by it what changed in the sources, and what you changed.
"""


@dataclass(frozen=True, slots=True)
class Origin:
    """Sources of an imported recipe, with the chosen extras and target, and the `recipe` generated from them."""

    sources: tuple[Path, ...]
    groups: tuple[str, ...] = ()
    target: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Origin | None:
        """Return the origin of the recipe in `folder`, None without a file. Raises RecipeError for a damaged file."""
        if not os.path.lexists(folder / ORIGIN):
            return None
        data = read(folder / ORIGIN).data
        sources, groups, target = list_at(data, "from"), list_at(data, "extras"), data.get("target")
        if not sources or not all(isinstance(source, str) for source in (*sources, *groups, target or "")):
            raise RecipeError(
                f"{folder / ORIGIN}: `from` names no sources",
                "restore it from version control, or name the sources: envbuild init NAME --update --from FILE",
            )
        places = tuple(Path(os.path.relpath(folder / source)) for source in sources)
        return cls(places, tuple(groups), target, table_at(data, "recipe"))

    def text(self, folder: Path) -> str:
        """Return the text of imported.toml; paths in the project are relative to the recipe's `folder`."""
        project = folder.absolute().parent.parent
        names = [
            os.path.relpath(path, folder) if path.absolute().is_relative_to(project) else str(path.absolute())
            for path in self.sources
        ]
        data: dict[str, Any] = {"from": names} | ({"extras": list(self.groups)} if self.groups else {})
        data |= {"target": self.target} if self.target else {}
        return _HEAD + table_text({**data, "recipe": self.recipe})


@dataclass(frozen=True, slots=True)
class ImportedRecipe:
    """Recipe at `path` that was generated from sources: its `draft`, and the recipe as loaded.

    `before` is the replaced text, None for a new recipe. `conflicts` are changes of the sources that are not applied
    because the user has edited the same values.
    """

    path: Path
    draft: Draft
    loaded: LoadedRecipe
    origin: Origin
    before: str | None = None
    conflicts: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.loaded.document.text

    @property
    def changed(self) -> bool:
        return self.text != self.before

    @property
    def diff(self) -> list[str]:
        """Lines of a diff between the old and the new recipe; empty for a new recipe."""
        if self.before is None:
            return []
        old, new = self.before.splitlines(), self.text.splitlines()
        return list(difflib.unified_diff(old, new, str(self.path), str(self.path), n=1, lineterm=""))

    def write(self) -> None:
        """Write the recipe and its origin atomically, unless both are unchanged. Raises UsageError, BuildError."""
        folder = self.path.parent
        text = self.origin.text(folder)
        with atomic.exclusive(folder, log):
            if self.before is None:
                _refuse_existing(folder)
                with atomic.staged(folder) as staged:
                    (staged / FILE_NAME).write_text(self.text, encoding="utf-8")
                    if self.origin.sources:
                        (staged / ORIGIN).write_text(text, encoding="utf-8")
                    atomic.replace(staged, folder)
                return
            with atomic.writing(folder):
                if self.changed:
                    rewrite(self.path, self.before, self.text)
                place = folder / ORIGIN
                if not place.is_file() or place.read_text(encoding="utf-8") != text:
                    atomic.write_beside(place, text)


def new_recipe(
    name: str | None, statements: Sequence[Statement], origin: Origin, environment: Environment
) -> ImportedRecipe:
    """Return the recipe composed from the `statements` of `origin`; `name` None: named as the project or its folder."""
    name = checked_name(name, statements, origin.sources)
    path = project_folder() / "recipes" / name / FILE_NAME
    draft = compose_here(name, statements, origin.groups, origin.target, environment)
    loaded = draft.loaded(path)
    _refuse_existing(path.parent)
    return ImportedRecipe(path, draft, loaded, replace(origin, recipe=dict(draft.data)))


def updated_recipe(
    loaded: LoadedRecipe, sources: Sequence[Path] = (), groups: Collection[str] = (), target: str | None = None
) -> ImportedRecipe:
    """Return the recipe with the changes of its sources; given sources, extras and target replace those of its origin.

    Raises UsageError for a recipe without an origin, unless there are `sources`.
    """
    known = Origin.read(loaded.folder) if not sources or (loaded.folder / ORIGIN).exists() else None
    if known is None and not sources:
        raise UsageError(
            f"{loaded.path} has no record of its sources: {ORIGIN} is missing beside it",
            f"name them once: envbuild init {command_word(loaded)} --update --from requirements.txt",
        )
    origin = known or Origin(tuple(sources))
    origin = replace(
        origin,
        sources=tuple(sources) or origin.sources,
        groups=tuple(groups) or origin.groups,
        target=target or origin.target,
    )
    statements = read_sources(origin, loaded.folder)
    # Another host may prefer another Python.
    draft = compose(loaded.recipe.name, statements, origin.groups, origin.target, loaded.recipe.python)
    before = loaded.document.text
    try:
        text, conflicts = merge(before, known.recipe if known else {}, dict(draft.data))
        after = decode_recipe(Document(loaded.path, text, parse_toml(text)))
    except ValueError as error:
        raise RecipeError(
            f"{loaded.path}: the changes of its sources cannot be written: {error}",
            "edit it by hand; `envbuild init NAME --from … --dry-run` prints the recipe that the sources give now",
        ) from None
    origin = replace(origin, recipe=dict(draft.data))
    return ImportedRecipe(loaded.path, draft, after, origin, before, tuple(conflicts))


def imported_recipe(
    name: str | None, sources: Sequence[Path], target: str | None, environment: Environment
) -> ImportedRecipe:
    """Return a new recipe from `sources`, or the existing recipe updated with their changes.

    Raises UsageError for an existing recipe from other sources.
    """
    origin = Origin(tuple(sources), target=target)
    statements = read_sources(origin)
    name = checked_name(name, statements, sources)
    path = project_folder() / "recipes" / name / FILE_NAME
    if not path.is_file():
        return new_recipe(name, statements, origin, environment)
    loaded = load_recipe(path)
    known = Origin.read(path.parent)
    if known is None or _resolved(known.sources) != _resolved(sources):
        given = ", ".join(map(str, sources))
        made = f"from {', '.join(map(str, known.sources))}" if known else "by hand"
        words = " ".join(f"--from {path}" for path in sources)
        raise UsageError(
            f"the recipe {path} was written {made}, not from {given}",
            f"choose another name for the new recipe: envbuild venv NAME {words}; or build this one, without --from; "
            f"or switch it to these files: envbuild init {name} --update {words}",
        )
    return updated_recipe(loaded)


def read_sources(origin: Origin, folder: Path | None = None) -> list[Statement]:
    """Return the statements of all sources, for a recipe in `folder` (None: a new recipe). Raises UsageError."""
    folder = folder or project_folder() / "recipes" / "NAME"
    statements = []
    for path in origin.sources:
        limits = len(origin.sources) > 1 and re.fullmatch(r"constraints?(?:[._-].*)?\.txt", path.name)
        for statement in read_source(path, origin.groups, folder):
            is_limit = limits and statement.kind == "requirement"  # as with `pip install -c`
            statements.append(replace(statement, kind="constraint") if is_limit else statement)
    return statements


def checked_name(name: str | None, statements: Sequence[Statement], sources: Sequence[Path]) -> str:
    """Return the name of the recipe: `name`, else the project's name, else its folder's. Raises UsageError."""
    if name is None:
        named = next((statement.text for statement in statements if statement.kind == "name"), "")
        return recipe_name(named or _folder(sources[0]).name)
    if recipe_name(name) != name:
        raise UsageError(f"{name!r} is not the name of a recipe", f"choose for example {recipe_name(name)!r}")
    return name


def _folder(source: Path) -> Path:
    """Return the project's folder: the current folder if it contains the source, else the source's folder."""
    path, here = source.absolute(), Path.cwd()
    if path.is_relative_to(here):
        return here
    return path if path.is_dir() else path.parent


def _resolved(sources: Sequence[Path]) -> set[str]:
    return {os.path.realpath(path) for path in sources}


def _refuse_existing(folder: Path) -> None:
    if os.path.lexists(folder):
        raise UsageError(
            f"{folder} exists already",
            f"to update it from its sources: envbuild init {folder.name} --update; else choose another name: "
            "envbuild init NAME --from …",
        )
