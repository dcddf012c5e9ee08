"""Opening of artifacts by a user's spelling: a path, FORM:PLACE, or the name of an image; environments in folders.

A new form is one module with a function that takes a `Request`, and one line in `_FORMS`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.base.errors import BuildError, EnvbuildError, HostError, UsageError
from envbuild.base.files import MISSING
from envbuild.contract.conda_meta import is_conda
from envbuild.contract.state import read_state
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, SYMLINK
from envbuild.image.layer import kind_of as compressed_kind
from envbuild.image.reference import parse_reference
from envbuild.image.sif import is_sif
from envbuild.image.squashfs.read import is_squashfs
from envbuild.inspect.facts import (
    CONDA,
    IN_STATE,
    VENV,
    ArtifactReader,
    Description,
    Inventory,
    Item,
    ReadAccess,
    Request,
)
from envbuild.inspect.images import open_archive, open_daemon, open_layout, open_registry_image
from envbuild.inspect.metadata import digested, interest, inventory
from envbuild.inspect.squashfs_reader import open_sif, open_sqsh
from envbuild.recipe.targets import Target

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
HELP = (
    "a path, conda:DIR, venv:DIR, oci:DIR[:TAG], docker-archive:FILE, sqsh:FILE, sif:FILE, "
    "docker-daemon:NAME or docker://NAME"
)
# A file's kind is visible in its first bytes; a tar's magic number ends at 262.
_HEAD = 512


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


def _begins(path: Path, is_one: Callable[[bytes], bool]) -> bool:
    try:
        if not path.is_file():  # a FIFO would block
            return False
        with path.open("rb") as stream:
            return is_one(stream.read(_HEAD))
    except (*MISSING, PermissionError):
        return False


def _is_archive(head: bytes) -> bool:
    return head[257:262] == b"ustar" or compressed_kind(head) != "none"


# Form → the function that opens it, and the one that says whether a path has this form. Paths are tried in this order.
_FORMS: dict[str, tuple[Callable[[Request], ArtifactReader], Callable[[Path], bool]]] = {
    "conda": (open_conda, is_conda),
    "venv": (open_venv, is_venv),
    "oci": (open_layout, lambda path: (path / "oci-layout").is_file()),
    "sqsh": (open_sqsh, lambda path: _begins(path, is_squashfs)),
    "sif": (open_sif, lambda path: _begins(path, is_sif)),
    "docker-archive": (open_archive, lambda path: _begins(path, _is_archive)),
    "docker-daemon": (open_daemon, lambda _: False),
    "docker": (open_registry_image, lambda _: False),
}


@contextmanager
def open_artifacts(texts: Sequence[str], access: ReadAccess, target: str | None) -> Iterator[list[ArtifactReader]]:
    """Open the artifacts that `texts` name.

    `target` selects a platform of an image, None the only one or this host's. Raises UsageError when there is no such
    artifact or it is for another target, BuildError when it is damaged, HostError when no docker daemon answers.
    """
    wanted = Target.parse(target) if target else None
    places = [split(text) for text in texts]
    names = [text for text, (form, _) in zip(texts, places, strict=True) if form is None]
    with ExitStack() as stack:
        found = []
        for text, (form, rest) in zip(texts, places, strict=True):
            request = Request(text, rest, wanted.arch if wanted else None, access, stack)
            try:
                opened = _FORMS[form or "docker-daemon"][0](request)
            except HostError as error:
                raise _neither_path_nor_image(names, error) if form is None else error from None
            if wanted and opened.about.target not in ("", wanted.name):
                raise UsageError(f"{text} is for {opened.about.target}, not for {wanted.name}")
            found.append(opened)
        yield found


@contextmanager
def open_artifact(text: str, access: ReadAccess, target: str | None) -> Iterator[ArtifactReader]:
    """Open one artifact, see `open_artifacts`."""
    with open_artifacts([text], access, target) as (opened,):
        yield opened


def split(text: str) -> tuple[str | None, str]:
    """Return (form, place) of an artifact's spelling; the form is None for the name of an image.

    An existing path counts as a path, whatever it looks like. Raises UsageError for any other text.
    """
    path = Path(text)
    if text and os.path.lexists(path):
        for form, (_, holds) in _FORMS.items():
            if holds(path):
                return form, text
        raise _no_artifact(path)
    form, colon, rest = text.partition(":")
    if colon and form in _FORMS:
        # docker:26 is an image called docker; docker://docker:26 is the same image in a registry.
        if form != "docker":
            if not rest:
                raise UsageError(f"{text!r}: nothing follows {form}:", f"give {HELP}")
            return form, rest
        if rest.startswith("//"):
            return form, rest[2:]
    try:
        parse_reference(text)
    except UsageError as error:
        if text.startswith(("/", ".", "~")) or "://" in text or not text:
            said = f"{text or repr(text)} does not exist"
        else:
            said = f"{text}: no such file or folder, and no name of an image: {error.message}"
        raise UsageError(said, f"give {HELP}") from None
    return None, text


def _no_artifact(path: Path) -> UsageError:
    if not os.access(path, os.R_OK, effective_ids=True):
        return UsageError(f"cannot read {path}: permission denied", "ask its owner for read permission")
    if path.is_dir():
        kinds = "a venv, a conda environment nor an OCI layout"
    else:
        kinds = "a squashfs, a SIF nor an image archive (a tar, plain or in gzip or zstd)"
    return UsageError(f"{path} is not an artifact: it is neither {kinds}", f"give {HELP}")


def _neither_path_nor_image(names: Sequence[str], error: EnvbuildError) -> HostError:
    """Return the error for names that are not paths, when no daemon answers that could have images of these names."""
    if len(names) == 1:
        none = f"{names[0]} is no file or folder, nor could it be looked for as an image"
    else:
        none = f"neither {' nor '.join(names)} is a file or folder, nor could they be looked for as images"
    return HostError(
        f"{none}: {error.message}",
        f"correct the path; for an image of a registry write docker://{names[0]}, "
        "for one of the docker daemon start dockerd or set DOCKER_HOST",
    )
