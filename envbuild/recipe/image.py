"""The `[image]` table of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from envbuild.recipe.checks import base_problem, variable_problem
from envbuild.toml import Document, Problem


@dataclass(frozen=True)
class ImageTable:
    """`[image]`: the base and the settings of container images (docker, enroot, apptainer)."""

    base: str = field(
        default="debian",
        metadata={
            "doc": "`debian` for a small base from Debian packages, or an existing image: a registry"
            " reference, docker-daemon:NAME, docker-archive:FILE or oci:DIR[:TAG].",
            "check": base_problem,
            "example": "docker.io/pytorch/pytorch:2.7.1-cuda12.6-cudnn9-runtime",
        },
    )
    suite: str = field(
        default="",
        metadata={
            "doc": "Debian's release. Default: the one that has the recipe's Python.",
            "pattern": r"^[a-z]*$",
            "example": "bookworm",
        },
    )
    packages: tuple[str, ...] = field(
        default=(),
        metadata={
            "doc": "Debian packages besides the usual ones (Python, bash, coreutils, certificates …).",
            "pattern": r"^[a-z0-9][a-z0-9+.-]+$",
            "example": ["openssh-client"],
        },
    )
    python: str = field(
        default="",
        metadata={
            "doc": "The interpreter inside an existing base image, an absolute path.",
            "pattern": r"^(/[^/\s]+)*$",
            "example": "/opt/conda/bin/python3.11",
        },
    )
    build_base: str = field(
        default="",
        metadata={
            "doc": "An image of the same distribution with compilers, in which [layers] are built. Needed where"
            " `base` is an existing image; else Debian's compilers are used.",
            "check": base_problem,
            "example": "docker.io/nvidia/cuda:12.6.3-devel-ubuntu22.04",
        },
    )
    build_packages: tuple[str, ...] = field(
        default=(),
        metadata={
            "doc": "Debian packages that building [layers] needs besides compilers and make; not in the image.",
            "pattern": r"^[a-z0-9][a-z0-9+.-]+$",
            "example": ["libhwloc-dev"],
        },
    )
    workdir: str = field(
        default="/workspace",
        metadata={"doc": "The folder in which a container starts.", "pattern": r"^/\S*$", "example": "/workspace"},
    )
    env: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "doc": "Environment variables of the image, over those of its base. Never secrets.",
            "key_check": variable_problem,
        },
    )


def image_mistakes(document: Document) -> Iterator[Problem]:
    """Yield keys of [image] that its base does not support, and a missing interpreter of an existing base."""
    image = document.data.get("image", {})
    if not isinstance(image, dict):
        return
    base = image.get("base", "debian")
    if base == "debian":
        if image.get("python"):
            yield (("image", "python"), "'python' in [image]: only with an existing image as its base")
        if image.get("build_base"):
            yield (("image", "build_base"), "'build_base' in [image]: only with an existing image as its base")
        return
    for key in ("suite", "packages", "build_packages"):
        if key in image:
            yield ("image", key), f'{key!r} in [image]: only with base = "debian"'
    if not image.get("python") and document.data.get("environment") != "conda":
        yield (("image",), "'python' in [image] is missing: where is the interpreter in the base image?")
