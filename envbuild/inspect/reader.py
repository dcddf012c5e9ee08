"""Access to artifacts by a user's spelling: a path, FORM:PLACE, or the name of an image.

Environments in folders and image files (a squashfs for enroot, a SIF for Apptainer; nothing is mounted) are read here.
A new form is a function that takes a `Request`, and one line in `_FORMS`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

from envbuild.base.errors import BuildError, EnvbuildError, HostError, UsageError
from envbuild.base.files import MISSING
from envbuild.base.workers import each
from envbuild.contract.conda_meta import is_conda
from envbuild.contract.state import FILE as STATE
from envbuild.contract.state import PREFIX, read_state
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.layer import kind_of as compressed_kind
from envbuild.image.model import GOARCH
from envbuild.image.reference import parse_reference
from envbuild.image.sif import JSON, Object, Sif, content_digest, is_sif, read_object, read_sif
from envbuild.image.squashfs.model import NAMES
from envbuild.image.squashfs.read import SquashfsImage, is_squashfs
from envbuild.inspect.facts import (
    CONDA,
    IN_STATE,
    SIF,
    SQUASHFS,
    VENV,
    ArtifactReader,
    Description,
    Inventory,
    Item,
    ReadAccess,
    Request,
    completed,
)
from envbuild.inspect.images import about_image, open_archive, open_daemon, open_layout, open_registry_image
from envbuild.inspect.metadata import (
    MAX_SIZE,
    Note,
    Reader,
    digested,
    extra_of,
    interest,
    inventory,
    root_inventory,
    state_of,
)
from envbuild.recipe.targets import Target

_MAX_TEXT = 4 << 20
_ENV_SCRIPT = ".singularity.d/env/10-docker2singularity.sh"
# Apptainer's own builds write NAME="${NAME:-"VALUE"}", where the inner quotes are not part of the value.
_DEFAULT = re.compile(r'="\$\{[A-Za-z_][A-Za-z0-9_]*:-"')
_DEFAULT_END = re.compile(r'"\}"$', re.MULTILINE)
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def open_sqsh(request: Request) -> ArtifactReader:
    """Open `FILE`: a bare squashfs, as `enroot import` makes it.

    Its settings are taken from the files from which enroot and Apptainer read them.
    """
    stream = _file(request)
    if not is_squashfs(stream.read(4)):
        raise UsageError(f"{request.rest} is not a squashfs image")
    image = SquashfsImage(stream, 0, request.rest, request.access.site.limits)
    run = {"Env": _env(image), "Labels": _labels(image)}
    return _opened_squashfs(request, image, run, None)


def open_sif(request: Request) -> ArtifactReader:
    """Open `FILE`: a SIF whose root is a squashfs. Its settings come from its JSON objects."""
    stream = _file(request)
    if not is_sif(stream.read(64)):
        raise UsageError(f"{request.rest} is not a SIF")
    sif = read_sif(stream, request.rest)
    if request.arch and sif.arch not in ("", request.arch):
        raise UsageError(f"{request.spelling} is for {sif.arch}, not for {request.arch}")
    image = SquashfsImage(stream, sif.partition.offset, request.rest, request.access.site.limits)
    objects = {
        item.name: state_of(read_object(stream, item, request.rest).decode("utf-8", "replace"))
        for item in sif.objects
        if item.kind == JSON
    }
    run = dict(objects.get("oci-config.json") or {})
    labels: Any = objects.get("inspect-metadata.json")
    for key in ("data", "attributes", "labels"):
        labels = labels.get(key) if isinstance(labels, dict) else None
    run["Labels"] = labels or run.get("Labels") or _labels(image)
    if not isinstance(run.get("Env"), list):
        run["Env"] = _env(image)
    return _opened_squashfs(request, image, run, sif)


def _opened_squashfs(request: Request, image: SquashfsImage, run: Mapping[str, Any], sif: Sif | None) -> ArtifactReader:
    place = Path(request.rest)
    block = image.superblock
    state = state_of(_text(image, f"{PREFIX}/{STATE}"))
    arch = sif.arch if sif else ""
    if not arch:
        with suppress(UsageError):
            arch = Target.parse(str(state.get("target", ""))).arch
    digest, identity = _digests(place, sif.partition if sif else None)
    config = {
        "config": {**run, "Env": [pair for pair in run["Env"] if isinstance(pair, str)]},
        "architecture": GOARCH.get(arch, arch),
        "created": _time(sif.mtime if sif else block.mtime),
        "rootfs": {"diff_ids": []},
    }
    about = about_image(config, identity, digest, (), request.spelling, place)
    about = replace(
        about,
        kind=SIF if sif else SQUASHFS,
        platform=about.platform if arch else "",
        stored=place.stat().st_size,
        filesystem=f"squashfs, {NAMES[block.compressor]}, blocks of {block.block_size >> 10} KiB",
    )
    return ArtifactReader(completed(about, Inventory({}, state=state)), partial(_squashfs_contents, image, about.env))


def _squashfs_contents(image: SquashfsImage, env: Mapping[str, str], hashes: bool) -> Inventory:
    """Return the tree; without `hashes`, read only the few files with metadata about installed packages."""
    files: dict[str, Item] = {}
    links: dict[str, str] = {}
    scripts: list[tuple[Entry, int]] = []
    for entry, handle in image.entries():
        if entry.kind == HARDLINK:
            links[entry.path] = entry.target
        elif entry.path:
            target = entry.target if entry.kind == SYMLINK else ""
            extra = extra_of(entry.device, entry.xattrs)
            files[entry.path] = Item(entry.kind, entry.mode, entry.size, "", target, entry.uid, entry.gid, False, extra)
        item = files.get(links.get(entry.path, entry.path))
        if item is not None and item.kind == FILE and (hashes or _reader(entry)):
            scripts.append((entry, handle))

    def read(entry: Entry, handle: int) -> tuple[str, bool, Note]:
        reader = _reader(entry)
        if reader is None and entry.kind == HARDLINK:
            return "", False, None  # it is read under its first name
        return digested((bytes(length) if data is None else data for data, length in image.blocks(handle)), reader)

    notes: dict[str, Note] = {}
    for (entry, _), (digest, script, note) in zip(scripts, image.each_file(scripts, read), strict=True):
        if hashes and entry.kind != HARDLINK:
            files[entry.path] = replace(files[entry.path], sha256=digest, script=script)
        if note is not None:
            notes[entry.path] = note
    files |= {path: files[target] for path, target in links.items()}
    return root_inventory(files, notes, env)


def _reader(entry: Entry) -> Reader | None:
    return interest(entry.path) if entry.size <= MAX_SIZE else None


def _file(request: Request) -> BinaryIO:
    place = Path(request.rest)
    try:
        if not place.is_file():
            problem = "is not a file" if place.exists() else "does not exist"
            raise UsageError(f"{place} {problem}", "give the file of a squashfs or a SIF")
        return request.stack.enter_context(place.open("rb"))
    except OSError as error:
        raise BuildError(f"{place}: {error.strerror}") from error


def _digests(place: Path, partition: Object | None) -> tuple[str, str]:
    """Return the digest of the file's content, and of the squashfs in it, which is the same in any file."""

    def digest(part: Object | None, stop: Event) -> str:
        if part is None:
            return content_digest(place)
        start, left = part.offset, part.size
        seen = hashlib.sha256()
        with place.open("rb") as stream:
            stream.seek(start)
            while left and not stop.is_set() and (data := stream.read(min(left, _CHUNK))):
                seen.update(data)
                left -= len(data)
        return f"sha256:{seen.hexdigest()}"

    try:
        digests = each([None] if partition is None else [None, partition], digest, 2)
    except OSError as error:
        raise BuildError(f"{place}: cannot be read: {error.strerror}") from error
    return digests[0], digests[-1]


def _env(image: SquashfsImage) -> list[str]:
    """Return the variables of programs in the image, as NAME=VALUE, from the files that enroot and Apptainer read."""
    # Apptainer's script first: its values may contain newlines, those of etc/environment cannot.
    script = _DEFAULT.sub('="', _text(image, _ENV_SCRIPT))
    try:
        words = shlex.split(_DEFAULT_END.sub('"', script), comments=True)
    except ValueError:
        words = []
    for text in (words, _text(image, "etc/environment").splitlines()):
        variables = {match[1]: match[2] for word in text if (match := _ASSIGNED.fullmatch(word))}
        if variables:
            break
    return [f"{name}={value}" for name, value in variables.items()]


def _labels(image: SquashfsImage) -> dict[str, Any]:
    """Return the image's labels as Apptainer stores them, else from the comments at the start of enroot's etc/rc."""
    labels = state_of(_text(image, ".singularity.d/labels.json"))
    if labels:
        return labels
    lines = takewhile(lambda line: line.startswith("# "), _text(image, "etc/rc").splitlines())
    comments = (line[2:].partition(" ") for line in lines)
    return {name: value for name, _, value in comments if not name.endswith(":")}


def _text(image: SquashfsImage, path: str) -> str:
    """Return the text of a small file in the image, "" if it is missing."""
    handle = image.find(path)
    return "" if handle is None else image.content(handle, _MAX_TEXT).decode("utf-8", "replace")


def _time(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return ""


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


def _not_there(request: Request, kind: str, hint: str) -> UsageError:
    folder = Path(request.rest)
    return UsageError(f"{folder} {f'is not {kind}' if folder.exists() else 'does not exist'}", hint)


def _opened(kind: str, request: Request) -> ArtifactReader:
    folder = Path(request.rest)
    about = Description(kind, request.spelling, place=folder)
    state = read_state(folder)
    if state is not None:
        fields = {name: getattr(state, name) for name in IN_STATE}
        about = replace(about, identity=state.digest, digest=state.digest, **fields)
    elif kind == VENV:  # the version of Python in a conda environment comes from its packages (facts.completed)
        text = (folder / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
        match = re.search(r"^version(?:_info)?\s*=\s*((\d+(?:\.\d+)?)(?:\.\d+)*)", text, re.MULTILINE)
        if match:
            about = replace(about, python=match[2], python_version=match[1])
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
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
    for entry in entries:
        path = f"{relative}/{entry.name}" if relative else entry.name
        if entry.name == "__pycache__" or entry.name in without:
            continue
        yield entry, path
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, path)


def _item(entry: os.DirEntry[str], path: str, notes: dict[str, Any], hashes: bool) -> Item:
    status = entry.stat(follow_symlinks=False)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "socket")
    reader = interest(path) if kind == FILE else None
    digest, script = "", False
    if kind == FILE and (reader or hashes):
        with open(entry.path, "rb", buffering=0) as stream:
            digest, script, note = digested(iter(partial(stream.read, _CHUNK), b""), reader)
        if reader:
            notes[path] = note
    return Item(
        kind,
        stat.S_IMODE(status.st_mode),
        status.st_size if kind == FILE else 0,
        digest if hashes else "",
        os.readlink(entry.path) if kind == SYMLINK else "",
        status.st_uid,
        status.st_gid,
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
    parsed = Target.parse(target) if target else None
    places = [split(text) for text in texts]
    names = [text for text, (form, _) in zip(texts, places, strict=True) if form is None]
    with ExitStack() as stack:
        readers = []
        for text, (form, rest) in zip(texts, places, strict=True):
            request = Request(text, rest, parsed.arch if parsed else None, access, stack)
            try:
                opened = _FORMS[form or "docker-daemon"][0](request)
            except HostError as error:
                raise _neither_path_nor_image(names, error) if form is None else error from None
            if parsed and opened.about.target not in ("", parsed.name):
                raise UsageError(f"{text} is for {opened.about.target}, not for {parsed.name}")
            readers.append(opened)
        yield readers


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
            problem = f"{text or repr(text)} does not exist"
        else:
            problem = f"{text}: no such file or folder, and no name of an image: {error.message}"
        raise UsageError(problem, f"give {HELP}") from None
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
    """Return the error for names that are not paths and, because no daemon answers, cannot be looked up as images."""
    if len(names) == 1:
        none = f"{names[0]} is no file or folder, nor could it be looked for as an image"
    else:
        none = f"neither {' nor '.join(names)} is a file or folder, nor could they be looked for as images"
    return HostError(
        f"{none}: {error.message}",
        f"correct the path; for an image of a registry write docker://{names[0]}, "
        "for one of the docker daemon start dockerd or set DOCKER_HOST",
    )
