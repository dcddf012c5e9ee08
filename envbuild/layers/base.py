"""Base of an image: Debian packages as one layer, or the layers of an existing image."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Generic

from envbuild.base.atomic import write_atomically
from envbuild.base.errors import BuildError
from envbuild.base.files import parse_json
from envbuild.contract.state import PREFIX
from envbuild.debian.lock import DebianLock, rules_digest
from envbuild.environment import Environment
from envbuild.image.entry import Tree
from envbuild.image.layer import Layer, open_layer
from envbuild.image.layout import Pulled
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.model import COMPRESSION, OCI_LAYER, OCI_LAYER_GZIP, OCI_LAYER_ZSTD, Descriptor
from envbuild.image.tar import PositionedStream, members
from envbuild.image.tree import MergedTree
from envbuild.layers.bytecode import Compiler, with_bytecode
from envbuild.layers.layer_cache import LayerCache, LayerRequest, M
from envbuild.lock.base import fetch_locked, pull
from envbuild.lock.image import OciLock
from envbuild.plan import Plan
from envbuild.recipe.targets import Target
from envbuild.store.entry import key_of

# The OCI media type for a compression; a Docker layer of the same compression has the same bytes.
_OCI_TYPES = {"none": OCI_LAYER, "gzip": OCI_LAYER_GZIP, "zstd": OCI_LAYER_ZSTD}


@dataclass(frozen=True)
class BaseImage(Generic[M]):
    """The lowest layers of an image and their properties.

    `interpreter` is its absolute path in the image, `python_version` its version, maybe without the patch release; with
    conda packages, both describe conda's Python. `config` is the `config` object of an existing image's configuration.
    `system_packages` tells whether the environment sees the packages that the base has installed for its interpreter.
    """

    name: str
    digest: str
    layers: tuple[M, ...]
    interpreter: str
    python_version: str
    config: dict[str, Any] = field(default_factory=dict)
    system_packages: bool = False


def base_image(
    plan: Plan, compiler: Compiler | None, environment: Environment, cache: LayerCache[M], *, offline: bool
) -> BaseImage[M]:
    """Return the base of `plan`, with its layers in the store. Raises BuildError when a part is not available."""
    assert plan.base is not None
    if isinstance(plan.base.base, OciLock):
        return _existing(plan, plan.base.base, environment, cache)
    return _debian(plan, plan.base.base, compiler, environment, cache, offline)


def _debian(
    plan: Plan,
    lock: DebianLock,
    compiler: Compiler | None,
    environment: Environment,
    cache: LayerCache[M],
    offline: bool,
) -> BaseImage[M]:
    interpreter = f"python{plan.python}"
    if plan.conda:
        compiler = None  # the base does not depend on the compiler of the environment's bytecode
        path, version = _conda_python(plan)
    else:
        versions = {deb.name: deb.version for deb in lock.packages}
        match = re.match(r"\d+(\.\d+)+", versions.get(f"{interpreter}-minimal", ""))
        if match is None:
            raise BuildError(f"the image lock has no {interpreter}-minimal", "lock the recipe again")
        path, version = f"/usr/bin/{interpreter}", match[0]
    key: list[object] = [plan.mtime, compiler and compiler.identity, rules_digest()]
    key += [[deb.name, deb.version, deb.arch, deb.sha256] for deb in lock.packages]

    def tree() -> Tree:
        files = locked_files(lock, plan.mtime, environment, offline=offline)
        return with_bytecode(files, compiler, [f"usr/lib/{interpreter}"], plan.mtime)

    title = f"Debian {lock.suite}, {len(lock.packages)} packages"
    made = cache.part(LayerRequest(title, key_of("debian", key), tree))
    return BaseImage(f"debian:{lock.suite}", "", (made,), path, version)


def _conda_python(plan: Plan) -> tuple[str, str]:
    """Return (path in the image, version) of the Python among the conda packages of `plan`."""
    version = next((package.version for package in plan.conda if package.name == "python"), None)
    if version is None:
        raise BuildError("the conda lock has no python", "lock the recipe again")
    return f"/{PREFIX}/bin/python", version


def locked_files(lock: DebianLock, mtime: int, environment: Environment, *, offline: bool) -> Tree:
    """Return the tree of the packages in `lock`, downloaded if needed. Raises BuildError for an unavailable package."""
    from envbuild.debian.rootfs import debian_tree

    debs = fetch_locked(lock, environment, offline=offline)
    return debian_tree(list(zip(lock.packages, debs, strict=True)), mtime)


def _existing(plan: Plan, lock: OciLock, environment: Environment, cache: LayerCache[M]) -> BaseImage[M]:
    assert plan.image is not None
    pulled = pull(lock.reference, lock.digest, Target.parse(plan.target).arch, environment, plan.folder)
    if plan.conda:
        interpreter, version = _conda_python(plan)
    else:
        interpreter, version = plan.image.python, plan.python
        _check_interpreter(interpreter, pulled, lock, environment)
    layers, config = image_layers(pulled, lock.reference, cache), dict(pulled.config.get("config") or {})
    return BaseImage(lock.reference, lock.digest, layers, interpreter, version, config, system_packages=not plan.conda)


def image_layers(pulled: Pulled, name: str, cache: LayerCache[M]) -> tuple[M, ...]:
    """Return the layers of an existing image, lowest first. Raises BuildError for a layer of an unknown media type."""
    ids = pulled.config["rootfs"]["diff_ids"]
    layers = []
    for number, (blob, diff_id) in enumerate(zip(pulled.manifest.layers, ids, strict=True), 1):
        media_type = _OCI_TYPES.get(COMPRESSION.get(blob.media_type, ""))
        if media_type is None:
            raise BuildError(f"{name}: layer {number} is of unknown media type {blob.media_type!r}")
        layer = Layer(Descriptor(media_type, blob.digest, blob.size), diff_id, 0)
        layers.append(cache.blob(layer, f"{name}, layer {number} of {len(ids)}"))
    return tuple(layers)


def _merged(pulled: Pulled, limits: ImageLimits) -> MergedTree:
    """Return the merged layers of an image. Raises BuildError when they cannot be merged, or exceed `limits`."""
    tree, quota = MergedTree(Quota(limits)), Quota(limits)
    for blob in pulled.manifest.layers:
        with open_layer(pulled.blobs.path(blob.digest), blob.digest) as stream:
            source = PositionedStream(stream, blob.digest)
            tree.add(blob.digest, members(source, quota))
            source.finish()
    return tree


def _check_interpreter(python: str, pulled: Pulled, lock: OciLock, environment: Environment) -> None:
    """Raise BuildError when the base does not have the interpreter `python`."""
    # Reading a large base's tree takes a while, so a positive result is stored.
    note = environment.store.folder("bases") / f"{lock.digest.partition(':')[2]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        if python in parse_json(note.read_bytes()):
            return
    tree = _merged(pulled, environment.site.limits)
    if not tree.is_file(python):
        near = sorted(f"/{name}" for name, _ in tree.walk() if re.search(r"(^|/)bin/python3\.\d+$", name))
        raise BuildError(
            f"{lock.reference} has no {python}",
            f"set `python` in [image] to {' or '.join(near) if near else 'an interpreter that it has'}",
        )
    write_atomically(note, json.dumps([python]))
