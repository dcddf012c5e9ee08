"""Search for recipes: in the project's `recipes` folder, the site's folders, the user's, and the shipped ones."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.base.errors import EnvbuildError, UsageError
from envbuild.base.files import project_folder, shipped
from envbuild.base.toml import nearest
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.targets import Target

FILE_NAME = "recipe.toml"
_DEFAULT = "pt_cpu"


@dataclass(frozen=True)
class ListedRecipe:
    """One recipe in a search folder; an invalid one has an `error` instead of `loaded`."""

    name: str
    path: Path
    loaded: LoadedRecipe | None
    error: EnvbuildError | None


def shipped_folder() -> Path:
    """Return the folder of the shipped recipes: inside an installed wheel, or at the top of a checkout."""
    return shipped("recipes")


def search_folders(site_folders: Sequence[Path] = ()) -> list[Path]:
    """Return the folders to search, in order of precedence; some may not exist."""
    paths: dict[Path, Path] = {}
    # At the top of a checkout, ./recipes is also the shipped folder.
    for folder in (project_folder() / "recipes", *site_folders, *_user_folders(), shipped_folder()):
        paths.setdefault(folder.absolute(), folder)
    return list(paths.values())


def _user_folders() -> list[Path]:
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # the XDG specification requires to ignore a relative path
        try:
            config = Path.home() / ".config"
        except RuntimeError:  # for example a container's user without a home
            return []
    return [config / "envbuild" / "recipes"]


def default_recipe() -> Path:
    """Return the recipe file of a command that names none: the project's only recipe, or pt_cpu without a project.

    Raises UsageError when the project has several.
    """
    folder = project_folder() / "recipes"
    own = recipe_files([folder])
    if not own or folder.resolve() == shipped_folder().resolve():
        return shipped_folder() / _DEFAULT / FILE_NAME
    if len(own) > 1:
        raise UsageError(f"name a recipe: {folder} has {len(own)}: {', '.join(own)}", "name one of them")
    return next(iter(own.values()))


def find_recipe(name_or_path: str, folders: Sequence[Path]) -> Path:
    """Return the recipe file that `name_or_path` refers to.

    A value with a path separator or the suffix .toml is the path of a recipe file or of its folder; any other
    value is a name to search for in `folders`. Raises UsageError when there is no such file.
    """
    if _is_path(name_or_path):
        path = Path(name_or_path)
        file = path if name_or_path.endswith(".toml") else path / FILE_NAME
        _check_readable(file)
        if not os.path.isfile(file):
            raise UsageError(f"there is no recipe file {file}")
        return file
    for folder in folders if name_or_path else ():
        file = folder / name_or_path / FILE_NAME
        if os.path.lexists(file.parent):  # an inaccessible search folder must not hide others
            _check_readable(file)
        if os.path.isfile(file):
            return file
    if name_or_path and os.path.isfile(name_or_path):
        source = shlex.quote(name_or_path)
        raise UsageError(
            f"{name_or_path} is a file, not the name or folder of a recipe",
            f"make a recipe from it: `envbuild init --from {source}`; `envbuild venv --from {source}` builds it, too",
        )
    raise UsageError(
        f"there is no recipe {name_or_path!r}{nearest(name_or_path, recipe_files(folders))}",
        hint="Searched: "
        + ", ".join(f"{folder}" if _may_enter(folder) else f"{folder} (permission denied)" for folder in folders),
    )


def check_own(loaded: LoadedRecipe) -> None:
    """Raise UsageError for a recipe that comes with envbuild, unless its checkout is the current project."""
    shipped, name = shipped_folder().resolve(), loaded.recipe.name
    project = project_folder() / "recipes"
    if shipped in loaded.path.resolve().parents and project.resolve() != shipped:
        raise UsageError(
            f"the recipe {name} is part of envbuild and cannot be edited",
            f"make a recipe from your files (envbuild init --from FILE), or copy this one: mkdir -p {project} && "
            f"cp -r {shlex.quote(str(loaded.folder))} {project}",
        )


def choose_target(loaded: LoadedRecipe, name: str | None, folders: Sequence[Path]) -> Target:
    """Return the target `name` of the recipe. Raises UsageError that lists recipes in `folders` with this target."""
    try:
        return loaded.target(name)[0]
    except UsageError as error:
        having = [
            recipe.name for recipe in list_recipes(folders) if recipe.loaded and name in recipe.loaded.recipe.targets
        ]
        if not having:
            raise
        raise UsageError(
            f"recipe {loaded.recipe.name!r} has no target {name!r}, only {', '.join(loaded.recipe.targets)}",
            f"{error.hint}; recipes with this target: {', '.join(having)}",
        ) from None


def command_word(recipe: LoadedRecipe) -> str:
    """Return the shell word for `recipe` in a command: its name if that finds this file, else its path."""
    name, path = recipe.recipe.name, recipe.path
    with contextlib.suppress(UsageError, OSError):
        if find_recipe(name, search_folders()).samefile(path):
            return name
    text = os.fspath(path if path.name != FILE_NAME else path.parent)
    return shlex.quote(text if _is_path(text) else f"./{text}")


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith(".toml") or text in (".", "..")


def list_recipes(folders: Sequence[Path]) -> list[ListedRecipe]:
    """Return every recipe in `folders`, sorted by name; the first folder wins if two have a recipe of the same name."""
    recipes = []
    for name, path in recipe_files(folders).items():
        try:
            recipes.append(ListedRecipe(name, path, load_recipe(path), None))
        except EnvbuildError as problem:
            recipes.append(ListedRecipe(name, path, None, problem))
    return recipes


def recipe_files(folders: Sequence[Path]) -> dict[str, Path]:
    """Return recipe name → file for `folders`, sorted; the first folder wins if two have a recipe of the same name."""
    names: dict[str, Path] = {}
    for folder in folders:
        try:
            entries = sorted(entry.name for entry in os.scandir(folder))
        except OSError:  # missing or not readable
            continue
        for name in entries:
            if os.path.isfile(folder / name / FILE_NAME):
                names.setdefault(name, folder / name / FILE_NAME)
    return dict(sorted(names.items()))


def _check_readable(file: Path) -> None:
    """Raise UsageError when the permissions of `file` or of one of its parent folders prevent reading it."""
    try:
        if stat.S_ISREG(file.stat().st_mode):
            file.open("rb").close()
    except PermissionError:
        closed = next((folder for folder in reversed(file.parents) if not _may_enter(folder)), file)
        raise UsageError(
            f"cannot read recipe file {file}: permission denied",
            f"ask the owner of {closed} for permission to {'read' if closed == file else 'enter'} it",
        ) from None
    except OSError:
        return  # the caller reports a missing file


def _may_enter(folder: Path) -> bool:
    return not os.path.lexists(folder) or os.access(folder, os.X_OK, effective_ids=True)
