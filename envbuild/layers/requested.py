"""Layers that a recipe requests in [layers], bound to a lock and a build host."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from envbuild.base.errors import HostError, UsageError
from envbuild.environment import Environment
from envbuild.lock.conda import CondaLock
from envbuild.lock.format import Lock
from envbuild.lock.lifecycle import LockUse, ensure
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.sources import HostLayer, SourceLayer
from envbuild.recipe.targets import Target, host_arch

if TYPE_CHECKING:
    from envbuild.lock.image import ImageLock

# The value of `SourceLayer.environment` on a host without a compiler.
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RequestedLayers:
    """Requested layers of a recipe for one target; `builder` is the lock of the image that builds `sources`, if any.

    `expected` are packages that may be locked from source; `built` returns the layers of those in a lock, which
    `bind_to_lock` adds to `sources`. `identity` returns the value of a layer's `environment`.
    """

    sources: tuple[SourceLayer, ...] = ()
    hosts: tuple[HostLayer, ...] = ()
    builder: ImageLock | None = None
    expected: tuple[SourceLayer, ...] = ()
    built: Callable[[Lock | CondaLock], tuple[SourceLayer, ...]] = field(default=lambda _: (), compare=False)
    identity: Callable[[SourceLayer], str] = field(default=lambda _: "", compare=False)

    @property
    def every(self) -> tuple[SourceLayer, ...]:
        """Layers of [layers], and layers of packages that may be locked from source."""
        return self.sources + self.expected


def requested_layers(loaded: LoadedRecipe, target: Target) -> RequestedLayers:
    """Return the layers of `target`, not yet bound to a build host. Raises RecipeError or UsageError."""
    recipe = loaded.recipe
    # Most recipes build nothing and need neither module.
    layers = RequestedLayers()
    if recipe.build or any("@" in text for conda in (False, True) for text in loaded.requirements(target, conda)):
        from envbuild.layers.source_known import built_layers, expected_layers

        layers = RequestedLayers(expected=expected_layers(loaded, target), built=partial(built_layers, loaded, target))
    if not any(table.for_target(target.name) for table in recipe.layers.values()):
        return layers
    from envbuild.layers.source_known import source_layers

    sources, hosts = source_layers(loaded, target)
    return replace(layers, sources=sources, hosts=hosts)


def for_host(loaded: LoadedRecipe, target: Target, environment: Environment) -> RequestedLayers:
    """Return the layers of an environment, to be built on this host with its own compilers."""
    layers = requested_layers(loaded, target)
    if not layers.every:
        return layers
    from envbuild.layers.local_build_host import host_identity

    def identity(layer: SourceLayer) -> str:
        if target.arch != host_arch():
            return f"a host of {target.arch}"  # a plan can be made on any host
        try:
            return host_identity(layer, environment.variables)
        except HostError:  # no compiler: `check_here` reports it if it builds here
            return f"no compiler; {target.arch}" if layer.locked else UNKNOWN  # most packages need none

    return _of(layers, identity)


def _of(layers: RequestedLayers, identity: Callable[[SourceLayer], str]) -> RequestedLayers:
    sources = tuple(replace(layer, environment=identity(layer)) for layer in layers.sources)
    return replace(layers, sources=sources, identity=identity)


def bind_to_lock(layers: RequestedLayers, lock: Lock | CondaLock) -> RequestedLayers:
    """Add the source-built packages of `lock` to `layers`, and bind Python projects to its other packages."""
    built = (replace(layer, environment=layers.identity(layer)) for layer in layers.built(lock))
    layers = replace(layers, sources=(*layers.sources, *built), expected=())
    if not any(layer.system == "wheel" for layer in layers.sources):
        return layers
    wheels = lock.pip if isinstance(lock, CondaLock) else lock
    conda = lock.packages if isinstance(lock, CondaLock) else ()
    content = [
        wheels.python,
        [[package.name, package.version, package.hashes] for package in wheels.packages],
        [[package.name, package.version, package.sha256] for package in conda],
    ]
    packages = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def bound(source_layer: SourceLayer) -> SourceLayer:
        if source_layer.system != "wheel":
            return source_layer
        seen = f"python {wheels.python}" if source_layer.isolated else f"packages {packages[:16]}"
        return replace(source_layer, environment=f"{source_layer.environment}; {seen}")

    sources = map(bound, layers.sources)
    return replace(layers, sources=tuple(sources))


def before_environment(layers: RequestedLayers) -> RequestedLayers:
    """Return the layers that can be built without an environment: no Python projects, and none that require these."""
    late: set[str] = set()
    for layer in layers.sources:  # each layer comes after those it requires
        if layer.system == "wheel" or late.intersection(layer.requires):
            late.add(layer.name)
    return replace(
        layers, sources=tuple(source_layer for source_layer in layers.sources if source_layer.name not in late)
    )


def for_image(
    loaded: LoadedRecipe, target: Target, environment: Environment, **use: Unpack[LockUse]
) -> RequestedLayers:
    """Return the layers of an image, to be built in a builder image; its lock is written if missing or stale.

    Raises LockError when `locked` is set and the lock is missing or stale, UsageError for a layer that needs the nodes.
    """
    layers = requested_layers(loaded, target)
    if not layers.every:
        return layers
    from envbuild.lock.base import builder_lock

    check_for_image(layers)
    lock = ensure(builder_lock(loaded, target, layers.every), environment, **use)
    return replace(_of(layers, lambda _: lock.digest), builder=lock)


def check_here(layers: RequestedLayers, environment: Environment) -> None:
    """Raise HostError when `layers` cannot be built on this host and are not in the store."""
    hosts = {host_layer.name: host_layer.path for host_layer in layers.hosts}
    done: dict[str, Path] = {}
    for layer in layers.sources:
        arch = Target.parse(layer.target).arch
        if arch != host_arch():
            from envbuild.layers.source_build import stored_layer

            tree = stored_layer(layer, done, environment, hosts)
            if tree is None:
                raise other_host(layers.sources, arch)
            done[layer.name] = tree
        elif layers.builder is None:
            from envbuild.layers.local_build_host import check_path, host_identity

            check_path(environment.store.root)
            if layer.environment.startswith(UNKNOWN):
                host_identity(layer, environment.variables)


def check_for_image(layers: RequestedLayers) -> None:
    """Raise UsageError for a layer that is built against a host layer, because images do not contain host layers."""
    hosts = {host_layer.name: host_layer for host_layer in layers.hosts}
    for layer in layers.sources:
        outside = next((hosts[name] for name in layer.requires if name in hosts), None)
        if outside:
            raise UsageError(
                f"layer {layer.name} is built with {outside.name}, which only the nodes have ({outside.path}), "
                "and images do not",
                f"let {outside.name} be built too (without `kind` and `path` in [layers.{outside.name}]) in a version "
                "that the nodes' can take the place of when the image is started; or build a venv on a node",
            )


def other_host(sources: Sequence[SourceLayer], arch: str) -> HostError:
    """Return the error for `sources` of another architecture that are not in the store."""
    names = ", ".join(layer.name for layer in sources)
    return HostError(
        f"the store lacks some of {names} for {arch}, and this {host_arch()} host cannot build them",
        f"run `envbuild layers RECIPE --target {sources[0].target} --for image` on an {arch} node with the same store "
        "(ENVBUILD_STORE), then build here",
    )
