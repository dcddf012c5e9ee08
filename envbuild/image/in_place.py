"""Local images read in place: a layer is opened inside the archive or the layout, without a copy."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from envbuild.errors import BuildError
from envbuild.image.archive import listed_images, pick_image
from envbuild.image.blobs import Blobs
from envbuild.image.compression import kind_of
from envbuild.image.contents import followed, link_target, normal
from envbuild.image.entry import FILE, HARDLINK, SYMLINK
from envbuild.image.layout import from_index
from envbuild.image.model import MAX_MANIFEST, Descriptor, digest_of, is_digest, parse_config
from envbuild.image.pulled import Pulled, check_architecture
from envbuild.image.tar_stream import PositionedStream
from envbuild.image.untar import members


@dataclass(frozen=True, slots=True)
class LayerAt:
    """A layer: the digest of its tar, and a function that opens it as it is stored, compressed or not."""

    diff_id: str
    opens: Callable[[], BinaryIO]


@dataclass(frozen=True, slots=True)
class ImageAt:
    """An image's configuration and layers, lowest first. `image_id` is the digest of the configuration."""

    image_id: str
    config: dict[str, Any]
    layers: tuple[LayerAt, ...]


def of_pulled(pulled: Pulled) -> ImageAt:
    """Return the `ImageAt` of an image whose blobs exist locally."""
    ids = pulled.config["rootfs"]["diff_ids"]
    paths = [pulled.blobs.path(layer.digest) for layer in pulled.manifest.layers]
    layers = tuple(LayerAt(diff_id, partial(opened, path)) for diff_id, path in zip(ids, paths, strict=True))
    return ImageAt(pulled.manifest.config.digest, pulled.config, layers)


def layout_at(folder: Path, tag: str | None, arch: str) -> ImageAt:
    """Return the image `tag` for `arch` in the OCI layout `folder`; with None, the only image. Raises BuildError."""
    blobs = Blobs(folder / "blobs")

    def bring(blob: Descriptor) -> None:
        if not blobs.has(blob):
            raise BuildError(f"{blobs.path(blob.digest)}: missing, or not {blob.size} bytes long")

    try:
        with (folder / "index.json").open("rb") as stream:
            raw = stream.read(MAX_MANIFEST)
    except OSError as error:
        raise BuildError(
            f"{folder / 'index.json'}: {error.strerror}", "give a folder with an OCI image layout"
        ) from error
    return of_pulled(from_index(raw, str(folder), blobs, bring, tag, arch))


def archive_at(path: Path, arch: str) -> ImageAt | None:
    """Return the only image of a `docker save` archive, which must be for `arch`.

    Returns None for an archive that is compressed as a whole or has no manifest.json: its layers cannot be read in
    place. Raises BuildError for a malformed archive.
    """
    try:
        with path.open("rb") as stream:
            if kind_of(stream.read(4)) != "none":
                return None
            stream.seek(0)
            found = _index(stream, str(path))
            if "manifest.json" not in found.ranges:
                return None
            where = f"{path}: manifest.json"
            image = pick_image(listed_images(found.small(stream, "manifest.json"), where), where, None)
            raw = found.small(stream, image.config)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from error
    config = parse_config(raw, f"{path}: {image.config}")
    named = image.config.rpartition("/")[2].removesuffix(".json")
    if is_digest(f"sha256:{named}") and digest_of(raw) != f"sha256:{named}":
        raise BuildError(f"{path}: {image.config}: damaged: its digest is {digest_of(raw)}")
    check_architecture(config, arch, str(path))
    ids = config["rootfs"]["diff_ids"]
    if len(ids) != len(image.layers):
        count = len(image.layers)
        raise BuildError(f"{path}: the manifest lists {count} layers, the configuration {len(ids)}")
    places = [found.get(name) for name in image.layers]
    layers = tuple(
        LayerAt(diff_id, partial(_part, path, *place)) for diff_id, place in zip(ids, places, strict=True)
    )  # fmt: skip
    return ImageAt(digest_of(raw), config, layers)


def opened(path: Path) -> BinaryIO:
    """Open a blob's file as it is stored."""
    return path.open("rb")


@dataclass(frozen=True, slots=True)
class _Index:
    """The positions of an archive's files, by name: (offset, size) in bytes."""

    where: str
    ranges: dict[str, tuple[int, int]]
    links: dict[str, str]

    def get(self, name: str) -> tuple[int, int]:
        path = followed(name, self.links)
        if path not in self.ranges:
            raise BuildError(f"{self.where}: {name!r} is listed but not in the archive")
        return self.ranges[path]

    def small(self, stream: BinaryIO, name: str) -> bytes:
        offset, size = self.get(name)
        if size > MAX_MANIFEST:
            raise BuildError(f"{self.where}: {name}: {size} bytes where JSON is expected")
        stream.seek(offset)
        return stream.read(size)


def _index(stream: BinaryIO, where: str) -> _Index:
    ranges: dict[str, tuple[int, int]] = {}
    links: dict[str, str] = {}
    source = PositionedStream(stream, where)
    for member in members(source):
        name = normal(member.name)
        ranges.pop(name, None)
        links.pop(name, None)
        if member.kind in (SYMLINK, HARDLINK):
            links[name] = link_target(member)
        elif member.kind == FILE:
            if member.pieces is not None:
                raise BuildError(f"{where}: {name}: a sparse file in an image archive")
            ranges[name] = (member.offset, member.stored)
    return _Index(where, ranges, links)


class _Range(io.RawIOBase):
    """A range of a file as a stream; closing it closes the file."""

    def __init__(self, stream: BinaryIO, offset: int, size: int) -> None:
        self._stream, self._left = stream, size
        stream.seek(offset)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._stream.read(wanted)
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._stream.close()
        super().close()


def _part(path: Path, offset: int, size: int) -> BinaryIO:
    return cast(BinaryIO, _Range(path.open("rb"), offset, size))
