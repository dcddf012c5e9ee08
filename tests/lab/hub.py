"""An image of the same shape as PyTorch's on Docker Hub: Python and torch under /opt/conda, gzip layers with Docker's
media types, /workspace, bash. Made of Debian's Python, moved, and of wheels, since no registry can be reached here.
It has no bytecode, which would take as long as all else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envbuild.base.packages import digest_of
from envbuild.base.progress import log
from envbuild.build.image import prepare_image
from envbuild.debian.lock import DebianLock
from envbuild.image.entry import DIR, SYMLINK, Entry, Readable, Tree
from envbuild.image.layer import Layer, with_parents, write_layer
from envbuild.image.layout import Blobs
from envbuild.image.model import (
    DOCKER_CONFIG,
    DOCKER_LAYER_GZIP,
    DOCKER_MANIFEST,
    Descriptor,
    ImageManifest,
    canonical,
    parse,
)
from envbuild.layers.base import locked_files
from envbuild.layers.wheel import Scheme, load_trainer, wheel_tree
from envbuild.layers.wheels import locate
from envbuild.recipe.load import load_recipe
from envbuild.run_environment import load_environment

PYTHON = "opt/conda/bin/python3.11"
_TIME = 1600000000
_RECIPES = Path(__file__).resolve().parents[2] / "recipes"


class _Scheme(Scheme):
    """Debian's Python looks for packages in dist-packages, wherever it lies."""

    @property
    def site_packages(self) -> str:
        return "opt/conda/lib/python3.11/dist-packages"


def hub_image(blobs: Blobs, variables: dict[str, str]) -> tuple[ImageManifest, list[Descriptor]]:
    """The image's manifest, and the blobs to push with it. `variables` name the store to take packages from."""
    environment = load_environment(variables)
    loaded = load_recipe(_RECIPES / "pt_minimal" / "recipe.toml")
    target = loaded.target("cpu-x86_64")[0]
    prepared = prepare_image(loaded, target, environment, locked=True, offline=False, bytecode=False, log=log)
    assert prepared.plan.base is not None and isinstance(prepared.plan.base.base, DebianLock)
    base = locked_files(prepared.plan.base.base, prepared.plan.mtime, environment, offline=False)
    wheels, _ = locate(prepared.plan, load_trainer(), environment, False)
    layers = [write_layer(with_parents(_on_progress(base), _TIME), blobs)]
    files: Tree = _chain(wheel_tree(w.path, _Scheme("opt/conda", "3.11"), _TIME) for w in wheels)
    layers.append(write_layer(with_parents(files, _TIME), blobs))
    config = canonical(_config(layers))
    blobs.add(config)
    described = [dataclasses.replace(layer.blob, media_type=DOCKER_LAYER_GZIP) for layer in layers]
    head = Descriptor(DOCKER_CONFIG, digest_of(config), len(config))
    raw = canonical(
        {
            "schemaVersion": 2,
            "mediaType": DOCKER_MANIFEST,
            "config": head.as_json(),
            "layers": [layer.as_json() for layer in described],
        }
    )
    manifest = parse(raw, "the lab's image")
    assert isinstance(manifest, ImageManifest)
    return manifest, [head, *described]


def _config(layers: list[Layer]) -> dict[str, Any]:
    return {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": ["PATH=/opt/conda/bin:/usr/local/bin:/usr/bin:/bin", "PYTORCH_VERSION=lab"],
            "Cmd": ["/bin/bash"],
            "WorkingDir": "/workspace",
            "Labels": {"com.example.lab": "hub"},
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }


def _on_progress(tree: Tree) -> Iterator[tuple[Entry, Readable | None]]:
    """Debian's base with its Python under /opt/conda."""
    for entry, content in tree:
        path = entry.path
        if path.startswith("usr/lib/python3.11"):
            path = "opt/conda/" + path.removeprefix("usr/")
        elif path == "usr/bin/python3.11":
            path = PYTHON
        elif path.startswith("usr/bin/python3"):
            continue
        yield dataclasses.replace(entry, path=path), content
    for name in ("python", "python3"):
        yield Entry(f"opt/conda/bin/{name}", SYMLINK, 0o777, 0, "python3.11", mtime=_TIME), None
    yield Entry("workspace", DIR, 0o755, mtime=_TIME), None


def _chain(trees: Iterator[Tree]) -> Iterator[tuple[Entry, Readable | None]]:
    for tree in trees:
        yield from tree
