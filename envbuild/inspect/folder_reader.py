"""Reader of environments in folders: venvs and conda environments."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.artifacts.conda_survey import is_conda
from envbuild.artifacts.state import read_state
from envbuild.errors import BuildError, UsageError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, SYMLINK
from envbuild.inspect.conda_meta import recorded_files, records
from envbuild.inspect.facts import CONDA, VENV, Description, Inventory, Item
from envbuild.inspect.metadata import interest, python_packages, settings_of, source_built, state_of

if TYPE_CHECKING:
    from envbuild.inspect.facts import Request

_CHUNK = 1 << 20
_KINDS = {stat.S_IFDIR: DIR, stat.S_IFLNK: SYMLINK, stat.S_IFREG: FILE, stat.S_IFIFO: FIFO,
          stat.S_IFCHR: CHAR, stat.S_IFBLK: BLOCK}  # fmt: skip
# conda's own installation is an environment that contains its cache and the other environments.
_OTHERS = {CONDA: ("pkgs", "envs")}


@dataclass(frozen=True, slots=True)
class OpenedFolder:
    """A venv or conda environment, made by envbuild or by any other tool; see `ArtifactReader`."""

    about: Description
    folder: Path

    def contents(self, *, hashes: bool) -> Inventory:
        """Return the content of the folder, without compiled modules, which Python writes by itself.

        conda's own installation is read without the packages in its cache and without other environments.
        """
        kind = self.about.kind
        files: dict[str, Item] = {}
        notes: dict[str, Any] = {}
        try:
            for entry, path in _walk(os.fspath(self.folder), "", _OTHERS.get(kind, ())):
                files[path] = _item(entry, path, notes, hashes)
        except OSError as error:
            raise BuildError(f"{error.filename or self.folder}: cannot be read: {error.strerror}") from error
        return Inventory(
            files,
            python_packages(files, notes),
            prefix="",
            config=settings_of(str(notes.get("pyvenv.cfg", ""))),
            state=state_of(str(notes.get("envbuild.json", ""))),
            environment=kind,
            conda=records(notes),
            recorded=recorded_files(notes),
            built=source_built(notes),
        )


def is_venv(folder: Path) -> bool:
    """Return whether `folder` holds a virtual environment (PEP 405)."""
    if is_conda(folder):
        return False
    return (folder / "pyvenv.cfg").is_file() or (folder / "envbuild.json").is_file()


def open_venv(request: Request) -> OpenedFolder:
    """Open `DIR`: a venv. Raises UsageError when there is none, BuildError when its state is damaged."""
    folder = Path(request.rest)
    if not is_venv(folder):
        hint = "give a folder with pyvenv.cfg or envbuild.json in it; a conda environment is conda:DIR"
        raise _not_there(folder, "a virtual environment", hint)
    return _opened(VENV, folder, request.spelling)


def open_conda(request: Request) -> OpenedFolder:
    """Open `DIR`: a conda environment, made by envbuild, conda, mamba or any other tool.

    Raises UsageError when there is none, BuildError when its state is damaged.
    """
    folder = Path(request.rest)
    if not is_conda(folder):
        raise _not_there(folder, "a conda environment", "give a folder with conda-meta in it")
    return _opened(CONDA, folder, request.spelling)


def _not_there(folder: Path, what: str, hint: str) -> UsageError:
    return UsageError(f"{folder} {f'is not {what}' if folder.exists() else 'does not exist'}", hint)


def _opened(kind: str, folder: Path, spelling: str) -> OpenedFolder:
    state = read_state(folder)
    if state is None:
        # Python's version in a conda environment comes from its packages (facts.completed).
        version = _version(folder) if kind == VENV else ""
        python = ".".join(version.split(".")[:2])
        return OpenedFolder(Description(kind, spelling, place=folder, python=python, python_version=version), folder)
    about = Description(
        kind=kind,
        spelling=spelling,
        identity=state.digest,
        digest=state.digest,
        place=folder,
        recipe=state.recipe,
        recipe_digest=state.recipe_digest,
        lock_digest=state.lock_digest,
        plan_digest=state.plan_digest,
        target=state.target,
        python=state.python,
        python_version=state.python_version,
        interpreter=state.interpreter,
        envbuild=state.envbuild,
    )
    return OpenedFolder(about, folder)


def _version(folder: Path) -> str:
    text = (folder / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^version(?:_info)?\s*=\s*(\d+(?:\.\d+)*)", text, re.MULTILINE)
    return found[1] if found else ""


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
    size, target, digest, head = 0, "", "", b""
    if kind == SYMLINK:
        target = os.readlink(entry.path)
    elif kind == FILE:
        size = found.st_size
        reader = interest(path)
        if reader is not None:
            data = Path(entry.path).read_bytes()
            notes[path] = reader(data)
        if hashes:
            digest, head = _read(entry.path)
    mode = stat.S_IMODE(found.st_mode)
    return Item(
        kind, mode, size, digest, target, found.st_uid, found.st_gid, script=head == b"#!"
    )  # fmt: skip


def _read(path: str) -> tuple[str, bytes]:
    digest, head = hashlib.sha256(), b""
    with open(path, "rb", buffering=0) as stream:
        while data := stream.read(_CHUNK):
            digest.update(data)
            head = head or data[:2]
    return digest.hexdigest(), head
