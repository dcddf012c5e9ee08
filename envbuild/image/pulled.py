"""An image for one platform whose blobs exist locally, regardless of its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envbuild.errors import BuildError
from envbuild.image.blobs import Blobs
from envbuild.image.model import GOARCH, ImageManifest


@dataclass(frozen=True, slots=True)
class Pulled:
    """An image that was read: `config` is its configuration, and `blobs` contains every blob that it refers to."""

    manifest: ImageManifest
    config: dict[str, Any]
    blobs: Blobs


def check_image(manifest: ImageManifest, config: dict[str, Any], arch: str | None, where: str) -> None:
    """Raise BuildError when the image does not match `arch` or itself.

    `arch` is x86_64 or aarch64, None for any. The configuration must list as many layers as the manifest.
    """
    check_architecture(config, arch, where)
    layers, ids = len(manifest.layers), len(config["rootfs"]["diff_ids"])
    if layers != ids:
        raise BuildError(f"{where}: the manifest lists {layers} layers, the configuration {ids}")


def check_architecture(config: dict[str, Any], arch: str | None, where: str) -> None:
    """Raise BuildError when an image is for another architecture than `arch` (None: any)."""
    has = config.get("architecture") or ""
    if arch is not None and has and has != GOARCH[arch]:
        raise BuildError(
            f"{where}: the image is for {has}, not for {GOARCH[arch]}",
            "choose an image for this architecture, or leave the target out",
        )
