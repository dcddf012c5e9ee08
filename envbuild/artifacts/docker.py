"""Docker images: into a daemon, a registry, an OCI layout or an archive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.artifacts.image import Image
from envbuild.errors import UsageError
from envbuild.image.model import OCI_INDEX, Descriptor, Index, canonical, parse
from envbuild.image.reference import parse_reference

KIND = "docker"
FORMS = ("oci", "docker-archive")


@dataclass(frozen=True, slots=True)
class Out:
    """What --out asks for: "oci" (an image layout's folder) or "docker-archive" (one file)."""

    form: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> Out:
        """`oci:DIR` or `docker-archive:FILE`. Raises UsageError for anything else."""
        form, colon, path = text.partition(":")
        if form not in FORMS or not colon or not path:
            raise UsageError(
                f"--out {text!r}: an image is written as oci:DIR or docker-archive:FILE",
                f"write --out oci:{text.rpartition(':')[2] or 'DIR'}",
            )
        return cls(form, Path(path))


def default_tag(recipe: str, target: str) -> str:
    """The name of an image in the daemon when --tag does not say."""
    return f"{recipe}:{target}"


def check_tag(tag: str, *, push: bool) -> str:
    """`tag` with its label, `latest` when it has none. Raises UsageError when it is no image's name."""
    reference = parse_reference(tag)
    if reference.digest:
        raise UsageError(f"--tag {tag!r}: a name and a tag, not a digest")
    if push and reference.registry == "docker.io" and reference.repository.startswith("library/"):
        raise UsageError(
            f"--tag {tag!r} names no registry or account that could be pushed to",
            "write it as registry.example.org/team/name:tag",
        )
    return tag if tag.rpartition("/")[2].count(":") else f"{tag}:latest"


def index_of(images: Sequence[Image]) -> Index:
    """The index that joins images of several platforms, in the order of their architectures."""
    manifests: list[Descriptor] = sorted((i.descriptor for i in images), key=lambda d: d.arch)
    raw = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_INDEX,
            "manifests": [descriptor.as_json() for descriptor in manifests],
        }
    )
    index = parse(raw, "the image's index")
    assert isinstance(index, Index)
    return index
