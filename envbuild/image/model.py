"""Image manifests and indexes of registries, layouts and archives.

Sources: OCI image specification 1.1 (descriptor, manifest, index, config), Docker image manifest V2, schema 2. Both
have the same JSON structure and differ in media types.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of, is_digest

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
OCI_LAYER_GZIP = OCI_LAYER + "+gzip"
OCI_LAYER_ZSTD = OCI_LAYER + "+zstd"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
DOCKER_LAYER_GZIP = DOCKER_LAYER + ".gzip"
DOCKER_LAYER_ZSTD = DOCKER_LAYER + ".zstd"

INDEXES = (OCI_INDEX, DOCKER_INDEX)
MANIFESTS = (OCI_MANIFEST, DOCKER_MANIFEST)
# compression of a layer → its media type
OCI_LAYERS = {"none": OCI_LAYER, "gzip": OCI_LAYER_GZIP, "zstd": OCI_LAYER_ZSTD}
_DOCKER_LAYERS = {"none": DOCKER_LAYER, "gzip": DOCKER_LAYER_GZIP, "zstd": DOCKER_LAYER_ZSTD}
# media type of a layer → its compression
COMPRESSION = {kind: name for table in (OCI_LAYERS, _DOCKER_LAYERS) for name, kind in table.items()}
# OCI media type → Docker's for the same bytes
_DOCKERS = {OCI_CONFIG: DOCKER_CONFIG} | {kind: _DOCKER_LAYERS[name] for name, kind in OCI_LAYERS.items()}
# architecture in targets → in images (GOARCH)
GOARCH = {"x86_64": "amd64", "aarch64": "arm64"}
# Variants that every processor of its architecture has, x86_64 and aarch64.
_EVERY = ("", "v1", "v8")
# The limit protects our memory from a hostile registry; no manifest or configuration of a real image is larger.
MAX_MANIFEST = 8 << 20


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A reference to a blob in a manifest or index. `size` is in bytes; `arch` is a GOARCH, "" if not given.

    `variant` is the least processor of `arch` that the image needs, such as v3 of amd64, "" if not given.
    """

    media_type: str
    digest: str
    size: int
    arch: str = ""
    os: str = ""
    annotations: dict[str, str] = field(default_factory=dict, hash=False, compare=False)
    variant: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the descriptor as JSON for an OCI manifest or index."""
        data: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.annotations:
            data["annotations"] = self.annotations
        if self.arch:
            data["platform"] = {"architecture": self.arch, "os": self.os or "linux"}
            data["platform"] |= {"variant": self.variant} if self.variant else {}
        return data


# The configuration of a manifest that has none (OCI image specification 1.1).
EMPTY = Descriptor("application/vnd.oci.empty.v1+json", "sha256:" + hashlib.sha256(b"{}").hexdigest(), 2)


@dataclass(frozen=True, slots=True)
class _Published:
    """A manifest or an index; `raw` holds its bytes as they were published."""

    raw: bytes
    media_type: str

    @property
    def digest(self) -> str:
        return digest_of(self.raw)

    @property
    def descriptor(self) -> Descriptor:
        return Descriptor(self.media_type, self.digest, len(self.raw))


@dataclass(frozen=True, slots=True)
class ImageManifest(_Published):
    """The manifest of an image for one platform."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class ImageIndex(_Published):
    """The index of a multi-platform image."""

    manifests: tuple[Descriptor, ...]


def canonical(value: Any) -> bytes:
    """Return `value` as JSON, with the same bytes each time."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # A lone surrogate is possible in JSON, as an escape, but not in UTF-8: write it as the escape again.
    return text.encode("utf-8", "backslashreplace")


def artifact_manifest(kind: str, layers: Sequence[Mapping[str, Any]], config: Descriptor = EMPTY, **more: Any) -> bytes:
    """Return an image manifest with the artifact type `kind` ("Guidelines for Artifact Usage")."""
    head = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": kind, "config": config.as_json()}
    return canonical({**head, "layers": list(layers), **more})


def parse(raw: bytes, where: str, media_type: str | None = None) -> ImageManifest | ImageIndex:
    """Parse a manifest or an index; `media_type` is the server's Content-Type, if it sent one.

    Raises BuildError, naming `where`, when the data is neither, or contradicts itself.
    """
    data = json_object(raw, where)
    if "manifests" in data and ("layers" in data or "config" in data):
        # CVE-2021-41190: two readers would see different images under one digest.
        raise BuildError(f"{where}: it is both an image index and an image manifest")
    kind = data.get("mediaType") or (media_type or "").partition(";")[0].strip()
    if kind not in INDEXES + MANIFESTS:
        kind = _guess(data) or kind
    if kind in INDEXES:
        return ImageIndex(raw, kind, _descriptors(data, "manifests", where))
    if kind in MANIFESTS:
        layers, config = _descriptors(data, "layers", where), _descriptor(data.get("config"), where)
        if config.size > MAX_MANIFEST:  # it is read into memory
            raise BuildError(f"{where}: a configuration of {config.size} bytes; the limit is {MAX_MANIFEST}")
        return ImageManifest(raw, kind, config, layers)
    hint = None
    if data.get("schemaVersion") == 1:
        hint = "Docker schema 1 images are long out of use; push the image again with a current tool"
    raise BuildError(f"{where}: a manifest of unknown media type {kind!r}", hint)


def new_manifest(media_type: str, config: Descriptor, layers: Sequence[Descriptor]) -> ImageManifest:
    """Return the manifest of `config` and `layers`, without annotations, with the same bytes each time."""
    parts = {"config": config.as_json(), "layers": [layer.as_json() for layer in layers]}
    raw = canonical({"schemaVersion": 2, "mediaType": media_type, **parts})
    return ImageManifest(raw, media_type, config, tuple(layers))


def new_index(media_type: str, manifests: Sequence[Descriptor]) -> ImageIndex:
    """Return the index of `manifests`, with the same bytes each time."""
    rows = [manifest.as_json() for manifest in manifests]
    raw = canonical({"schemaVersion": 2, "mediaType": media_type, "manifests": rows})
    return ImageIndex(raw, media_type, tuple(manifests))


def docker_manifest(manifest: ImageManifest) -> ImageManifest:
    """Return `manifest` in Docker's form (V2, schema 2), which has no annotations; the blobs stay the same."""
    config, *layers = (
        Descriptor(_DOCKERS.get(blob.media_type, blob.media_type), blob.digest, blob.size)
        for blob in (manifest.config, *manifest.layers)
    )
    return new_manifest(DOCKER_MANIFEST, config, layers)


def choose(index: ImageIndex, arch: str | None, where: str) -> Descriptor:
    """Return the manifest in `index` for linux on `arch` (x86_64, aarch64), with None the only one.

    Of several, it is the one that runs on the most processors, as in Docker: not all nodes have those of this host.
    Raises BuildError when there is none, or more than one for None.
    """
    # Attestations are listed beside images, with the platform "unknown/unknown".
    images = [item for item in index.manifests if item.arch != "unknown"]
    if arch is None:
        if len(images) == 1:
            return images[0]
        raise BuildError(f"{where}: images for {len(images)} platforms, but one is needed")
    go_arch = GOARCH[arch]
    fitting = [item for item in images if item.arch == go_arch and item.os in ("linux", "")]
    if fitting:  # the first of equals
        return min(fitting, key=lambda item: "" if item.variant in _EVERY else item.variant)
    if len(images) == 1 and not images[0].arch:  # a platform is optional; the image's configuration is checked later
        return images[0]
    has = sorted({f"{item.os or 'linux'}/{item.arch}" for item in images if item.arch})
    raise BuildError(
        f"{where} has no image for linux/{go_arch}; it has {', '.join(has) or 'none'}",
        "choose another base image, or leave the target out",
    )


def parse_config(raw: bytes, where: str) -> dict[str, Any]:
    """Parse an image's configuration. Raises BuildError when it has no valid `rootfs.diff_ids`."""
    data = json_object(raw, where)
    rootfs = data.get("rootfs")
    ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(ids, list) or not all(isinstance(i, str) and is_digest(i) for i in ids):
        raise BuildError(f"{where}: an image configuration without rootfs.diff_ids")
    return data


def check_image(layers: Sequence[object], config: dict[str, Any], arch: str | None, where: str) -> None:
    """Raise BuildError when the image of `layers` and `config` does not match `arch` or itself.

    `arch` is x86_64 or aarch64, None for any. The configuration must list as many layers.
    """
    has = config.get("architecture") or ""
    if arch is not None and has and has != GOARCH[arch]:
        raise BuildError(
            f"{where}: the image is for {has}, not for {GOARCH[arch]}",
            "choose an image for this architecture, or leave the target out",
        )
    if len(layers) != (ids := len(config["rootfs"]["diff_ids"])):
        raise BuildError(f"{where}: the manifest lists {len(layers)} layers, the configuration {ids}")


def _guess(data: dict[str, Any]) -> str | None:
    """Return the media type that the keys suggest: OCI allows mediaType to be omitted."""
    if data.get("schemaVersion") != 2:
        return None
    if "manifests" in data:
        return OCI_INDEX
    return OCI_MANIFEST if "layers" in data and "config" in data else None


def json_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises BuildError, naming `where`."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BuildError(f"{where}: not a JSON object")
    return data


def _descriptors(data: dict[str, Any], key: str, where: str) -> tuple[Descriptor, ...]:
    listed = data.get(key)
    if not isinstance(listed, list):
        raise BuildError(f"{where}: {key!r} is missing or not a list")
    return tuple(_descriptor(item, where) for item in listed)


def _descriptor(data: Any, where: str) -> Descriptor:
    if not isinstance(data, dict):
        raise BuildError(f"{where}: a descriptor is missing or not an object")
    media_type, digest, size = data.get("mediaType"), data.get("digest"), data.get("size")
    if not isinstance(digest, str) or not is_digest(digest):
        raise BuildError(f"{where}: {digest!r} is not a sha256 digest")
    if not isinstance(media_type, str) or type(size) is not int or size < 0:
        raise BuildError(f"{where}: the descriptor of {digest} lacks its media type or size")
    platform, notes = data.get("platform"), data.get("annotations")
    platform, notes = platform if isinstance(platform, dict) else {}, notes if isinstance(notes, dict) else {}
    arch, system = str(platform.get("architecture", "")), str(platform.get("os", ""))
    variant, notes = str(platform.get("variant") or ""), {str(k): str(v) for k, v in notes.items()}
    return Descriptor(media_type, digest, size, arch, system, notes, variant)
