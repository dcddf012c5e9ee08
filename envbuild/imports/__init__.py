"""Import of dependency files and environments that other tools wrote: FORMATS has one row for each format.

A reader yields a Statement for each line of its source that says something; `compose` puts it into a recipe, or into
the list of those that were not carried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from envbuild.errors import UsageError
from envbuild.imports.conda_files import (
    is_conda_list,
    read_conda_list,
    read_conda_lock,
    read_environment,
    read_pixi,
    read_pixi_lock,
)
from envbuild.imports.dockerfile import read_dockerfile
from envbuild.imports.installed import is_environment, read_installed
from envbuild.imports.lock_files import read_pipfile_lock, read_toml_lock
from envbuild.imports.pip_files import read_requirements
from envbuild.imports.pyproject import read_pyproject
from envbuild.imports.statement import Statement, text_of


def _read_text(path: Path) -> Iterator[Statement]:
    yield from (read_conda_list if is_conda_list(text_of(path)) else read_requirements)(path)


# Format → the pattern of its file names, and its reader. The first pattern that matches counts.
FORMATS: dict[str, tuple[str, Callable[[Path], Iterator[Statement]]]] = {
    "pyproject.toml": (r"pyproject\.toml", read_pyproject),
    "uv.lock": (r"uv\.lock", read_toml_lock),
    "pylock.toml": (r"pylock(\.[^.]+)?\.toml", read_toml_lock),
    "poetry.lock": (r"poetry\.lock", read_toml_lock),
    "Pipfile.lock": (r"Pipfile\.lock", read_pipfile_lock),
    "conda-lock.yml": (r".*conda-lock\.ya?ml", read_conda_lock),
    "pixi.lock": (r"pixi\.lock", read_pixi_lock),
    "pixi.toml": (r"pixi\.toml", read_pixi),
    "environment.yml": (r".*\.ya?ml", read_environment),
    "Dockerfile": (r"(.*[.-])?([Dd]ocker|[Cc]ontainer)file([.-].*)?", read_dockerfile),
    "requirements.txt": (r".*\.(txt|in)", _read_text),
}
# Of the many YAML and text files of a project's folder, those with the usual names.
_IN_FOLDER = re.compile(r"(?!.*\.ya?ml|.*\.(txt|in)).*|environment\.ya?ml|(.*\.)?conda-lock\.ya?ml|requirements\.txt")


def read_source(path: Path) -> Iterator[Statement]:
    """Yield the statements of a file, an environment, or the files of a project's folder. Raises UsageError."""
    if is_environment(path):
        yield from read_installed(path)
    elif path.is_dir():
        names = sorted(one.name for one in path.iterdir() if _format(one.name) and _IN_FOLDER.fullmatch(one.name))
        if not names:
            raise UsageError(f"{path}: no file of a known format", f"known: {', '.join(FORMATS)}; name the file")
        for name in names:
            yield from FORMATS[_format(name)][1](path / name)
    elif not _format(path.name):
        raise UsageError(f"{path}: not a file of a known format", f"known: {', '.join(FORMATS)}")
    else:
        yield from FORMATS[_format(path.name)][1](path)


def _format(name: str) -> str:
    return next((one for one, (pattern, _) in FORMATS.items() if re.fullmatch(pattern, name)), "")
