"""OCI image layouts: folders with `oci-layout`, `index.json` and blobs by digest (sha256/<hex>), and images in them.

Source: OCI image specification 1.1, "Image Layout". The tag of an image is the annotation
`org.opencontainers.image.ref.name` of its entry in `index.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from envbuild.base.atomic import naming, new_file
from envbuild.base.errors import BuildError
from envbuild.base.files import link_or_copy
from envbuild.base.packages import digest_of
from envbuild.cache.hashed import Digests
from envbuild.image.model import (
    COMPRESSION,
    GOARCH,
    MAX_MANIFEST,
    OCI_INDEX,
    Descriptor,
    ImageIndex,
    ImageManifest,
    canonical,
    check_image,
    choose,
    json_object,
    new_index,
    parse,
    parse_config,
)


@dataclass(frozen=True, slots=True)
class Blobs:
    """The blobs below `root`, and what is known of their content. A blob appears complete, by rename, or not at all."""

    root: Path
    digests: Digests | None = None

    def path(self, digest: str) -> Path:
        """Return the path of the blob, whether it exists or not."""
        algorithm, _, value = digest.partition(":")
        return self.root / algorithm / value

    def has(self, blob: Descriptor) -> bool:
        """Return whether the blob exists with the right size, and, if `digests` are kept, with the right content."""
        path = self.path(blob.digest)
        try:
            if path.stat().st_size != blob.size:
                return False
        except OSError:
            return False
        return self.digests is None or self.digests.keep(path, blob.digest.partition(":")[2])

    def lacking(self, blob: Descriptor) -> int:
        """Return how many bytes of the blob are to be written until it exists."""
        with contextlib.suppress(OSError):
            if self.path(blob.digest).stat().st_size == blob.size:
                return 0
        with contextlib.suppress(OSError):
            return max(0, blob.size - self.partial(blob.digest).stat().st_size)
        return blob.size

    def require(self, blob: Descriptor) -> None:
        """Raise BuildError when the blob does not exist with the right size."""
        if not self.has(blob):
            raise BuildError(f"{self.path(blob.digest)}: missing, or not {blob.size} bytes long")

    def add(self, data: bytes) -> str:
        """Store a small blob, and return its digest."""
        digest = digest_of(data)
        if not self.path(digest).exists():
            with self.new() as blob:
                blob.write(data)
                blob.place()
        return digest

    def read(self, digest: str) -> bytes:
        """Return the content of a small blob. Raises BuildError when it is missing or damaged."""
        try:
            data = self.path(digest).read_bytes()
        except OSError as error:
            raise BuildError(f"{self.path(digest)}: {error.strerror}") from error
        if digest_of(data) != digest:
            raise BuildError(f"{self.path(digest)}: damaged: its digest is {digest_of(data)}")
        return data

    def partial(self, digest: str) -> Path:
        """Return the file of a partial download, which a later run can resume; `adopt` stores it when complete."""
        folder = self.root / "partial"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / digest.partition(":")[2]

    def adopt(self, file: Path, digest: str) -> Path:
        """Move a complete file, whose digest was checked, to the blob's path."""
        place = self.path(digest)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
        if self.digests is not None:
            self.digests.record(place, digest.partition(":")[2])
        return place

    @contextlib.contextmanager
    def new(self) -> Iterator[NewBlob]:
        """Open a temporary file for a blob whose digest is not known yet; it is deleted unless it is placed."""
        folder = self.root / "sha256"
        folder.mkdir(parents=True, exist_ok=True)
        made = new_file(folder, ".new-")
        with made as (handle, path), naming(path), os.fdopen(handle, "wb", closefd=False) as stream:
            yield NewBlob(self, stream, path)


@dataclass(frozen=True, slots=True)
class BlobFiles:
    """Files with the content of blobs, by digest."""

    files: Mapping[str, Path]

    def path(self, digest: str) -> Path:
        """Return the file of the blob."""
        return self.files[digest]


@dataclass(slots=True)
class NewBlob:
    """A blob that is being written into the temporary file `path`; `size` is the number of bytes so far."""

    blobs: Blobs
    stream: BinaryIO
    path: Path
    size: int = 0
    _sha: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def digest(self) -> str:
        """The digest of the bytes so far."""
        return f"sha256:{self._sha.hexdigest()}"

    def write(self, data: bytes | bytearray) -> None:
        """Append `data`."""
        self.stream.write(data)
        self._sha.update(data)
        self.size += len(data)

    def place(self) -> Path:
        """Move the file to the blob's path."""
        self.stream.flush()
        self.path.chmod(0o644)
        return self.blobs.adopt(self.path, self.digest)


@dataclass(frozen=True, slots=True)
class Pulled:
    """An image for one platform that was read: `blobs` contains every blob that it refers to, `config` is parsed."""

    manifest: ImageManifest
    config: dict[str, Any]
    blobs: Blobs


@dataclass(frozen=True, slots=True)
class ImageAt:
    """An image that is read in place; `image_id` is the digest of its configuration.

    `layers` are functions that open a layer as it is stored, compressed or not, lowest first.
    """

    image_id: str
    config: dict[str, Any]
    layers: tuple[Callable[[], BinaryIO], ...]


def of_pulled(pulled: Pulled) -> ImageAt:
    """Return the `ImageAt` of an image whose blobs exist locally."""
    layers = (partial(opened, pulled.blobs.path(layer.digest)) for layer in pulled.manifest.layers)
    return ImageAt(pulled.manifest.config.digest, pulled.config, tuple(layers))


def opened(path: Path) -> BinaryIO:
    """Open a blob's file as it is stored."""
    return path.open("rb")


REF_NAME = "org.opencontainers.image.ref.name"
# containerd and BuildKit write the full reference here, and only its tag to REF_NAME
_IMAGE_NAME = "io.containerd.image.name"
_VERSION = "1.0.0"
_CHUNK = 1 << 20
_DEPTH = 4
# A function that adds a blob to `Blobs` when it is missing. It raises BuildError when the blob is not available or does
# not match its descriptor.
Bring = Callable[[Descriptor], None]


def read_layout(folder: Path, blobs: Blobs, tag: str | None, arch: str | None) -> Pulled:
    """Read the image `tag` of a layout for `arch`.

    `tag` None means the layout's only image; `arch` is x86_64 or aarch64, None for any. The image's blobs are copied
    into `blobs`, and each is checked against its digest and size. Raises BuildError.
    """
    marker = folder / "oci-layout"
    version = json_object(_small_file(marker), str(marker)).get("imageLayoutVersion")
    if not isinstance(version, str) or not version.startswith("1."):
        raise BuildError(f"{folder}: an OCI layout of unknown version {version!r}")
    bring = partial(_copy, Blobs(folder / "blobs"), blobs)
    return from_index(_small_file(folder / "index.json"), str(folder), blobs, bring, tag, arch)


def layout_at(folder: Path, tag: str | None, arch: str) -> ImageAt:
    """Return the image `tag` for `arch` in the OCI layout `folder`; with None, the only image. Raises BuildError."""
    return of_pulled(layout_image(folder, tag, arch))


def layout_image(folder: Path, tag: str | None, arch: str | None = None) -> Pulled:
    """Return the same image with its blobs, which are not checked."""
    blobs = Blobs(folder / "blobs")
    return from_index(_small_file(folder / "index.json"), str(folder), blobs, blobs.require, tag, arch)


def from_index(raw: bytes, where: str, blobs: Blobs, bring: Bring, tag: str | None, arch: str | None) -> Pulled:
    """Return the image with `tag` in an `index.json` with the bytes `raw`. Raises BuildError."""
    index = parse(raw, f"{where}: index.json", OCI_INDEX)
    if not isinstance(index, ImageIndex):
        raise BuildError(f"{where}: index.json is not an image index")

    def small(blob: Descriptor) -> bytes:
        if blob.size > MAX_MANIFEST:
            raise BuildError(f"{where}: {blob.digest}: a manifest or configuration of {blob.size} bytes")
        bring(blob)
        return blobs.read(blob.digest)

    descriptor = _pick(index, where, tag, arch)
    for _ in range(_DEPTH):
        manifest = parse(small(descriptor), f"{where}: {descriptor.digest}", descriptor.media_type)
        if isinstance(manifest, ImageManifest):
            config = parse_config(small(manifest.config), f"{where}: {manifest.config.digest}")
            check_image(manifest.layers, config, arch, where)
            for layer in manifest.layers:
                if layer.media_type not in COMPRESSION and "tar" not in layer.media_type:
                    raise BuildError(f"{where}: not a container image: a layer is {layer.media_type}")
                bring(layer)
            return Pulled(manifest, config, blobs)
        descriptor = choose(manifest, arch, where)
    raise BuildError(f"{where}: indexes within indexes, more than {_DEPTH} deep")


def fill_layout(folder: Path, blobs: Blobs, images: Sequence[tuple[Descriptor, str | None]]) -> None:
    """Turn the empty `folder` into a layout of `images`: manifests or indexes in `blobs`, with their tags.

    Blobs are hard links if the file system allows, else copies. The caller creates the folder beside its destination
    and moves it there once it is filled. Raises BuildError when a blob is missing or has another size, OSError when the
    folder cannot be written.
    """
    listed = []
    for image, tag in images:
        _link_all(blobs, Blobs(folder / "blobs"), image)
        notes = {**image.annotations, REF_NAME: tag} if tag else image.annotations
        listed.append(Descriptor(image.media_type, image.digest, image.size, image.arch, image.os, notes))
    (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (folder / "oci-layout").write_bytes(canonical({"imageLayoutVersion": _VERSION}))
    (folder / "index.json").write_bytes(new_index(OCI_INDEX, listed).raw)


def same_tag(tag: str, name: str) -> bool:
    """Return whether `tag` matches the image name `name`: the full name, its end after a slash, or its tag alone."""
    short, asked = _short(name), _short(tag)
    return asked in (short, short.rpartition(":")[2]) or f"{asked}:latest" == short


def _short(name: str) -> str:
    return name.removeprefix("docker.io/").removeprefix("library/")


def _pick(index: ImageIndex, where: str, tag: str | None, arch: str | None) -> Descriptor:
    """Return the entry of `index.json` for `tag` and `arch`."""
    named = tuple(item for item in index.manifests if tag is None or any(same_tag(tag, name) for name in _names(item)))
    # The same image under two tags is one image.
    distinct = {item.digest: item for item in named}
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    of_arch = [item for item in distinct.values() if arch and item.arch == GOARCH[arch]]
    if named and all(item.arch for item in named) and len(of_arch) < 2:
        return choose(ImageIndex(index.raw, index.media_type, named), arch, where)
    raise no_single_image(where, tag, len(distinct), (name for item in index.manifests for name in _names(item)))


def no_single_image(
    where: str, tag: str | None, count: int, names: Iterable[str], hint: str = "name the tag of one of them"
) -> BuildError:
    """Return the error for `count` images that `tag` (None: any) selects; `names` are those of all images."""
    has = f"it has {', '.join(sorted(set(names))) or 'none with a tag'}"
    if tag is not None and not count:
        return BuildError(f"{where}: no image with the tag {tag!r}; {has}", "name one of its tags")
    return BuildError(f"{where}: {count or 'no'} images, but exactly one is needed; {has}", hint if count else None)


def _names(item: Descriptor) -> list[str]:
    return [item.annotations[key] for key in (REF_NAME, _IMAGE_NAME) if key in item.annotations]


def _small_file(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_MANIFEST + 1)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}", "give the folder of an OCI image layout") from error
    if len(data) > MAX_MANIFEST:
        raise BuildError(f"{path}: larger than {MAX_MANIFEST} bytes")
    return data


def _copy(source: Blobs, blobs: Blobs, blob: Descriptor) -> None:
    """Copy a blob. It is not linked: a change in the user's folder must not change the store."""
    if blobs.has(blob):
        return
    file = source.path(blob.digest)
    try:
        stream = file.open("rb")
    except OSError as error:
        raise BuildError(f"{file}: {error.strerror}") from error
    with stream, blobs.new() as new:
        # One extra byte distinguishes a longer file from a complete one.
        while data := stream.read(min(blob.size + 1 - new.size, _CHUNK)):
            new.write(data)
        if (new.size, new.digest) != (blob.size, blob.digest):
            raise BuildError(f"{file}: damaged: its content does not match its digest")
        new.place()


def _link_all(blobs: Blobs, target: Blobs, image: Descriptor) -> None:
    """Link `image` and every blob that it refers to into `target`."""
    _link(blobs, target, image)
    manifest = parse(blobs.read(image.digest), image.digest, image.media_type)
    if isinstance(manifest, ImageIndex):
        for item in manifest.manifests:
            _link_all(blobs, target, item)
    else:
        for part in (manifest.config, *manifest.layers):
            _link(blobs, target, part)


def _link(blobs: Blobs, target: Blobs, blob: Descriptor) -> None:
    blobs.require(blob)
    link_or_copy(blobs.path(blob.digest), target.path(blob.digest))
