"""Addition and removal of packages in a recipe: edits of its lists that preserve the rest of the file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from packaging.requirements import Requirement

from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.progress import log
from envbuild.base.text import normalise
from envbuild.base.toml import Document, Keys, closest, list_at, parse_toml
from envbuild.environment import Environment
from envbuild.imports.compose import built_for, differs, needs_index
from envbuild.imports.statement import project_of
from envbuild.imports.toml_edit import delete_value, rewrite, set_value
from envbuild.lock.lifecycle import keep_lock, resolve_again
from envbuild.locks import changed_locks
from envbuild.recipe import checks
from envbuild.recipe.checks import DIRECT
from envbuild.recipe.load import LoadedRecipe, decode_recipe
from envbuild.recipe.targets import Target, torch_index

# Files and folders as a shell has them, and versions as uv, npm and conda write them: NAME@VERSION, NAME=VERSION.
_PATH = re.compile(r"\.{0,2}/|.*\.(whl|zip|tar\.gz|txt|toml)$|\.$")
_OTHER = re.compile(r"([A-Za-z0-9][\w.-]*)@([\w.*+!-]+)|([A-Za-z0-9][\w.-]*(?:\[[^]]*\])?)=([^=].*)")


@dataclass(frozen=True, slots=True)
class PackageEdit:
    """Edit of a recipe's packages: its text `before` and `after`, and `changes` as (list, old text, new text)."""

    before: LoadedRecipe
    after: LoadedRecipe
    changes: tuple[tuple[str, str, str], ...]

    def lock(self, environment: Environment, *, write: bool = True) -> dict[str, list[str]]:
        """Resolve the locks again, then write recipe and locks; return lock path → changes.

        All locks are resolved before a file is written. Raises LockError, and UsageError if the recipe was edited
        meanwhile.
        """
        kinds = changed_locks(self.before, self.after)
        made = [
            (lock_kind, resolve_again(lock_kind, environment, upgrade=(), offline=False, log=log))
            for lock_kind in kinds
        ]
        if write:
            rewrite(self.before.path, self.before.document.text, self.after.document.text)
        return {str(keep_lock(kind, new, log, write=write)): list(new.changes) for kind, new in made}


@dataclass(slots=True)
class _Editor:
    """The text of a recipe while its lists are edited."""

    loaded: LoadedRecipe
    text: str
    changes: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def data(self) -> dict[str, Any]:
        return parse_toml(self.text)

    def entries(self, lists: Sequence[Keys], name: str) -> Iterator[tuple[Keys, int, str]]:
        """Yield the entries of `lists` for the package `name`, the last one of each list first."""
        for keys in lists:
            items = list(enumerate(list_at(self.data, *keys)))
            yield from ((keys, n, text) for n, text in reversed(items) if isinstance(text, str) and _name(text) == name)

    def put(self, keys: Keys, number: int | None, text: str) -> None:
        """Write `text` as entry `number` of the list at `keys`, None for a new one."""
        items = list_at(self.data, *keys)
        old = "" if number is None else str(items[number])
        if old == text:
            return
        self.changes.append((_dotted(keys), old, text))
        place = len(items) if number is None else number
        self.text = set_value(self.text, (*keys, place) if items else keys, text if items else [text])

    def drop(self, keys: Keys, entry: str | int, old: str) -> None:
        self.changes.append((_dotted(keys), old, ""))
        self.text = delete_value(self.text, (*keys, entry))

    def done(self) -> PackageEdit:
        path = self.loaded.path
        after = decode_recipe(Document(path, self.text, parse_toml(self.text)))
        return PackageEdit(self.loaded, after, tuple(self.changes))


def add_packages(loaded: LoadedRecipe, words: Sequence[str], *, target: str | None, conda: bool | None) -> PackageEdit:
    """Add the packages `words` to the recipe: requirements or, with `conda`, match specs.

    If `conda` is None, the recipe's environment decides. An existing entry of a package is replaced. `target` restricts
    the packages to one target. Raises UsageError, and RecipeError if the file cannot be edited.
    """
    conda = loaded.recipe.environment == "conda" if conda is None else conda
    texts = {word: _checked(word, conda=conda) for word in words}
    names = [_name(text) for text in texts.values()]
    if twice := next((name for name in names if names.count(name) > 1 and ";" not in "".join(words)), ""):
        raise UsageError(f"{twice} is given twice", "name each package once")
    editor = _Editor(loaded, loaded.document.text)
    lists = _lists(loaded, target, conda=conda)
    with _editing(loaded):
        for text in texts.values():
            _add(editor, text, lists, conda=conda)
        return editor.done()


def remove_packages(loaded: LoadedRecipe, words: Sequence[str], *, target: str | None) -> PackageEdit:
    """Remove the packages `words` from all lists of the recipe, or from those of `target`. Raises UsageError."""
    editor = _Editor(loaded, loaded.document.text)
    every = [*_lists(loaded, target, conda=False), *_lists(loaded, target, conda=True)]
    with _editing(loaded):
        for word in words:
            name = _bare(word)
            items = list(editor.entries(every, name))
            if not items:
                raise _not_there(loaded, editor.data, every, word, name)
            for keys, number, text in items:
                editor.drop(keys, number, text)
            if not any(editor.entries(_lists(loaded, None, conda=False), name)):
                _drop_settings(editor, name)
        return editor.done()


def _add(editor: _Editor, text: str, lists: Sequence[Keys], *, conda: bool) -> None:
    name = _name(text)
    holding = [keys for keys in lists if any(editor.entries([keys], name))]
    for keys in holding:
        _replace(editor, keys, text)
    if holding:
        return
    if conda or len(lists) == 1 or not differs(name, [text]):
        editor.put(lists[0], None, _for_list(text, lists[0], ""))
        return
    for keys in lists[1:]:  # torch: each target has its own build, from an index of its own
        target = Target.parse(str(keys[1]))
        indexes = list_at(editor.data, "targets", target.name, "indexes")
        editor.put(keys, None, _for_list(text, keys, ""))
        if needs_index(target, indexes):
            editor.put(("targets", target.name, "indexes"), None, torch_index(target.accelerator))


def _replace(editor: _Editor, keys: Keys, text: str) -> None:
    """Replace the entries of the package of `text` in the list at `keys` by `text`.

    If all existing entries have markers, the new one replaces only the entry with the same marker, or is added.
    """
    marker, there = _marker(text), list(editor.entries([keys], _name(text)))
    same = [entry for entry in there if _marker(entry[2]) == marker]
    if not same and marker and all(_marker(old) for _, _, old in there):
        editor.put(keys, None, _for_list(text, keys, there[0][2]))
        return
    _, number, old = (same or there)[-1]
    editor.put(keys, number, _for_list(text, keys, old))
    for _, other, gone in [] if same else there[:-1]:
        editor.drop(keys, other, gone)


def _marker(text: str) -> str:
    return re.sub(r"\s+", "", text.partition(";")[2]).replace("'", '"')


def _for_list(text: str, keys: Keys, old: str) -> str:
    """Return a requirement for the list at `keys`, with the local version of the list's target."""
    if keys[0] != "targets" or keys[-1] != "requirements" or DIRECT.match(text):
        return text
    return built_for(text, None, Target.parse(str(keys[1])), old)


def _lists(loaded: LoadedRecipe, target: str | None, *, conda: bool) -> list[Keys]:
    """Return the keys of the lists of packages, first for all targets, then per target; or only those of `target`."""
    own = "conda" if conda else "requirements"
    if target is not None:
        return [("targets", loaded.target(target)[0].name, own)]
    of_targets: list[Keys] = [("targets", name, own) for name in loaded.recipe.targets]
    if conda:
        return [("conda", "dependencies"), *of_targets]
    return [("conda", "requirements")] if loaded.recipe.environment == "conda" else [("requirements",), *of_targets]


def _checked(word: str, *, conda: bool) -> str:
    """Return a package as written in a recipe. Raises UsageError for text that is not a package."""
    if word.startswith("-"):
        raise UsageError(f"{word} is an option, not a package", "name packages, such as numpy or 'numpy>=2'")
    if _PATH.match(word) and not DIRECT.match(word):
        raise UsageError(
            f"{word} is a file or folder, not a package",
            "your own code belongs in [project] of the recipe; a wheel is NAME @ ./FILE; a requirements.txt is for "
            "`envbuild init --update --from FILE`",
        )
    if conda:
        if problem := checks.spec_problem(word):
            raise UsageError(f"{word}: {problem}", "write for example 'numpy 2.2.*'")
        return word
    if match := _OTHER.fullmatch(word):
        raise UsageError(f"{word} is not a requirement", f"write {'=='.join(filter(None, match.groups()))}")
    if problem := checks.requirement_problem(word):
        raise UsageError(f"{word}: {problem}" if word not in problem else problem, "write for example 'numpy>=2'")
    if DIRECT.match(word):
        return word
    requirement = Requirement(word)
    if normalise(requirement.name) == "python":
        raise UsageError("Python cannot be a requirement of a recipe", "edit `python` in the recipe")
    requirement.name = normalise(requirement.name)
    return str(requirement)


def _bare(word: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", word):
        match = re.match(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", word)
        raise UsageError(f"{word!r} is not the name of a package", f"write {match[0] if match else 'a name, as numpy'}")
    return normalise(word)


def _name(text: str) -> str:
    return project_of(text.strip())


def _not_there(
    loaded: LoadedRecipe, data: Mapping[str, Any], lists: Sequence[Keys], word: str, name: str
) -> UsageError:
    known = {_name(str(item)) for keys in lists for item in list_at(data, *keys)}
    if loaded.code is not None and any(_name(text) == name for text in loaded.recipe.requirements):
        return UsageError(f"{word} is required by [project] of {loaded.path}", "remove it in the project's own files")
    near = closest(name, known)
    hint = f"did you mean {near!r}? " if near else ""
    return UsageError(
        f"{loaded.path} does not require {word!r}", f"{hint}It requires: {', '.join(sorted(known)) or 'no package'}"
    )


def _drop_settings(editor: _Editor, name: str) -> None:
    """Remove the entries in [indexes] and [build] of a package that the recipe no longer requires."""
    for table in ("indexes", "build"):
        entries = editor.data.get(table, {})
        rows = list(enumerate(entries)) if isinstance(entries, list) else [(key, key) for key in entries]
        for entry, package in reversed(rows):
            if normalise(str(package)) == name:
                editor.drop((table,), entry, str(package))


@contextmanager
def _editing(loaded: LoadedRecipe) -> Iterator[None]:
    """Turn a ValueError of an edit into a RecipeError with a hint."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"{loaded.path} cannot be edited: {error}", "edit its lists by hand") from None


def _dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))
