"""An image for one platform whose blobs are at hand, wherever it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envbuild.errors import BuildError
from envbuild.image.blobs import Blobs
from envbuild.image.model import GOARCH, ImageManifest


@dataclass(frozen=True, slots=True)
class Pulled:
    """An image that was read: `config` is its configuration, `blobs` hold every blob it names."""

    manifest: ImageManifest
    config: dict[str, Any]
    blobs: Blobs


def check_image(
    manifest: ImageManifest, config: dict[str, Any], arch: str | None, where: str
) -> None:
    """Raise BuildError when the image is for another architecture than `arch` (x86_64, aarch64; None:
    any), or when its configuration counts other layers than its manifest."""
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
