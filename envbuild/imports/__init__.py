"""Import of dependency files and environments that other tools wrote: FORMATS has one row for each format.

A reader yields one Statement for each requirement, index or setting of its source; `compose` puts it into a recipe or
into the list of statements that were not carried.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.toml import Document
from envbuild.imports.conda_files import (
    is_conda_list,
    read_conda_list,
    read_conda_lock,
    read_environment,
    read_pixi,
    read_pixi_lock,
)
from envbuild.imports.dockerfile import read_dockerfile
from envbuild.imports.lock_files import is_environment, read_installed, read_pipfile, read_pipfile_lock, read_toml_lock
from envbuild.imports.pip_files import read_requirements, read_setup, read_setup_cfg
from envbuild.imports.pyproject import builds_package, read_pyproject
from envbuild.imports.signs import comments_with_signs, gpu_signs
from envbuild.imports.statement import UNREAD_LINE, UNUSUAL_FILE, Statement, lost, text_of
from envbuild.recipe.project import ProjectTable, declared_code, declared_requirements


def _read_text(path: Path) -> Iterator[Statement]:
    yield from (read_conda_list if is_conda_list(text_of(path)) else read_requirements)(path)


# Format → the pattern of its file names, its reader, and whether people write such files: then comments may name GPUs.
# The first pattern that matches counts.
FORMATS: dict[str, tuple[str, Callable[..., Iterator[Statement]], bool]] = {
    "pyproject.toml": (r"pyproject([.-][\w.-]+)?\.toml", read_pyproject, True),
    "uv.lock": (r"uv\.lock", read_toml_lock, False),
    "pylock.toml": (r"pylock(\.[^.]+)?\.toml", read_toml_lock, False),
    "poetry.lock": (r"poetry\.lock", read_toml_lock, False),
    "Pipfile.lock": (r"Pipfile\.lock", read_pipfile_lock, False),
    "conda-lock.yml": (r".*conda-lock\.ya?ml", read_conda_lock, False),
    "Pipfile": (r"Pipfile(?:\.(?!lock)[\w-]+)?", read_pipfile, True),
    "setup.py": (r"setup\.py", read_setup, True),
    "setup.cfg": (r"setup\.cfg", read_setup_cfg, True),
    "pixi.lock": (r"pixi\.lock", read_pixi_lock, False),
    "pixi.toml": (r"pixi\.toml", read_pixi, True),
    "environment.yml": (r".*\.ya?ml", read_environment, True),
    "Dockerfile": (r"(.*[._-])?([Dd]ocker|[Cc]ontainer)file([._-].*)?", read_dockerfile, True),
    "requirements.txt": (r".*\.(txt|in)", _read_text, True),
}
# Files that envbuild does not read → what converts them, a pattern of their dependencies, the file that has them too.
_CONVERTED = {
    "pdm.lock": ("`pdm export --format pylock --output pylock.toml` converts it", r"^\[\[package\]\]", "pylock.toml"),
}
# Of the many YAML and text files of a project's folder, those with the usual names.
_IN_FOLDER = re.compile(
    r"(?!.*\.ya?ml|.*\.(txt|in)|pyproject[.-].+\.toml).*"
    r"|environment\.ya?ml|(.*\.)?conda-lock\.ya?ml|requirements\.txt"
)
# Files without which the import of a folder makes no sense.
_OWN_FILES = ("pyproject.toml", "requirements.txt", "environment.yml", "pixi.toml")
_LOCKS = ("uv.lock", "poetry.lock", "pixi.lock", "Pipfile.lock", "pylock.toml")
# Files beside those that are often the ones for GPUs: requirements-gpu.txt, environment_cuda.yml.
_NAMED_ONLY = re.compile(
    r"pyproject[.-].{1,255}\.toml$|requirements?(?![A-Za-z]).{,255}\.(?:txt|in)$"
    r"|(?<![a-z])environment(?![A-Za-z]).{,255}\.ya?ml$"
)
# Folders of a project that have files for its images and environments.
_FOLDERS = re.compile(
    r"\.?(?:docker(?:files?)?|containers?|devcontainer|envs?|environments?|requirements|reqs|conda|install|deploy)"
)
# Folders whose files are for GPUs: gpu/Pipfile, docker/cuda-12.1/Dockerfile.
_GPU_FOLDER = re.compile(r"(?:gpu|cuda|rocm)[\d._-]*")
# The folder of a new recipe.
_RECIPE = Path("recipes", "NAME")


def read_source(path: Path, groups: Collection[str] = (), recipe: Path = _RECIPE) -> Iterator[Statement]:
    """Yield the statements of a file, an environment or a project's folder; `recipe` is the folder of the new recipe.

    `groups` are the extras and groups that will be carried. A lock needs them, because its pins depend on them; other
    readers yield the statements of all groups. Raises UsageError.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder", "name an existing one with --from")
    if is_environment(path):
        yield from read_installed(path)
    elif path.is_dir():
        yield from _read_folder(path, groups, recipe)
    elif not _format(path.name):
        known = f"known: {', '.join(FORMATS)}"
        raise UsageError(f"{path}: not a file of a known format", _hint(path.name) or known)
    else:
        yield from _read_file(path, groups)


def _read_file(path: Path, groups: Collection[str]) -> Iterator[Statement]:
    _, reader, is_written = FORMATS[_format(path.name)]
    statements = reader(path, groups) if reader is read_toml_lock else reader(path)
    if reader is read_setup:  # its other lines may name GPUs, too: CUDAExtension
        read = list(statements)
        known = {statement.place for statement in read}
        others = (sign for sign in _signs_in(path, text_of(path), UNREAD_LINE) if sign.place not in known)
        statements = iter((*read, *others))
    yield from statements
    if is_written:
        yield from comments_with_signs(path)
    folder = path.absolute().parent.name
    shown = f"{folder}/{path.name}" if _GPU_FOLDER.fullmatch(folder.lower()) else path.name
    named = lost(f"file name: {shown}", str(path), "a name of files for GPUs")
    yield from [named] if gpu_signs([named]) else []


def _read_folder(path: Path, groups: Collection[str], recipe: Path) -> Iterator[Statement]:
    """Yield the statements of the files with usual names, and name the files that another tool has to convert."""
    present = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    names = [name for name in present if _format(name) and _IN_FOLDER.fullmatch(name)]
    if not names:
        hints = [f"{name}: {_hint(name)}" for name in present if _hint(name)]
        known = f"known: {', '.join(FORMATS)}; name the file"
        raise UsageError(f"{path}: contains no file of a known format", "; ".join(hints) or known)
    read: set[str] = set()
    for name in names:
        try:
            statements = list(_read_file(path / name, groups))
            read |= {os.path.abspath(statement.place.partition(":")[0]) for statement in statements}
            yield from statements
        except UsageError as error:  # an old lock beside the project's own file, or a file that is no text
            if len(names) == 1 or name in _OWN_FILES or (name in _LOCKS and "pyproject.toml" not in names):
                raise
            yield lost(name, str(path / name), error.message)
    if (path / ".python-version").is_file():
        yield from _python_version(path / ".python-version")
    for name, (_, holds, replaces) in _CONVERTED.items():
        text = text_of(path / name) if name in present and replaces not in present else ""
        if re.search(holds, text, re.MULTILINE):
            yield lost(name, str(path / name), _hint(name))
            yield from _signs_in(path / name, text, UNREAD_LINE)
    unusual = [path / name for name in present if _NAMED_ONLY.search(name) and name not in names]
    for file in (*unusual, *_below(path)):
        if os.path.abspath(file) not in read:  # a Dockerfile may have copied it
            yield lost(os.path.relpath(file, path), str(file), UNUSUAL_FILE)
            yield from _signs_in(file, text_of(file), UNUSUAL_FILE)
    if "pyproject.toml" in names and builds_package(path / "pyproject.toml"):
        problem = _project_problem(path)
        own = Statement("project", os.path.relpath(path, recipe), str(path / "pyproject.toml"), reason=problem)
        yield own if not problem else replace(own, kind="lost")


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files of known formats in the folders below `folder` where projects have those for images and hosts."""
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if depth == 1 or (depth == 0 and _FOLDERS.fullmatch(name)))
        for name in sorted(names) if depth else ():
            if _format(name) and (_NAMED_ONLY.search(name) or not name.endswith((".txt", ".in", ".yml", ".yaml"))):
                yield Path(place, name)


def _project_problem(folder: Path) -> str:
    """Return why the project in `folder` cannot be [project] of a recipe, or ""."""
    document, table = Document(folder / "recipe.toml", "", {}), ProjectTable(path=".")
    try:
        for _ in declared_requirements(declared_code(document, table), table, document):
            pass
    except RecipeError as error:
        return f"[project] cannot have it: {error.message.partition(' ([project]')[0]}"
    return ""


def _python_version(path: Path) -> Iterator[Statement]:
    """Yield the Python that a .python-version of pyenv or uv names: the first one."""
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if match := re.fullmatch(r"(?:cpython-|python)?(3(?:\.\d+){1,2})(?:[-+]\S*)?", line.strip()):
            yield Statement("python", f"=={match[1]}.*", f"{path}:{number}")
            return


def _signs_in(path: Path, text: str, reason: str) -> Iterator[Statement]:
    """Yield the lines of a file that init does not read and that have a sign of GPUs; comments have none."""
    for number, line in enumerate(text.split("\n"), 1):
        statement = lost(re.sub(r"(^|\s)#.*", "", line), f"{path}:{number}", reason)
        yield from [statement] if gpu_signs([statement]) else []


def _hint(name: str) -> str:
    """Return the hint for converting a file of an unsupported format, or ""."""
    if name.endswith((".sqsh", ".sif", ".tar")):
        return "an image: `envbuild inspect` lists its packages; init reads the folders of environments"
    return _CONVERTED[name][0] if name in _CONVERTED else ""


def _format(name: str) -> str:
    return next((format_name for format_name, row in FORMATS.items() if re.fullmatch(row[0], name)), "")
