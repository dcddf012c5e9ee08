"""The files of an image archive, stored as blobs in one forward pass or read in place, and its manifest.json."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.image.blobs import Blobs
from envbuild.image.compression import kind_of
from envbuild.image.entry import FILE, HARDLINK, SYMLINK
from envbuild.image.layout import no_single_image, same_tag
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.model import MAX_MANIFEST, OCI_LAYER, OCI_LAYERS, Descriptor, is_digest, parse_config
from envbuild.image.tar_stream import Member, PositionedStream
from envbuild.image.untar import members

_CHUNK = 1 << 20
# Written by `docker save` for daemons before 1.10; no current reader uses them.
_USELESS = ("VERSION", "json", "repositories", "oci-layout")
_MAX_LINKS = 16
# An archive has few files, and their bytes are in it: sparse files are refused. Its layers have a quota of their own.
_OF_FILES = ImageLimits(entries=100_000, unpacked_bytes=1 << 62)


class FileRange(NamedTuple):
    """A file in an archive: its position and size in bytes."""

    offset: int
    size: int


F = TypeVar("F", Descriptor, FileRange)


@dataclass(frozen=True, slots=True)
class ArchiveFiles(Generic[F]):
    """The files of the archive `where`, by their names in it: `keep` makes each an `F`, `read` returns its content."""

    where: str
    keep: Callable[[str, Member, PositionedStream], F]
    read: Callable[[F], bytes]
    _files: dict[str, F] = field(default_factory=dict)
    _links: dict[str, str] = field(default_factory=dict)

    def take_all(self, source: PositionedStream) -> None:
        """Take the files and links of the archive in `source`, one pass from start to end."""
        for member in members(source, Quota(_OF_FILES)):
            name = _normal(member.name)
            self._files.pop(name, None)
            self._links.pop(name, None)
            if member.kind == HARDLINK:
                self._links[name] = _normal(member.link)
            elif member.kind == SYMLINK:
                self._links[name] = _normal(posixpath.join(posixpath.dirname(name), member.link))
            elif member.kind == FILE and posixpath.basename(name) not in _USELESS:
                if member.pieces is not None:
                    raise BuildError(f"{self.where}: {name}: a sparse file in an image archive")
                self._files[name] = self.keep(name, member, source)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str) -> F:
        """Return the file `name`, as manifest.json spells it, with links resolved."""
        path = _normal(name)
        for _ in range(_MAX_LINKS):
            path = self._links.get(path, path)
        if path not in self._files:
            raise BuildError(f"{self.where}: {name!r} is listed but not in the archive")
        return self._files[path]

    def small(self, name: str) -> bytes:
        """Return the content of the JSON file `name`. Raises BuildError when it is larger than MAX_MANIFEST."""
        file = self.get(name)
        if file.size > MAX_MANIFEST:
            raise BuildError(f"{self.where}: {name}: {file.size} bytes where JSON is expected")
        return self.read(file)


def stored_files(where: str, blobs: Blobs) -> ArchiveFiles[Descriptor]:
    """Return an archive whose files become blobs in `blobs`.

    Only manifest.json, which may come last, tells layers from configurations; so every file is stored.
    """

    def keep(name: str, member: Member, source: PositionedStream) -> Descriptor:
        head = b""
        with blobs.new() as new:
            while left := member.stored - new.size:
                data = source.exactly(min(left, _CHUNK))
                head = head or data[:4]
                new.write(data)
            folder, _, last = name.rpartition("/")
            if folder == "blobs/sha256" and new.digest != f"sha256:{last}":
                raise BuildError(f"{where}: {name}: damaged: its digest is {new.digest}")
            new.place()
        return Descriptor(OCI_LAYERS.get(kind_of(head), OCI_LAYER), new.digest, new.size)

    return ArchiveFiles(where, keep, lambda blob: blobs.read(blob.digest))


def placed_files(where: str, stream: BinaryIO) -> ArchiveFiles[FileRange]:
    """Return an archive whose files stay where they are in the seekable `stream`."""

    def read(file: FileRange) -> bytes:
        stream.seek(file.offset)
        return stream.read(file.size)

    return ArchiveFiles(where, lambda _name, member, _source: FileRange(member.offset, member.stored), read)


def listed_image(found: ArchiveFiles[F], tag: str | None) -> tuple[list[str], bytes, dict[str, Any]]:
    """Return the image with `tag` in manifest.json (None: the only one): its layers, its configuration raw and parsed.

    Raises BuildError, listing the archive's tags, when no image or more than one matches.
    """
    where = f"{found.where}: manifest.json"
    raw = found.small("manifest.json")
    try:
        listed = [_described(item) for item in json.loads(raw)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BuildError(f"{where}: not what `docker save` writes") from None
    meant = [
        (config, layers) for config, tags, layers in listed if tag is None or any(same_tag(tag, name) for name in tags)
    ]
    # An image that was saved under two names is listed twice.
    if len({config for config, _ in meant}) != 1:
        names = (name for _, tags, _ in listed for name in tags)
        raise no_single_image(where, tag, len(meant), names, "name one of its tags")
    name, layers = meant[0]
    raw, where = found.small(name), f"{found.where}: {name}"
    config = parse_config(raw, where)
    digest = "sha256:" + name.rpartition("/")[2].removesuffix(".json")
    if is_digest(digest) and digest_of(raw) != digest:
        raise BuildError(f"{where}: damaged: its digest is {digest_of(raw)}")
    return layers, raw, config


def _described(item: Any) -> tuple[str, list[str], list[str]]:
    """Return the configuration, tags and layers of an image in manifest.json. Raises TypeError, KeyError and others."""
    config, tags, layers = item["Config"], list(item.get("RepoTags") or ()), list(item["Layers"] or ())
    if not all(isinstance(text, str) for text in (config, *tags, *layers)):
        raise TypeError
    return config, tags, layers


def _normal(name: str) -> str:
    """Return a name in an archive as a normalized path, without leading slash or dot parts."""
    return posixpath.normpath("/" + name).lstrip("/")
