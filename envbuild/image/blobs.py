"""A folder of blobs named by digest in the form of an OCI image layout (sha256/<hex>), and images in it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from envbuild.base.atomic import naming, new_file
from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.cache.hashed import Digests
from envbuild.image.model import Descriptor, ImageManifest


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


def file_digest(path: Path) -> str:
    """Return the digest of a file's content."""
    with path.open("rb") as stream:
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
