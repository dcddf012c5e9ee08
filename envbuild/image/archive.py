"""Image archives: tar files from `docker save`, in the old and the new form, and OCI layouts in a tar.

Sources: Docker image specification 1.2, "Combined Image JSON + Filesystem Changeset Format" (manifest.json,
<id>/layer.tar); the form that Docker writes since version 25 (blobs/sha256/<hex>); OCI image specification 1.1, "Image
Layout".

An archive is read in one forward pass, so a daemon's response needs no temporary file.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.image.blobs import Blobs, ImageAt, Pulled
from envbuild.image.compression import decompressed, kind_of, open_layer
from envbuild.image.contents import FileRange, listed_image, placed_files, stored_files
from envbuild.image.entry import Entry
from envbuild.image.layer import header
from envbuild.image.layout import from_index
from envbuild.image.model import (
    COMPRESSION,
    OCI_CONFIG,
    OCI_MANIFEST,
    Descriptor,
    canonical,
    check_image,
    new_manifest,
    parse_config,
)
from envbuild.image.tar_stream import Chunks, PositionedStream

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from docker import DockerClient

_CHUNK = 1 << 20


def read_archive(path: Path, blobs: Blobs, tag: str | None, arch: str | None) -> Pulled:
    """Read the image `tag` from an archive, which may be compressed as a whole; with None, the archive's only image.

    Layers are stored as blobs in the form in which the archive has them, and checked against the configuration's
    diff_ids. The manifest is generated from the layers and has the same bytes each time. `arch` is x86_64 or aarch64;
    None accepts any architecture. Raises BuildError.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from error
    with stream:
        return read_stream(stream, str(path), blobs, tag, arch)


def archive_at(path: Path, arch: str) -> ImageAt | None:
    """Return the only image of a `docker save` archive, which must be for `arch`.

    Returns None for an archive that is a pipe, is compressed as a whole or has no manifest.json: its layers cannot be
    read in place. Raises BuildError for a malformed archive.
    """
    if path.is_fifo():  # to open it twice would end its writer
        return None
    try:
        with path.open("rb") as stream:
            if kind_of(stream.read(4)) != "none":
                return None
            stream.seek(0)
            found = placed_files(str(path), stream)
            found.take_all(PositionedStream(stream, str(path)))
            if "manifest.json" not in found:
                return None
            names, raw, config = listed_image(found, None)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from error
    check_image(names, config, arch, str(path))
    layers = tuple(partial(_part, path, found.get(name)) for name in names)
    return ImageAt(digest_of(raw), config, layers)


def read_daemon(reference: str, blobs: Blobs, client: DockerClient, arch: str | None = None) -> Pulled:
    """Read the image `reference`, a name or an ID, from a Docker daemon. Raises BuildError."""
    import docker.errors
    import requests

    where = f"docker image {reference}"
    try:
        chunks = client.images.get(reference).save(chunk_size=_CHUNK)
        return read_stream(io.BufferedReader(Chunks(chunks)), where, blobs, None, arch)
    except docker.errors.ImageNotFound:
        raise BuildError(f"{where}: the daemon does not have it", "pull or build it first, or check its name") from None
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise BuildError(f"{where}: {error}") from error


def read_stream(stream: BinaryIO, where: str, blobs: Blobs, tag: str | None, arch: str | None) -> Pulled:
    """Read an image from a stream that need not be seekable, as `read_archive` does; `where` names it in messages."""
    found = stored_files(where, blobs)
    source = PositionedStream(decompressed(stream, where), where)
    found.take_all(source)
    source.finish()
    if "manifest.json" in found:
        names, raw, config = listed_image(found, tag)
        layers = [found.get(name) for name in names]
        manifest = new_manifest(OCI_MANIFEST, Descriptor(OCI_CONFIG, blobs.add(raw), len(raw)), layers)
        blobs.add(manifest.raw)
        check_image(layers, config, arch, where)
        pulled = Pulled(manifest, config, blobs)
    elif "index.json" in found:
        bring = partial(_require, where, blobs)
        pulled = from_index(found.small("index.json"), where, blobs, bring, tag, arch)
    else:
        raise BuildError(
            f"{where}: neither manifest.json nor index.json in it: not an image archive",
            "make it with `docker save` or `skopeo copy`; a bare file system needs `docker import`",
        )
    _check_diff_ids(pulled, where)
    return pulled


def _require(where: str, blobs: Blobs, blob: Descriptor) -> None:
    if not blobs.has(blob):
        raise BuildError(f"{where}: {blob.digest} is not in the archive")


def archive_pieces(
    config: bytes,
    layers: Sequence[Descriptor],
    blobs: Blobs,
    tags: Sequence[str],
    *,
    known: int = 0,
    stored: Collection[str] = (),
) -> Iterator[bytes]:
    """Yield an archive that `docker load` and skopeo read, the same bytes each time.

    `config` is the image's configuration; `layers` are its blobs, lowest first. The lowest `known` ones are listed in
    the manifest but left out: a daemon does not need layers that it has in the same order. The others are uncompressed,
    a form that every daemon reads, or as they are stored if their compression is in `stored`. Raises BuildError when a
    layer does not match the configuration.
    """
    ids = parse_config(config, "image configuration")["rootfs"]["diff_ids"]
    if len(ids) != len(layers):
        raise BuildError(f"an image of {len(layers)} layers whose configuration lists {len(ids)}")
    config_name = digest_of(config).removeprefix("sha256:") + ".json"
    names = [diff_id.removeprefix("sha256:") + ".tar" for diff_id in ids]
    listed = [{"Config": config_name, "RepoTags": list(tags) or None, "Layers": names}]
    for name, data in (("manifest.json", canonical(listed)), (config_name, config)):
        yield header(Entry(name, size=len(data))) + data + bytes(-len(data) % 512)
    # A layer that comes twice is written once.
    for diff_id, layer in dict(zip(ids[known:], layers[known:], strict=True)).items():
        unpack = COMPRESSION.get(layer.media_type) not in stored
        yield from _layer_pieces(diff_id, layer, blobs.path(layer.digest), unpack)
    yield bytes(1024)


def _layer_pieces(diff_id: str, layer: Descriptor, path: Path, unpack: bool) -> Iterator[bytes]:
    size = layer.size
    if not path.exists():
        raise BuildError(f"{path}: the blob of a layer is missing")
    if unpack:
        # The header with the size precedes the data, so a first pass measures and checks the layer.
        digest, size = _unpacked(path, layer.digest)
        if digest != diff_id:
            raise BuildError(f"{path}: not the layer {diff_id} of the configuration")
    yield header(Entry(diff_id.removeprefix("sha256:") + ".tar", size=size))
    left = size
    with open_layer(path, layer.digest) if unpack else path.open("rb") as data:
        while piece := data.read(min(left + 1, _CHUNK)):
            left -= len(piece)
            if left < 0:
                break
            yield piece
    if left:
        raise BuildError(f"{path}: changed while it was read, or not {layer.size} bytes long")
    yield bytes(-size % 512)


def _unpacked(path: Path, name: str) -> tuple[str, int]:
    """Return the digest and the size, in bytes, of a layer's uncompressed tar."""
    seen = hashlib.sha256()
    size = 0
    with open_layer(path, name) as stream:
        while data := stream.read(_CHUNK):
            seen.update(data)
            size += len(data)
    return f"sha256:{seen.hexdigest()}", size


def _check_diff_ids(pulled: Pulled, where: str) -> None:
    for layer, diff_id in zip(pulled.manifest.layers, pulled.config["rootfs"]["diff_ids"], strict=True):
        if layer.digest == diff_id:
            continue
        name = f"{where}: layer {layer.digest}"
        if _unpacked(pulled.blobs.path(layer.digest), name)[0] != diff_id:
            raise BuildError(f"{name} is not {diff_id}, which the configuration lists")


def _part(path: Path, place: FileRange) -> BinaryIO:
    """Open a range of a file as a stream."""
    return io.BufferedReader(_PartStream(path, place))


class _PartStream(io.RawIOBase):
    """A range of the file `path`, read in place."""

    def __init__(self, path: Path, place: FileRange) -> None:
        self._stream = path.open("rb", buffering=0)
        self._stream.seek(place.offset)
        self._left = place.size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        count = self._stream.readinto(memoryview(buffer)[: self._left]) or 0
        if self._left and not count:
            raise BuildError(f"{self._stream.name}: the tar archive is cut short")
        self._left -= count
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()
