"""Reader of image files: a squashfs for enroot, a SIF for Apptainer. Nothing is mounted."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

from envbuild.base.errors import BuildError, UsageError
from envbuild.base.workers import each
from envbuild.contract.state import FILE as STATE
from envbuild.contract.state import PREFIX
from envbuild.image.entry import FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.model import GOARCH
from envbuild.image.sif import JSON, Object, Sif, content_digest, is_sif, read_object, read_sif
from envbuild.image.squashfs.model import NAMES
from envbuild.image.squashfs.read import SquashfsImage, is_squashfs
from envbuild.inspect.facts import SIF, SQUASHFS, ArtifactReader, Inventory, Item, Request, completed
from envbuild.inspect.images import about_image
from envbuild.inspect.metadata import MAX_SIZE, Note, Reader, digested, extra_of, interest, root_inventory, state_of
from envbuild.recipe.targets import Target

_CHUNK = 1 << 20
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
    return _opened(request, image, run, None)


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
    told: Any = objects.get("inspect-metadata.json")
    for key in ("data", "attributes", "labels"):
        told = told.get(key) if isinstance(told, dict) else None
    run["Labels"] = told or run.get("Labels") or _labels(image)
    if not isinstance(run.get("Env"), list):
        run["Env"] = _env(image)
    return _opened(request, image, run, sif)


def _opened(request: Request, image: SquashfsImage, run: Mapping[str, Any], sif: Sif | None) -> ArtifactReader:
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
    return ArtifactReader(completed(about, Inventory({}, state=state)), partial(_contents, image, about.env))


def _contents(image: SquashfsImage, env: Mapping[str, str], hashes: bool) -> Inventory:
    """Return the tree; without `hashes`, only the few files that say what is installed are read."""
    files: dict[str, Item] = {}
    links: dict[str, str] = {}
    wanted: list[tuple[Entry, int]] = []
    for entry, handle in image.entries():
        if entry.kind == HARDLINK:
            links[entry.path] = entry.target
        elif entry.path:
            target = entry.target if entry.kind == SYMLINK else ""
            extra = extra_of(entry.device, entry.xattrs)
            files[entry.path] = Item(entry.kind, entry.mode, entry.size, "", target, entry.uid, entry.gid, False, extra)
        item = files.get(links.get(entry.path, entry.path))
        if item is not None and item.kind == FILE and (hashes or _reader(entry)):
            wanted.append((entry, handle))

    def read(entry: Entry, handle: int) -> tuple[str, bool, Note]:
        reader = _reader(entry)
        if reader is None and entry.kind == HARDLINK:
            return "", False, None  # it is read under its first name
        return digested((bytes(length) if data is None else data for data, length in image.blocks(handle)), reader)

    notes: dict[str, Note] = {}
    for (entry, _), (digest, script, note) in zip(wanted, image.each_file(wanted, read), strict=True):
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
            what = "is not a file" if place.exists() else "does not exist"
            raise UsageError(f"{place} {what}", "give the file of a squashfs or a SIF")
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
        found = each([None] if partition is None else [None, partition], digest, 2)
    except OSError as error:
        raise BuildError(f"{place}: cannot be read: {error.strerror}") from error
    return found[0], found[-1]


def _env(image: SquashfsImage) -> list[str]:
    """Return the variables of programs in the image, as NAME=VALUE, from the files that enroot and Apptainer read."""
    # Apptainer's script first: its values may contain newlines, those of etc/environment cannot.
    script = _DEFAULT.sub('="', _text(image, _ENV_SCRIPT))
    try:
        words = shlex.split(_DEFAULT_END.sub('"', script), comments=True)
    except ValueError:
        words = []
    for text in (words, _text(image, "etc/environment").splitlines()):
        found = {match[1]: match[2] for word in text if (match := _ASSIGNED.fullmatch(word))}
        if found:
            break
    return [f"{name}={value}" for name, value in found.items()]


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
