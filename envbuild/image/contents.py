"""The files of an image archive, stored as blobs in one forward pass or read in place, and its manifest.json."""

from __future__ import annotations

import hashlib
import json
import posixpath
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from envbuild.errors import BuildError
from envbuild.image.blobs import Blobs
from envbuild.image.compression import kind_of
from envbuild.image.entry import FILE, HARDLINK, SYMLINK
from envbuild.image.layout import no_single_image, same_tag
from envbuild.image.model import MAX_MANIFEST, OCI_LAYERS, Descriptor, digest_of, is_digest, parse_config
from envbuild.image.tar_stream import Member, PositionedStream
from envbuild.image.untar import members

_CHUNK = 1 << 20
# Written by `docker save` for daemons before 1.10; no current reader uses them.
_USELESS = ("VERSION", "json", "repositories", "oci-layout")
_MAX_LINKS = 16


class FileRange(NamedTuple):
    """A file in an archive: its position and size in bytes."""

    offset: int
    size: int


F = TypeVar("F", Descriptor, FileRange)


class ArchiveFiles(ABC, Generic[F]):
    """The files of the archive `where`, by their names in it: `keep` turns each into an `F`."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._files: dict[str, F] = {}
        self._links: dict[str, str] = {}

    @abstractmethod
    def keep(self, name: str, member: Member, source: PositionedStream) -> F:
        """Keep a regular file, whose data `source` has next."""

    @abstractmethod
    def read(self, file: F) -> bytes:
        """Return the content of a small file."""

    def take_all(self, source: PositionedStream) -> None:
        """Take the files and links of the archive in `source`, one pass from start to end."""
        for member in members(source):
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


class StoredFiles(ArchiveFiles[Descriptor]):
    """The files of an archive as blobs in `blobs`.

    Only manifest.json, which may come last, tells layers from configurations; so every file is stored.
    """

    def __init__(self, where: str, blobs: Blobs) -> None:
        super().__init__(where)
        self.blobs = blobs

    def keep(self, name: str, member: Member, source: PositionedStream) -> Descriptor:
        seen = hashlib.sha256()
        head = b""
        left = member.stored
        with self.blobs.new() as (out, place):
            while left:
                data = source.exactly(min(left, _CHUNK))
                head = head or data[:4]
                seen.update(data)
                out.write(data)
                left -= len(data)
            digest = f"sha256:{seen.hexdigest()}"
            folder, _, last = name.rpartition("/")
            if folder == "blobs/sha256" and digest != f"sha256:{last}":
                raise BuildError(f"{self.where}: {name}: damaged: its digest is {digest}")
            place(digest)
        return Descriptor(OCI_LAYERS[kind_of(head)], digest, member.stored)

    def read(self, file: Descriptor) -> bytes:
        return self.blobs.read(file.digest)

    def bring(self, blob: Descriptor) -> None:
        """Raise BuildError when the archive did not contain `blob`."""
        if not self.blobs.has(blob):
            raise BuildError(f"{self.where}: {blob.digest} is not in the archive")


class PlacedFiles(ArchiveFiles[FileRange]):
    """The files of an archive as positions in the seekable `stream`."""

    def __init__(self, where: str, stream: BinaryIO) -> None:
        super().__init__(where)
        self._stream = stream

    def keep(self, name: str, member: Member, source: PositionedStream) -> FileRange:
        return FileRange(member.offset, member.stored)

    def read(self, file: FileRange) -> bytes:
        self._stream.seek(file.offset)
        return self._stream.read(file.size)


def _normal(name: str) -> str:
    """Return a name in an archive as a normalized path, without leading slash or dot parts."""
    return posixpath.normpath("/" + name).lstrip("/")


@dataclass(frozen=True, slots=True)
class ManifestItem:
    """An image in manifest.json."""

    config: str
    tags: tuple[str, ...]
    layers: tuple[str, ...]


def _manifest_items(raw: bytes, where: str) -> list[ManifestItem]:
    try:
        listed = json.loads(raw)
        return [
            ManifestItem(
                _string(item["Config"]),
                tuple(map(_string, item.get("RepoTags") or ())),
                tuple(map(_string, item["Layers"] or ())),
            )
            for item in listed
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BuildError(f"{where}: not what `docker save` writes") from None


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def listed_image(found: ArchiveFiles[F], tag: str | None) -> tuple[ManifestItem, bytes, dict[str, Any]]:
    """Return the image with `tag` in manifest.json (None: the only one), and its configuration, raw and parsed.

    Raises BuildError, listing the archive's tags, when no image or more than one matches.
    """
    where = f"{found.where}: manifest.json"
    images = _manifest_items(found.small("manifest.json"), where)
    meant = [image for image in images if tag is None or any(same_tag(tag, name) for name in image.tags)]
    # An image that was saved under two names is listed twice.
    if len({image.config for image in meant}) != 1:
        names = (name for image in images for name in image.tags)
        raise no_single_image(where, tag, len(meant), names, "name one of its tags")
    image = meant[0]
    raw, where = found.small(image.config), f"{found.where}: {image.config}"
    config = parse_config(raw, where)
    named = "sha256:" + image.config.rpartition("/")[2].removesuffix(".json")
    if is_digest(named) and digest_of(raw) != named:
        raise BuildError(f"{where}: damaged: its digest is {digest_of(raw)}")
    return image, raw, config
