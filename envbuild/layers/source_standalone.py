"""Build of source layers without a store, in a Dockerfile.

Usage: `python -m envbuild.layers.source_standalone DESCRIPTION ARCHIVES PREFIX`. DESCRIPTION is a JSON file from
`describe`: layers in order. ARCHIVES is a folder with their source archives, patches, and the wheels with CUDA's
headers, which are found by sha256. All layers are installed into PREFIX.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath

from envbuild.errors import BuildError, EnvbuildError
from envbuild.layers.local_build_host import local_build_host
from envbuild.layers.relocate import host_libraries, relocate
from envbuild.layers.source_causes import failure
from envbuild.layers.source_job import SourceBuild, StepError
from envbuild.layers.source_steps import make_layer
from envbuild.layers.source_unpack import unpack_cuda
from envbuild.recipe.sources import BuildWheel, Patch, SourceLayer

_FORMAT = 1


def describe(layers: Sequence[SourceLayer], hosts: Mapping[str, str] = {}) -> str:
    """Return the text of a description of `layers`, and of the nodes' folders for host layers."""
    content = {"format": _FORMAT, "layers": [asdict(layer) for layer in layers], "hosts": dict(hosts)}
    return json.dumps(content, indent=1) + "\n"


def read_description(text: str) -> tuple[list[SourceLayer], dict[str, str]]:
    """Parse the output of `describe`. Raises BuildError for any other text."""
    try:
        data = json.loads(text)
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}")
        return [_layer(row) for row in data["layers"]], {str(k): str(v) for k, v in data["hosts"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"this is no description of layers: {error}") from error


def _layer(row: dict[str, object]) -> SourceLayer:
    made = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    made["patches"] = tuple(Patch(**one) for one in made["patches"])  # type: ignore[attr-defined]
    made["wheels"] = tuple(
        BuildWheel(one["name"], one["version"], tuple(one["hashes"]))
        for one in made["wheels"]  # type: ignore[attr-defined]
    )
    return SourceLayer(**made)  # type: ignore[arg-type]


def main(arguments: Sequence[str]) -> int:
    """Build the layers of a description, and return the exit status."""
    if len(arguments) != 3:
        print("usage: python -m envbuild.layers.source_standalone DESCRIPTION ARCHIVES PREFIX", file=sys.stderr)
        return 2
    description, archives, prefix = map(Path, arguments)
    try:
        layers, hosts = read_description(description.read_text(encoding="utf-8"))
        built: dict[str, Path] = {}
        with tempfile.TemporaryDirectory(prefix="envbuild-") as temporary:
            for layer in layers:
                built[layer.name] = build_one(layer, built, hosts, archives, Path(temporary) / layer.name)
            for tree in built.values():
                shutil.copytree(tree, prefix, symlinks=True, dirs_exist_ok=True)
    except EnvbuildError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return BuildError.exit_code
    return 0


def build_one(
    layer: SourceLayer, built: Mapping[str, Path], hosts: Mapping[str, str], archives: Path, work: Path
) -> Path:
    """Build `layer` in the new folder `work`, and return the folder with its files for the environment's root.

    `built` are the folders of earlier layers, `hosts` the nodes' folders for host layers, each by name.
    """
    work.mkdir()
    places: dict[str, PurePath] = {}
    for name in layer.requires:
        if name in hosts:
            places[name] = PurePath(hosts[name])
        elif name in built:
            places[name] = built[name]
        else:
            raise BuildError(f"{layer.name} {layer.version} requires {name}, which comes later or not at all")
    if layer.wheels:
        wheels = [_by_hash(archives, one.hashes, f"{one.name} {one.version}") for one in layer.wheels]
        unpack_cuda(wheels, work / "cuda")
        places["cuda"] = work / "cuda"
    with local_build_host(work, os.environ) as build_host:
        job = SourceBuild(
            layer,
            _by_hash(archives, [layer.sha256], f"{layer.name} {layer.version}"),
            build_host,
            places,
            [_by_hash(archives, [one.sha256], one.path) for one in layer.patches],
            len(os.sched_getaffinity(0)),
            lambda line: print(line, file=sys.stderr, flush=True),
        )
        try:
            tree = make_layer(job)
        except StepError as error:
            raise failure(f"{layer.name} {layer.version}", error, None) from None
    own = {name: path for name, path in places.items() if name not in hosts}
    found = host_libraries(hosts[name] for name in layer.requires if name in hosts)
    relocate(tree, layer.target.rpartition("-")[2], [str(work)], own, found)
    return tree


def _by_hash(folder: Path, hashes: Sequence[str], what: str) -> Path:
    """Return the file in `folder` with one of these sha256 digests.

    A file named by its digest is tried first.
    """
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    for path in sorted(files, key=lambda path: path.name.partition(".")[0] not in hashes):
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() in hashes:
                return path
    raise BuildError(f"{what}: no file in {folder} has sha256 {' or '.join(hashes)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
