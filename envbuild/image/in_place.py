"""Local images read in place: a layer is opened inside the archive or the layout, without a copy."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from envbuild.errors import BuildError
from envbuild.image.archive import listed_image
from envbuild.image.blobs import Blobs, Pulled
from envbuild.image.compression import kind_of
from envbuild.image.contents import FileRange, PlacedFiles
from envbuild.image.layout import from_index, small_file
from envbuild.image.model import check_image, digest_of
from envbuild.image.tar_stream import Chunks, PositionedStream

_CHUNK = 1 << 20


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
    return of_pulled(from_index(small_file(folder / "index.json"), str(folder), blobs, blobs.require, tag, arch))


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
            found = PlacedFiles(str(path), stream)
            found.take_all(PositionedStream(stream, str(path)))
            if "manifest.json" not in found:
                return None
            image, raw, config = listed_image(found, None)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from error
    check_image(image.layers, config, arch, str(path))
    layers = [
        LayerAt(diff_id, partial(_part, path, found.get(name)))
        for diff_id, name in zip(config["rootfs"]["diff_ids"], image.layers, strict=True)
    ]
    return ImageAt(digest_of(raw), config, tuple(layers))


def opened(path: Path) -> BinaryIO:
    """Open a blob's file as it is stored."""
    return path.open("rb")


def _part(path: Path, place: FileRange) -> BinaryIO:
    """Open a range of a file as a stream."""
    stream = path.open("rb")
    return io.BufferedReader(Chunks(_range(stream, place), stream), _CHUNK)


def _range(stream: BinaryIO, place: FileRange) -> Iterator[bytes]:
    stream.seek(place.offset)
    left = place.size
    while data := stream.read(min(left, _CHUNK)):
        left -= len(data)
        yield data
