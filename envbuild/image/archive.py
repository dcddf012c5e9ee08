"""Image archives: tar files from `docker save`, in the old and the new form, and OCI layouts in a tar.

Sources: Docker image specification 1.2, "Combined Image JSON + Filesystem Changeset Format" (manifest.json,
<id>/layer.tar); the form that Docker writes since version 25 (blobs/sha256/<hex>); OCI image specification 1.1, "Image
Layout".

An archive is read in one forward pass, so a daemon's response needs no temporary file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from envbuild.errors import BuildError
from envbuild.image.blobs import Blobs
from envbuild.image.compression import decompressed, open_layer
from envbuild.image.contents import ArchiveContents
from envbuild.image.entry import Entry
from envbuild.image.layer import header
from envbuild.image.layout import from_index, same_tag
from envbuild.image.model import (
    OCI_CONFIG,
    OCI_MANIFEST,
    Descriptor,
    ImageManifest,
    canonical,
    digest_of,
    is_digest,
    parse_config,
)
from envbuild.image.pulled import Pulled, check_image
from envbuild.image.tar_stream import PositionedStream
from envbuild.image.untar import members

if TYPE_CHECKING:
    from docker import DockerClient

_CHUNK = 1 << 20
_TAG_HINT = "name one of its tags"


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


def read_daemon(reference: str, blobs: Blobs, client: DockerClient, arch: str | None = None) -> Pulled:
    """Read the image `reference`, a name or an ID, from a Docker daemon. Raises BuildError."""
    import docker.errors
    import requests

    where = f"docker image {reference}"
    try:
        chunks = client.images.get(reference).save(chunk_size=_CHUNK)
        return read_stream(cast(BinaryIO, Chunks(chunks)), where, blobs, None, arch)
    except docker.errors.ImageNotFound:
        raise BuildError(f"{where}: the daemon does not have it", "pull or build it first, or check its name") from None
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise BuildError(f"{where}: {error}") from error


def read_stream(stream: BinaryIO, where: str, blobs: Blobs, tag: str | None, arch: str | None) -> Pulled:
    """Read an image from a stream that need not be seekable, as `read_archive` does; `where` names it in messages."""
    found = ArchiveContents(where, blobs)
    source = PositionedStream(decompressed(stream, where), where)
    for member in members(source):
        found.take(member, source)
    source.finish()
    if "manifest.json" in found.files:
        return _from_manifest_json(found, tag, arch)
    if "index.json" in found.files:
        pulled = from_index(found.small("index.json"), where, blobs, found.bring, tag, arch)
        _check_diff_ids(pulled, where)
        return pulled
    raise BuildError(
        f"{where}: neither manifest.json nor index.json in it: not an image archive",
        "make it with `docker save` or `skopeo copy`; a bare file system needs `docker import`",
    )


def write_archive(
    stream: BinaryIO,
    config: bytes,
    layers: Sequence[Descriptor],
    blobs: Blobs,
    tags: Sequence[str],
    *,
    unpack: bool = True,
    without: Collection[str] = (),
) -> None:
    """Write an archive that `docker load` and skopeo read, the same bytes each time.

    `config` is the image's configuration; `layers` are its blobs, lowest first. Layers are written uncompressed, a form
    that every daemon reads, or with `unpack=False` as they are stored. A layer whose diff_id is in `without` is listed
    in the manifest but left out: a daemon does not need it when it has it on top of the same lower layers. Raises
    BuildError when a layer does not match the configuration.
    """
    ids = parse_config(config, "image configuration")["rootfs"]["diff_ids"]
    if len(ids) != len(layers):
        raise BuildError(f"an image of {len(layers)} layers whose configuration lists {len(ids)}")
    config_name = digest_of(config).removeprefix("sha256:") + ".json"
    names = [diff_id.removeprefix("sha256:") + ".tar" for diff_id in ids]
    listed = [{"Config": config_name, "RepoTags": list(tags) or None, "Layers": names}]
    for name, data in (("manifest.json", canonical(listed)), (config_name, config)):
        stream.write(_header(name, len(data)))
        stream.write(data + bytes(-len(data) % 512))
    written = set(without)
    for diff_id, name, layer in zip(ids, names, layers, strict=True):
        if diff_id not in written:
            written.add(diff_id)
            _write_layer(stream, name, diff_id, layer, blobs.path(layer.digest), unpack)
    stream.write(bytes(1024))


def _write_layer(stream: BinaryIO, name: str, diff_id: str, layer: Descriptor, path: Path, unpack: bool) -> None:
    size = layer.size
    if not path.exists():
        raise BuildError(f"{path}: the blob of a layer is missing")
    if unpack:
        # The header with the size precedes the data, so a first pass measures and checks the layer.
        digest, size = _unpacked(path, layer.digest)
        if digest != diff_id:
            raise BuildError(f"{path}: not the layer {diff_id} of the configuration")
    stream.write(_header(name, size))
    left = size
    with open_layer(path, layer.digest) if unpack else path.open("rb") as data:
        while piece := data.read(min(left + 1, _CHUNK)):
            left -= len(piece)
            if left < 0:
                break
            stream.write(piece)
    if left:
        raise BuildError(f"{path}: changed while it was read, or not {layer.size} bytes long")
    stream.write(bytes(-size % 512))


def _header(name: str, size: int) -> bytes:
    return header(Entry(name, size=size))


def _unpacked(path: Path, name: str) -> tuple[str, int]:
    """Return the digest and the size, in bytes, of a layer's uncompressed tar."""
    seen = hashlib.sha256()
    size = 0
    with open_layer(path, name) as stream:
        while data := stream.read(_CHUNK):
            seen.update(data)
            size += len(data)
    return f"sha256:{seen.hexdigest()}", size


def _from_manifest_json(found: ArchiveContents, tag: str | None, arch: str | None) -> Pulled:
    where = f"{found.where}: manifest.json"
    image = pick_image(listed_images(found.small("manifest.json"), where), where, tag)
    raw = found.small(image.config)
    config = parse_config(raw, f"{found.where}: {image.config}")
    named = image.config.rpartition("/")[2].removesuffix(".json")
    if is_digest(f"sha256:{named}") and digest_of(raw) != f"sha256:{named}":
        raise BuildError(f"{found.where}: {image.config}: damaged: its digest is {digest_of(raw)}")
    layers = [found.get(name) for name in image.layers]
    about = Descriptor(OCI_CONFIG, found.blobs.add(raw), len(raw))
    manifest = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": about.as_json(),
            "layers": [layer.as_json() for layer in layers],
        }
    )
    found.blobs.add(manifest)
    made = ImageManifest(manifest, OCI_MANIFEST, about, tuple(layers))
    check_image(made, config, arch, found.where)
    pulled = Pulled(made, config, found.blobs)
    _check_diff_ids(pulled, found.where)
    return pulled


@dataclass(frozen=True, slots=True)
class ManifestItem:
    """An image in manifest.json."""

    config: str
    tags: tuple[str, ...]
    layers: tuple[str, ...]


def listed_images(raw: bytes, where: str) -> list[ManifestItem]:
    """Parse a manifest.json. Raises BuildError, naming `where`, when it is malformed."""
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


def pick_image(images: list[ManifestItem], where: str, tag: str | None) -> ManifestItem:
    """Return the image with `tag`, or with None the only image.

    Raises BuildError, listing the archive's tags, when no image or more than one matches.
    """
    meant = [image for image in images if tag is None or any(same_tag(tag, name) for name in image.tags)]
    # An image that was saved under two names is listed twice.
    if len({image.config for image in meant}) == 1:
        return meant[0]
    has = ", ".join(sorted({name for image in images for name in image.tags})) or "none with a tag"
    if tag is not None and not meant:
        raise BuildError(f"{where}: no image with the tag {tag!r}; it has {has}", _TAG_HINT)
    raise BuildError(
        f"{where}: {len(meant) or 'no'} images, where one is needed; it has {has}", _TAG_HINT if meant else None
    )


def _check_diff_ids(pulled: Pulled, where: str) -> None:
    for layer, diff_id in zip(pulled.manifest.layers, pulled.config["rootfs"]["diff_ids"], strict=True):
        if layer.digest == diff_id:
            continue
        name = f"{where}: layer {layer.digest}"
        if _unpacked(pulled.blobs.path(layer.digest), name)[0] != diff_id:
            raise BuildError(f"{name} is not {diff_id}, which the configuration lists")


class Chunks:
    """A stream over an iterator of bytes, the form in which the Docker SDK returns archives."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int = -1, /) -> bytes:
        """Return at least one and at most `size` bytes; b"" only at the end."""
        while not self._rest:
            data = next(self._chunks, None)
            if data is None:
                return b""
            self._rest = data
        size = len(self._rest) if size < 0 else size
        data, self._rest = self._rest[:size], self._rest[size:]
        return data
