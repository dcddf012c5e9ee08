"""What refuses source-built layers: what no image can have, what no environment is there for, what this host cannot
build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.environment import Environment
from envbuild.errors import HostError, UsageError
from envbuild.lock.image import ImageLock
from envbuild.recipe.sources import HostLayer, SourceLayer
from envbuild.recipe.targets import Target, host_arch

# `SourceLayer.environment` on a host without a compiler.
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RequestedLayers:
    """What a recipe's [layers] ask of one target. `builder` is the lock of the image in which `sources` are built,
    None where this host builds them."""

    sources: tuple[SourceLayer, ...] = ()
    hosts: tuple[HostLayer, ...] = ()
    builder: ImageLock | None = None


def check_here(layers: RequestedLayers, environment: Environment) -> None:
    """Raise HostError for `layers` that this host cannot build and the store does not have."""
    if not layers.sources:
        return
    arch = Target.parse(layers.sources[0].target).arch
    if arch != host_arch():
        if not _all_stored(layers, environment):
            raise other_host(layers.sources, arch)
    elif layers.builder is None:
        from envbuild.layers.host_workshop import host_identity

        for one in layers.sources:
            if one.environment.startswith(UNKNOWN):
                host_identity(one, environment.variables)


def _all_stored(layers: RequestedLayers, environment: Environment) -> bool:
    from envbuild.layers.source_build import stored_layer

    hosts = {one.name: one.path for one in layers.hosts}
    done: dict[str, Path] = {}
    for source in layers.sources:
        tree = stored_layer(source, done, environment, hosts)
        if tree is None:
            return False
        done[source.name] = tree
    return True


def check_for_image(layers: RequestedLayers) -> None:
    """Raise UsageError for a layer that no image can have."""
    hosts = {one.name: one for one in layers.hosts}
    for one in layers.sources:
        outside = next((hosts[name] for name in one.requires if name in hosts), None)
        if outside:
            raise UsageError(
                f"layer {one.name} is built with {outside.name}, which only the nodes have ({outside.path}): "
                "images are built without it",
                f"let {outside.name} be built too (without `kind` and `path` in [layers.{outside.name}]) in a version "
                "that the nodes' can take the place of when the image is started; or build a venv on a node",
            )
        if one.system == "wheel":
            raise UsageError(
                f"layer {one.name} is a Python package that is compiled against the environment's torch: "
                "envbuild does not build such layers for images yet",
                "build a venv (envbuild venv) or a conda environment with it on shared storage, or leave it out of "
                f"this target (`targets = [...]` in [layers.{one.name}])",
            )


def check_python(layers: RequestedLayers, python: Path | None) -> None:
    """Raise UsageError for a Python project where there is no environment to compile it against."""
    for one in layers.sources:
        if one.system == "wheel" and python is None:
            raise UsageError(
                f"layer {one.name} is a Python package that is compiled against the environment's torch: "
                "it is built with an environment, not alone",
                "envbuild venv RECIPE, or envbuild conda RECIPE",
            )


def other_host(sources: Sequence[SourceLayer], arch: str) -> HostError:
    """The error for `sources` of another architecture that the store does not have."""
    names = ", ".join(one.name for one in sources)
    return HostError(
        f"the store has not all of {names} for {arch}, and this {host_arch()} host cannot build them",
        f"run `envbuild layers RECIPE --target {sources[0].target} --for image` on an {arch} node with the same store "
        "(ENVBUILD_STORE), then build here",
    )
