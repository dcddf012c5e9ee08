"""Build of source layers without a store, in a stage of a Dockerfile, from a description of the layers in order.

Their source archives, patches, and the wheels with CUDA's headers are in one folder, in which they are found by sha256.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from envbuild.base.errors import BuildError
from envbuild.base.files import parse_json
from envbuild.layers.local_build_host import local_build_host
from envbuild.layers.source_causes import failure
from envbuild.layers.source_job import SourceBuild, StepError
from envbuild.layers.source_steps import make_layer, unpack_cuda
from envbuild.recipe.sources import LockedPackage, Patch, SourceLayer

_FORMAT = 1


def describe(layers: Sequence[SourceLayer], hosts: Mapping[str, str] = {}) -> str:
    """Return the text of a description of `layers`, and of the nodes' folders for host layers."""
    content = {"format": _FORMAT, "layers": [asdict(layer) for layer in layers], "hosts": dict(hosts)}
    return json.dumps(content, indent=1) + "\n"


def read_description(text: str) -> tuple[list[SourceLayer], dict[str, str]]:
    """Parse the output of `describe`. Raises BuildError for any other text."""
    try:
        data = parse_json(text)
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}")
        return [_layer(row) for row in data["layers"]], {str(k): str(v) for k, v in data["hosts"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"this is no description of layers: {error}") from error


def _layer(row: dict[str, object]) -> SourceLayer:
    made = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    made["patches"] = tuple(Patch(**one) for one in made["patches"])  # type: ignore[attr-defined]
    made["wheels"] = tuple(
        LockedPackage(one["name"], one["version"], tuple(one["hashes"]))
        for one in made["wheels"]  # type: ignore[attr-defined]
    )
    return SourceLayer(**made)  # type: ignore[arg-type]


def build_one(
    layer: SourceLayer, built: Mapping[str, Path], hosts: Mapping[str, str], archives: Path, work: Path
) -> Path:
    """Build `layer` in the new folder `work`, and return the folder with its files for the environment's root.

    `built` are the folders of earlier layers, `hosts` the nodes' folders for host layers, each by name.
    """
    work.mkdir()
    title = f"{layer.name} {layer.version}"
    if missing := [name for name in layer.requires if name not in hosts and name not in built]:
        raise BuildError(f"{title} requires {missing[0]}, which comes later or not at all")
    places = {name: built[name] for name in layer.requires if name not in hosts}
    if layer.wheels:
        wheels = [_by_hash(archives, one.hashes, f"{one.name} {one.version}") for one in layer.wheels]
        unpack_cuda(wheels, work / "cuda")
        places["cuda"] = work / "cuda"
    with local_build_host(work, os.environ) as build_host:
        outside = {name: hosts[name] for name in layer.requires if name in hosts}
        patches = [_by_hash(archives, [one.sha256], one.path) for one in layer.patches]
        job = SourceBuild(
            layer,
            _by_hash(archives, [layer.sha256], title),
            build_host,
            places,
            outside,
            patches,
            jobs=len(os.sched_getaffinity(0)),
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
        try:
            make_layer(job)
        except StepError as error:
            raise failure(title, error, None) from None
    return job.staged


def _by_hash(folder: Path, hashes: Sequence[str], what: str) -> Path:
    """Return the file in `folder` with one of these sha256 digests; a file named by its digest is tried first."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    for path in sorted(files, key=lambda path: path.name.partition(".")[0] not in hashes):
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() in hashes:
                return path
    raise BuildError(f"{what}: no file in {folder} has sha256 {' or '.join(hashes)}")
