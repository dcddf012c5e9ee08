"""The files of an image archive, stored as blobs in one forward pass."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field

from envbuild.errors import BuildError
from envbuild.image.blobs import Blobs
from envbuild.image.compression import kind_of
from envbuild.image.entry import FILE, HARDLINK, SYMLINK
from envbuild.image.model import MAX_MANIFEST, OCI_LAYER, OCI_LAYER_GZIP, OCI_LAYER_ZSTD, Descriptor
from envbuild.image.tar_stream import Member, PositionedStream

_CHUNK = 1 << 20
_LAYER_TYPES = {"none": OCI_LAYER, "gzip": OCI_LAYER_GZIP, "zstd": OCI_LAYER_ZSTD}
# Written by `docker save` for daemons before 1.10; no current reader uses them.
_USELESS = ("VERSION", "json", "repositories", "oci-layout")
_MAX_LINKS = 16


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """The files of the archive `where`, as blobs, by their names in the archive.

    Only manifest.json, which may come last, tells layers from configurations; so every file is stored.
    """

    where: str
    blobs: Blobs
    files: dict[str, Descriptor] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def take(self, member: Member, source: PositionedStream) -> None:
        """Store a regular file as a blob, and remember a link."""
        name = normal(member.name)
        self.files.pop(name, None)
        self.links.pop(name, None)
        if member.kind in (SYMLINK, HARDLINK):
            self.links[name] = link_target(member)
        elif member.kind == FILE and posixpath.basename(name) not in _USELESS:
            if member.pieces is not None:
                raise BuildError(f"{self.where}: {name}: a sparse file in an image archive")
            self.files[name] = self._store(name, member.stored, source)

    def get(self, name: str) -> Descriptor:
        """Return the blob of the file `name`, as manifest.json spells it, with links resolved."""
        path = followed(name, self.links)
        if path not in self.files:
            raise BuildError(f"{self.where}: {name!r} is listed but not in the archive")
        return self.files[path]

    def small(self, name: str) -> bytes:
        """Return the content of the JSON file `name`. Raises BuildError when it is larger than MAX_MANIFEST."""
        blob = self.get(name)
        if blob.size > MAX_MANIFEST:
            raise BuildError(f"{self.where}: {name}: {blob.size} bytes where JSON is expected")
        return self.blobs.read(blob.digest)

    def bring(self, blob: Descriptor) -> None:
        """Raise BuildError when the archive did not contain `blob`."""
        if not self.blobs.has(blob):
            raise BuildError(f"{self.where}: {blob.digest} is not in the archive")

    def _store(self, name: str, size: int, source: PositionedStream) -> Descriptor:
        seen = hashlib.sha256()
        head = b""
        left = size
        with self.blobs.new() as (out, place):
            while left:
                data = source.exactly(min(left, _CHUNK))
                head = head or data[:4]
                seen.update(data)
                out.write(data)
                left -= len(data)
            out.flush()
            digest = f"sha256:{seen.hexdigest()}"
            folder, _, last = name.rpartition("/")
            if folder == "blobs/sha256" and digest != f"sha256:{last}":
                raise BuildError(f"{self.where}: {name}: damaged: its digest is {digest}")
            place(digest)
        return Descriptor(_LAYER_TYPES[kind_of(head)], digest, size)


def normal(name: str) -> str:
    """Return a name in an archive as a normalized path, without leading slash or dot parts."""
    return posixpath.normpath("/" + name).lstrip("/")


def link_target(member: Member) -> str:
    """Return the name in the archive that a link leads to."""
    if member.kind == HARDLINK:
        return normal(member.link)
    return normal(posixpath.join(posixpath.dirname(normal(member.name)), member.link))


def followed(name: str, links: Mapping[str, str]) -> str:
    """Return the path that `name`, as manifest.json spells it, leads to through `links`."""
    path = normal(name)
    for _ in range(_MAX_LINKS):
        if path not in links:
            break
        path = links[path]
    return path
