"""Image archives: tar files from `docker save`, in the old and the new form, and OCI layouts in a tar.

Sources: Docker image specification 1.2, "Combined Image JSON + Filesystem Changeset Format" (manifest.json,
<id>/layer.tar); the form that Docker writes since version 25 (blobs/sha256/<hex>); OCI image specification 1.1, "Image
Layout".

An archive is read in one forward pass, so a daemon's response needs no temporary file: its files become blobs. One that
can be seeked is read in place.
"""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, NamedTuple, TypeVar

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of, is_digest
from envbuild.image.entry import FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.layer import decompressed, header, kind_of, open_layer
from envbuild.image.layout import Blobs, ImageAt, Pulled, from_index, layout_at, no_single_image, same_tag
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.model import (
    COMPRESSION,
    MAX_MANIFEST,
    OCI_CONFIG,
    OCI_LAYER,
    OCI_LAYERS,
    OCI_MANIFEST,
    Descriptor,
    canonical,
    check_image,
    new_manifest,
    parse_config,
)
from envbuild.image.tar import Chunks, Member, PositionedStream, members

if TYPE_CHECKING:
    from docker import DockerClient

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
        """Read the files and links of the archive in `source`, in one pass from start to end."""
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
            raise BuildError(f"{self.where}: {name}: {file.size} bytes are too many for a JSON file")
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


def listed_image(files: ArchiveFiles[F], tag: str | None) -> tuple[list[str], bytes, dict[str, Any]]:
    """Return the image with `tag` in manifest.json (None: the only one): its layers, its configuration raw and parsed.

    Raises BuildError, listing the archive's tags, when no image or more than one matches.
    """
    where = f"{files.where}: manifest.json"
    raw = files.small("manifest.json")
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
    raw, where = files.small(name), f"{files.where}: {name}"
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


def open_image(path: Path, arch: str, tag: str | None = None) -> ImageAt:
    """Open the image `tag` of an OCI layout, or the only image of an archive of `docker save`; nothing is copied.

    `arch` is x86_64 or aarch64; without `tag`, a layout must have one image. Raises BuildError.
    """
    image = layout_at(path, tag, arch) if path.is_dir() else archive_at(path, arch)
    if image is None:
        raise BuildError(
            f"{path}: its layers cannot be read in place: it is compressed, a pipe, or an OCI layout in a tar",
            "unpack it, or copy the image into Blobs with read_archive",
        )
    return image


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
            files = placed_files(str(path), stream)
            files.take_all(PositionedStream(stream, str(path)))
            if "manifest.json" not in files:
                return None
            names, raw, config = listed_image(files, None)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from error
    check_image(names, config, arch, str(path))
    layers = tuple(partial(_part, path, files.get(name)) for name in names)
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
    files = stored_files(where, blobs)
    source = PositionedStream(decompressed(stream, where), where)
    files.take_all(source)
    source.finish()
    if "manifest.json" in files:
        names, raw, config = listed_image(files, tag)
        layers = [files.get(name) for name in names]
        manifest = new_manifest(OCI_MANIFEST, Descriptor(OCI_CONFIG, blobs.add(raw), len(raw)), layers)
        blobs.add(manifest.raw)
        check_image(layers, config, arch, where)
        pulled = Pulled(manifest, config, blobs)
    elif "index.json" in files:
        bring = partial(_require, where, blobs)
        pulled = from_index(files.small("index.json"), where, blobs, bring, tag, arch)
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
    """Open a range of a file as a stream, which is read in place."""
    file = path.open("rb", buffering=0)
    file.seek(place.offset)

    def pieces() -> Iterator[bytes]:
        left = place.size
        while left:
            data = file.read(min(left, _CHUNK))
            if not data:
                raise BuildError(f"{path}: the tar archive is cut short")
            yield data
            left -= len(data)

    return io.BufferedReader(Chunks(pieces(), file))
