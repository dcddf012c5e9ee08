"""Readers of images in all their forms: layouts, archives, a daemon, registries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from envbuild.base.errors import BuildError, UsageError
from envbuild.image.layout import REF_NAME, Blobs, Pulled, from_index
from envbuild.image.limits import Quota
from envbuild.image.model import (
    GOARCH,
    MAX_MANIFEST,
    OCI_INDEX,
    OCI_LAYER,
    Descriptor,
    ImageIndex,
    check_image,
    parse,
    parse_config,
)
from envbuild.image.reference import folder_and_tag
from envbuild.inspect.facts import ArtifactReader, Request
from envbuild.inspect.image_reader import Bring, about_image, image_artifact
from envbuild.recipe.targets import host_arch

T = TypeVar("T")


def open_layout(request: Request) -> ArtifactReader:
    """Open `DIR[:TAG]`: an image of an OCI layout, whose blobs are read in place."""
    folder, tag = folder_and_tag(request.rest)
    blobs = Blobs(folder / "blobs")

    def bring(blob: Descriptor) -> None:
        if not blobs.has(blob):
            raise BuildError(f"{blobs.path(blob.digest)}: missing, or not {blob.size} bytes long")

    raw = _index(folder, tag)
    pulled = _of_any(request.arch, lambda arch: from_index(raw, str(folder), blobs, bring, tag, arch))
    return _opened(request, pulled, pulled.manifest.digest, folder)


def open_archive(request: Request) -> ArtifactReader:
    """Open `FILE[:TAG]`: an image of an archive; its layers are unpacked into the store while it is open."""
    from envbuild.image.archive import read_archive

    file, tag = folder_and_tag(request.rest)
    if not file.exists():
        raise UsageError(f"{file} does not exist", "give the file of an image archive")
    folder = request.stack.enter_context(request.access.store.working("opened"))
    pulled = _of_any(request.arch, lambda arch: read_archive(file, Blobs(folder), tag, arch))
    return _opened(request, pulled, "", file)


def open_daemon(request: Request) -> ArtifactReader:
    """Open an image of the docker daemon by its name or id.

    The daemon sends its content only if one of its layers was never read.
    """
    from docker.errors import APIError, ImageNotFound

    from envbuild.image.archive import read_daemon
    from envbuild.image.daemon import connect

    store, name = request.access.store, request.rest
    client = request.stack.enter_context(connect(request.access.variables))
    try:
        config, identity = _daemon_config(client, name)
    except ImageNotFound:
        what = f"the docker daemon has no image {name}"
        if request.spelling == name:  # it could also be the path of a file
            what = f"{name} is no file or folder, and {what}"
        hint = f"see `docker images`; a registry's image is docker://{name}"
        raise UsageError(what, hint) from None
    except APIError as error:
        raise BuildError(f"docker image {name}: {error.explanation or error}") from error
    arch = config["architecture"]
    if request.arch and arch not in ("", GOARCH[request.arch]):
        raise UsageError(f"{request.spelling} is for {arch}, not for {GOARCH[request.arch]}")
    layers = tuple(Descriptor(OCI_LAYER, d, 0) for d in config["rootfs"]["diff_ids"])

    def bring(_: Mapping[str, Descriptor]) -> Mapping[str, Path]:
        folder = request.stack.enter_context(store.working("opened"))
        pulled = read_daemon(identity, Blobs(folder), client)
        ids = pulled.config["rootfs"]["diff_ids"]
        paths = (pulled.blobs.path(layer.digest) for layer in pulled.manifest.layers)
        return dict(zip(ids, paths, strict=True))

    about = about_image(config, identity, "", layers, request.spelling, None)
    return image_artifact(about, layers, bring, request.access)


def _daemon_config(client: Any, name: str) -> tuple[dict[str, Any], str]:
    """Return an image's configuration, as far as a daemon shows it, and its id."""
    found = client.api.inspect_image(name)
    ids = list(found["RootFS"].get("Layers") or ())
    steps = list(reversed(client.api.history(found["Id"])))
    if len(steps) != len(ids):  # the history also lists steps that made no layer
        steps = [step for step in steps if step.get("Size")]
    return {
        "architecture": str(found.get("Architecture") or ""),
        "os": found.get("Os"),
        "created": found.get("Created"),
        "config": found.get("Config"),
        "rootfs": {"type": "layers", "diff_ids": ids},
        "history": [{"created_by": step.get("CreatedBy")} for step in steps],
    }, str(found["Id"])


def open_registry_image(request: Request) -> ArtifactReader:
    """Open an image of a registry; only layers that were never read are fetched, into the store."""
    from envbuild.base.progress import transfer

    store = request.access.store
    registry = request.access.registry(request.rest)
    request.stack.callback(registry.close)
    manifest = _of_any(request.arch, registry.image)
    blobs = store.blobs
    registry.fetch_blob(manifest.config, blobs, lambda _count: None)
    config = parse_config(blobs.read(manifest.config.digest), request.spelling)
    check_image(manifest.layers, config, request.arch, request.spelling)
    Quota(request.access.site.limits).content(request.spelling, sum(layer.size for layer in manifest.layers))

    def bring(wanted: Mapping[str, Descriptor]) -> Mapping[str, Path]:
        total = sum(layer.size for layer in wanted.values())
        with transfer(f"fetching {len(wanted)} layers of {request.rest}", total) as on_progress:
            files = registry.fetch_blobs(list(wanted.values()), blobs, on_progress)
        return dict(zip(wanted, files, strict=True))

    return _opened(request, Pulled(manifest, config, blobs), manifest.digest, None, bring)


def _opened(
    request: Request, pulled: Pulled, digest: str, place: Path | None, bring: Bring | None = None
) -> ArtifactReader:
    layers = pulled.manifest.layers
    about = about_image(pulled.config, pulled.manifest.config.digest, digest, layers, request.spelling, place)

    def here(wanted: Mapping[str, Descriptor]) -> Mapping[str, Path]:
        return {diff_id: pulled.blobs.path(layer.digest) for diff_id, layer in wanted.items()}

    return image_artifact(about, layers, bring or here, request.access)


def _index(folder: Path, tag: str | None) -> bytes:
    """Return a layout's index.json; UsageError if it has several images for one platform, and no tag is given."""
    try:
        with (folder / "index.json").open("rb") as stream:
            raw = stream.read(MAX_MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{folder} is no OCI image layout" if folder.exists() else f"{folder} does not exist",
            "give a folder with oci-layout and index.json in it",
        ) from None
    except OSError as error:
        raise BuildError(f"{folder / 'index.json'}: {error.strerror}") from error
    index = parse(raw, f"{folder}: index.json", OCI_INDEX)
    if tag is None and isinstance(index, ImageIndex):
        different = {item.digest: item.arch for item in index.manifests}
        if len(set(different.values())) < len(different):
            names = sorted(item.annotations.get(REF_NAME, item.digest) for item in index.manifests)
            said = f"{folder} holds {len(different)} images: {', '.join(names)}"
            raise UsageError(said, f"name one: oci:{folder}:TAG")
    return raw


def _of_any(arch: str | None, read: Callable[[str | None], T]) -> T:
    """Return the image that `read` gives for `arch`; for None, of the only platform, or else of this host's."""
    try:
        return read(arch)
    except BuildError as error:
        if arch is not None or host_arch() not in GOARCH:
            raise
        try:
            return read(host_arch())
        except BuildError as second:
            if second.message == error.message:  # the platform was not the reason
                raise
            raise BuildError(second.message, error.hint or "choose one with --target") from None
