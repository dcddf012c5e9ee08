"""Reader of environments in folders: venvs and conda environments."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.artifacts.conda_survey import is_conda
from envbuild.base.errors import BuildError, UsageError
from envbuild.contract.state import read_state
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, SYMLINK
from envbuild.inspect.facts import CONDA, IN_STATE, VENV, ArtifactReader, Description, Inventory, Item, Request
from envbuild.inspect.metadata import digested, interest, inventory

_CHUNK = 1 << 20
_KINDS = {
    stat.S_IFDIR: DIR,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFREG: FILE,
    stat.S_IFIFO: FIFO,
    stat.S_IFCHR: CHAR,
    stat.S_IFBLK: BLOCK,
}
# conda's own installation is an environment that contains its cache and the other environments.
_OTHERS = {CONDA: ("pkgs", "envs")}


def is_venv(folder: Path) -> bool:
    """Return whether `folder` holds a virtual environment (PEP 405)."""
    return not is_conda(folder) and any((folder / name).is_file() for name in ("pyvenv.cfg", "envbuild.json"))


def open_venv(request: Request) -> ArtifactReader:
    """Open `DIR`: a venv. Raises UsageError when there is none, BuildError when its state is damaged."""
    if not is_venv(Path(request.rest)):
        hint = "give a folder with pyvenv.cfg or envbuild.json in it; a conda environment is conda:DIR"
        raise _not_there(request, "a virtual environment", hint)
    return _opened(VENV, request)


def open_conda(request: Request) -> ArtifactReader:
    """Open `DIR`: a conda environment, made by envbuild, conda, mamba or any other tool.

    Raises UsageError when there is none, BuildError when its state is damaged.
    """
    if not is_conda(Path(request.rest)):
        raise _not_there(request, "a conda environment", "give a folder with conda-meta in it")
    return _opened(CONDA, request)


def _not_there(request: Request, what: str, hint: str) -> UsageError:
    folder = Path(request.rest)
    return UsageError(f"{folder} {f'is not {what}' if folder.exists() else 'does not exist'}", hint)


def _opened(kind: str, request: Request) -> ArtifactReader:
    folder = Path(request.rest)
    about = Description(kind, request.spelling, place=folder)
    state = read_state(folder)
    if state is not None:
        said = {name: getattr(state, name) for name in IN_STATE}
        about = replace(about, identity=state.digest, digest=state.digest, **said)
    elif kind == VENV:  # the version of Python in a conda environment comes from its packages (facts.completed)
        text = (folder / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^version(?:_info)?\s*=\s*((\d+(?:\.\d+)?)(?:\.\d+)*)", text, re.MULTILINE)
        if found:
            about = replace(about, python=found[2], python_version=found[1])
    return ArtifactReader(about, partial(_contents, folder, kind))


def _contents(folder: Path, kind: str, hashes: bool) -> Inventory:
    """Return the content of the folder, without compiled modules, which Python writes by itself.

    conda's own installation is read without the packages in its cache and without other environments.
    """
    notes: dict[str, Any] = {}
    try:
        walked = _walk(os.fspath(folder), "", _OTHERS.get(kind, ()))
        files = {path: _item(entry, path, notes, hashes) for entry, path in walked}
    except OSError as error:
        raise BuildError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    return inventory(files, notes, "", kind)


def _walk(folder: str, relative: str, without: Collection[str] = ()) -> Iterator[tuple[os.DirEntry[str], str]]:
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = f"{relative}/{entry.name}" if relative else entry.name
        if entry.name == "__pycache__" or entry.name in without:
            continue
        yield entry, path
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, path)


def _item(entry: os.DirEntry[str], path: str, notes: dict[str, Any], hashes: bool) -> Item:
    found = entry.stat(follow_symlinks=False)
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "socket")
    reader = interest(path) if kind == FILE else None
    digest, script = "", False
    if kind == FILE and (reader or hashes):
        with open(entry.path, "rb", buffering=0) as stream:
            digest, script, note = digested(iter(partial(stream.read, _CHUNK), b""), reader)
        if reader:
            notes[path] = note
    return Item(
        kind,
        stat.S_IMODE(found.st_mode),
        found.st_size if kind == FILE else 0,
        digest if hashes else "",
        os.readlink(entry.path) if kind == SYMLINK else "",
        found.st_uid,
        found.st_gid,
        hashes and script,
    )
