"""Virtual environments opened for looking into them."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.artifacts.facts import VENV, About, Contents, Item
from envbuild.artifacts.metadata import interest, python_packages, settings_of, state_of
from envbuild.artifacts.state import read_state
from envbuild.errors import BuildError, UsageError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, SYMLINK

if TYPE_CHECKING:
    from envbuild.artifacts.opened import Request

_CHUNK = 1 << 20
_KINDS = {stat.S_IFDIR: DIR, stat.S_IFLNK: SYMLINK, stat.S_IFREG: FILE, stat.S_IFIFO: FIFO,
          stat.S_IFCHR: CHAR, stat.S_IFBLK: BLOCK}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpenedVenv:
    """A venv, made by envbuild or by any other tool; see `Opened`."""

    about: About
    folder: Path

    def contents(self, *, hashes: bool) -> Contents:
        """What lies in the folder, compiled modules left out: Python writes them by itself."""
        files: dict[str, Item] = {}
        notes: dict[str, Any] = {}
        try:
            for entry, path in _walk(os.fspath(self.folder), ""):
                files[path] = _item(entry, path, notes, hashes)
        except OSError as error:
            raise BuildError(
                f"{error.filename or self.folder}: cannot be read: {error.strerror}"
            ) from error
        return Contents(
            files,
            python_packages(files, notes),
            prefix="",
            config=settings_of(str(notes.get("pyvenv.cfg", ""))),
            state=state_of(str(notes.get("envbuild.json", ""))),
        )


def is_venv(folder: Path) -> bool:
    """Whether `folder` holds a virtual environment (PEP 405)."""
    return (folder / "pyvenv.cfg").is_file() or (folder / "envbuild.json").is_file()


def open_request(request: Request) -> OpenedVenv:
    """`DIR`: see `open_venv`."""
    return open_venv(Path(request.rest), request.spelling)


def open_venv(folder: Path, spelling: str) -> OpenedVenv:
    """The venv in `folder`. Raises UsageError when there is none, BuildError when its state is damaged."""
    if not is_venv(folder):
        what = "is not a virtual environment" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}", "give a folder with pyvenv.cfg or envbuild.json in it")
    state = read_state(folder)
    if state is None:
        version = _version(folder)
        python = ".".join(version.split(".")[:2])
        return OpenedVenv(
            About(VENV, spelling, place=folder, python=python, python_version=version), folder
        )
    about = About(
        kind=VENV,
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
    return OpenedVenv(about, folder)


def _version(folder: Path) -> str:
    text = (folder / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^version(?:_info)?\s*=\s*(\d+(?:\.\d+)*)", text, re.MULTILINE)
    return found[1] if found else ""


def _walk(folder: str, relative: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = f"{relative}/{entry.name}" if relative else entry.name
        if entry.name == "__pycache__":
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
