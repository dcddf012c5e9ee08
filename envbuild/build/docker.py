"""Output of docker images: to a daemon, a registry, an OCI layout or an archive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from envbuild.base import atomic
from envbuild.base.errors import UsageError, VerificationError
from envbuild.base.files import absolute_path, named_path
from envbuild.base.progress import log, transfer
from envbuild.build.image_layers import AssembledImage
from envbuild.environment import Environment
from envbuild.image.archive import archive_pieces
from envbuild.image.daemon import Loaded, connect, load
from envbuild.image.layout import fill_layout
from envbuild.image.model import DOCKER_INDEX, DOCKER_MANIFEST, OCI_INDEX, ImageIndex, new_index
from envbuild.image.reference import parse_reference


@dataclass(frozen=True, slots=True)
class ImageOutput:
    """The value of --out: "oci" (the folder of an image layout) or "docker-archive" (one file)."""

    form: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> ImageOutput:
        """Parse `oci:DIR` or `docker-archive:FILE`. Raises UsageError for any other text."""
        form, colon, path = text.partition(":")
        if form not in ("oci", "docker-archive") or not colon or not path:
            raise UsageError(
                f"--out {text!r}: an image is written as oci:DIR or docker-archive:FILE",
                f"write --out oci:{text.rpartition(':')[2] or 'DIR'}",
            )
        return cls(form, named_path(Path(path)))


def check_tag(tag: str, *, push: bool) -> str:
    """Return `tag`, with the label `latest` if it has none. Raises UsageError for an invalid name."""
    reference = parse_reference(tag)
    if reference.digest:
        raise UsageError(f"--tag {tag!r}: a name and a tag, not a digest")
    if push and reference.registry == "docker.io" and reference.repository.startswith("library/"):
        raise UsageError(
            f"--tag {tag!r} names no registry or account to push to", "write it as registry.example.org/team/name:tag"
        )
    return tag if tag.rpartition("/")[2].count(":") else f"{tag}:latest"


def index_of(images: Sequence[AssembledImage]) -> ImageIndex:
    """Return the index of images for several platforms, ordered by architecture, in the format of the images."""
    media_type = DOCKER_INDEX if images[0].manifest.media_type == DOCKER_MANIFEST else OCI_INDEX
    return new_index(media_type, sorted((image.descriptor for image in images), key=lambda row: row.arch))


def load_tagged(image: AssembledImage, tag: str, environment: Environment) -> dict[str, Any]:
    """Load the image into the daemon under the name `tag`, and return what `--json` prints about it."""
    with connect(environment.variables) as client:
        done = _load(client, image, [tag])
    return {"image_id": done.image_id, "layers_sent": done.layers_sent}


@contextmanager
def loaded(client: Any, image: AssembledImage, *, keep: bool) -> Iterator[None]:
    """Keep the image in the daemon, without a name, during the block; then remove it if it is new and need not stay."""
    from docker.errors import DockerException

    done = _load(client, image, [])
    stays = done.was_there
    try:
        yield
        stays = stays or keep
    except VerificationError:
        stays = True  # for inspection
        raise
    finally:
        if not stays:
            with suppress(DockerException):
                client.images.remove(done.image_id)


def _load(client: Any, image: AssembledImage, tags: Sequence[str]) -> Loaded:
    layers = [made.layer for made in image.layers]
    with transfer("loading into the docker daemon", None) as on_progress:
        done = load(client, image.config, layers, tags, image.blobs, on_progress)
    if done.layers_sent:
        log(f"  sent {done.layers_sent} of {len(layers)} layers to the daemon")
    return done


def write(images: Sequence[AssembledImage], index: ImageIndex | None, out: ImageOutput, tag: str) -> None:
    """Write the layout or archive beside its final path, then replace that atomically."""
    path = absolute_path(out.path)
    with atomic.exclusive(path, log), atomic.writing(path.parent), atomic.staged(path) as staged:
        if out.form == "oci":
            root = images[0].descriptor
            if index is not None:
                images[0].blobs.add(index.raw)
                root = index.descriptor
            fill_layout(staged, images[0].blobs, [(root, tag)])
            new = staged
        else:
            new = staged / path.name
            with new.open("wb") as stream:
                layers = [made.layer.blob for made in images[0].layers]
                stream.writelines(archive_pieces(images[0].config, layers, images[0].blobs, [tag]))
            new.chmod(0o644)
        atomic.replace(new, path)


def check_place(out: ImageOutput, count: int) -> None:
    """Raise UsageError when `out` cannot hold `count` images, or when its path has other content."""
    path = absolute_path(out.path)
    if out.form == "docker-archive" and count > 1:
        raise UsageError("a docker-archive holds one platform", "use --out oci:DIR")
    if out.form == "oci":
        free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        if not free and not (path / "oci-layout").is_file():
            raise UsageError(
                f"{path} exists and is no OCI layout; it is left as it is",
                "remove it, or choose another path with --out",
            )
    elif path.is_dir():
        raise UsageError(f"{path} is a folder", "name a file: --out docker-archive:FILE")


def push(images: Sequence[AssembledImage], tag: str, environment: Environment) -> dict[str, Any]:
    """Push the images: missing blobs, then manifests by digest, then the index or manifest by its tag."""
    registry = environment.registry(tag)
    index = index_of(images) if len(images) > 1 else None
    counts = {"uploaded": 0, "uploaded_bytes": 0, "mounted": 0, "present": 0}
    try:
        for image in images:
            descriptors = [image.manifest.config, *(made.layer.blob for made in image.layers)]
            pointer = image.digest if index else registry.reference.pointer
            sources = _repositories(image, registry.reference.registry, environment)
            with transfer(f"pushing to {tag}", sum(blob.size for blob in descriptors)) as on_progress:
                pushed = registry.push(
                    image.blobs,
                    descriptors,
                    image.manifest.raw,
                    image.manifest.media_type,
                    pointer,
                    mount_from=sources,
                    on_progress=on_progress,
                )
            for name in counts:
                counts[name] += getattr(pushed, name)
        if index is not None:
            registry.put_manifest(index.raw, index.media_type, registry.reference.pointer)
    finally:
        registry.close()
    log(
        f"  pushed {counts['uploaded']} blobs ({counts['uploaded_bytes'] / 1e6:.1f} MB), "
        f"{counts['mounted']} mounted, {counts['present']} were there"
    )
    digest = index.digest if index else images[0].digest
    return {"pushed": counts, "reference": f"{registry.reference.name}@{digest}"}


def _repositories(image: AssembledImage, host: str, environment: Environment) -> list[str]:
    """Return the repositories on the registry `host` that have the base image, its own or a mirror's."""
    try:
        base = parse_reference(image.base_name)
    except UsageError:  # the base is Debian packages or a local image
        return []
    names = [base.repository] if base.registry == host else []
    for mirror in environment.site.registry(base.registry).mirrors:
        parts = urlsplit(mirror)
        if parts.netloc.rpartition("@")[2] == host:
            names.append(f"{parts.path}/{base.repository}".strip("/"))
    return names
