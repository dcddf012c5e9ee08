"""Source layers for `docker build`: the files that their stage reads, and the layers in the finished image."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from envbuild.artifacts.layer_files import parse_list
from envbuild.artifacts.state import BuiltLayer
from envbuild.environment import Environment
from envbuild.errors import BuildError
from envbuild.plan.plan import Plan
from envbuild.recipe.sources import SourceLayer
from envbuild.recipe.targets import Target, host_arch

DESCRIPTION = "layers.json"


def stage_files(plan: Plan, environment: Environment, *, offline: bool) -> dict[str, Path | bytes]:
    """Return the files from which a stage builds the source layers of `plan`, by name.

    They are archives, patches, CUDA's headers as wheels, and a description of the layers. Raises BuildError for
    a file that no source has.
    """
    if not plan.sources:
        return {}
    from envbuild.layers.source_build import fetch_source
    from envbuild.layers.source_files import patchelf_program
    from envbuild.layers.source_standalone import describe
    from envbuild.layers.wheels import fetch_wheels

    files: dict[str, Path | bytes] = {}
    for layer in plan.sources:
        files[f"{layer.sha256}.source"] = fetch_source(layer, environment, offline=offline)
        for wheel in fetch_wheels(layer.wheels, environment, offline=offline):
            files[wheel.name] = wheel
        files |= {f"{patch.sha256}.patch": Path(patch.path) for patch in layer.patches}
    if Target.parse(plan.target).arch == host_arch():  # patchelf is one static program
        files["patchelf"] = Path(patchelf_program())
    layers = [_without_paths(layer) for layer in plan.sources]
    files[DESCRIPTION] = describe(layers).encode()
    return files


def _without_paths(layer: SourceLayer) -> SourceLayer:
    """Return `layer` without data that only this host has: a stage finds its files by hash."""
    patches = tuple(replace(one, path=os.path.basename(one.path)) for one in layer.patches)
    return replace(layer, patches=patches, url="")  # the URL may hold a password


def built_layers(plan: Plan, lists: Mapping[str, bytes]) -> tuple[BuiltLayer, ...]:
    """Return the source layers of `plan` in an image, from the `lists` of their files there (name → text).

    Raises BuildError when a list is missing or damaged.
    """
    found = []
    for layer in plan.sources:
        try:
            listed = parse_list(lists[layer.name])
        except (KeyError, ValueError, TypeError) as error:
            raise BuildError(
                f"the image has no layer {layer.name} {layer.version}, or its list of files is damaged",
                "a base image that has files in /opt/env cannot be built on: choose another",
            ) from error
        found.append(BuiltLayer(layer.name, layer.version, listed.digest, check=layer.check))
    return tuple(found)
