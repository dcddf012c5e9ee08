"""Source layers that were built, and their installation into an environment in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.base.errors import BuildError
from envbuild.base.text import normalise
from envbuild.contract.layer_lists import LayerList, list_files, parse_list
from envbuild.contract.state import LAYER_LISTS, BuiltLayer, list_path
from envbuild.layers.source_files import read_manifest, sha256_of
from envbuild.recipe.sources import SourceLayer

if TYPE_CHECKING:
    pass

# ioctl_ficlone(2) makes two files share their blocks; file systems that cannot do it fail.
_FICLONE = 0x40049409
_RECORD = re.compile(r"lib/python[^/]+/site-packages/([^/-]+)-([^/]+)\.dist-info/RECORD")


@dataclass(frozen=True, slots=True)
class LayerFolder:
    """A source layer that was built; `listed` lists the files in `folder` that go below an environment's root."""

    source: SourceLayer
    folder: Path
    listed: LayerList

    @property
    def title(self) -> str:
        return f"{self.source.name} {self.source.version}"

    @property
    def built(self) -> BuiltLayer:
        """The layer as the environment's state records it."""
        one = self.source
        return BuiltLayer(one.name, one.version, self.listed.digest, check=one.check)

    @property
    def distributions(self) -> set[tuple[str, str]]:
        """(normalized name, version) of the Python distributions in it, if it was built as a wheel."""
        found = (_RECORD.fullmatch(one.path) for one in self.listed.files)
        return {(normalise(match[1]), match[2]) for match in found if match}


def layer_folder(source: SourceLayer, folder: Path, digest: Callable[[Path], str] = sha256_of) -> LayerFolder:
    """Return the layer that was built into `folder`; `digest` returns the sha256 of a file.

    Raises BuildError for one that cannot be installed.
    """
    manifest = read_manifest(folder, digest)
    known = {path: what for path, what, _ in manifest.files} if manifest else {}
    try:
        files = list_files(folder, known)
    except (OSError, ValueError) as error:
        raise BuildError(f"layer {source.name}: {folder}: {error}") from error
    if not files:
        raise BuildError(
            f"layer {source.name} {source.version}: its build installed nothing",
            "look into its log; `make install` has to heed DESTDIR",
        )
    return LayerFolder(source, folder, LayerList(source.name, source.version, source.sha256, files))


def install_layers(layers: Sequence[LayerFolder], root: Path) -> tuple[BuiltLayer, ...]:
    """Copy the layers below `root`, a new environment. Raises BuildError for a path that already exists, OSError."""
    for layer in layers:
        for one in layer.listed.files:
            place = root / one.path
            if os.path.lexists(place):
                raise _clash(layer, one.path, next(_owners(root, one.path), "the environment"))
            place.parent.mkdir(parents=True, exist_ok=True)
            if one.target:
                place.symlink_to(one.target)
            else:
                _copy(layer.folder / one.path, place)
                place.chmod(one.mode)
        layer.listed.write(root)
    return tuple(layer.built for layer in layers)


def check_free(layers: Sequence[LayerFolder], owners: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Raise BuildError when two layers, or a layer and an owner (its name, its paths), have the same path."""
    taken: dict[str, LayerFolder] = {}
    for layer in layers:
        for path in [*(one.path for one in layer.listed.files), list_path(layer.source.name)]:
            if path in taken:
                raise _clash(layer, path, f"layer {taken[path].title}")
            taken[path] = layer
    for owner, paths in owners:
        for path in paths:
            if path in taken:
                raise _clash(taken[path], path, owner)


def _copy(source: Path, place: Path) -> None:
    # Not hard-linked: a write in the environment must not change the store.
    with source.open("rb") as one, place.open("xb") as other:
        try:
            fcntl.ioctl(other.fileno(), _FICLONE, one.fileno())
        except OSError:
            shutil.copyfileobj(one, other, 4 << 20)


def _clash(layer: LayerFolder, path: str, other: str) -> BuildError:
    return BuildError(
        f"layer {layer.title} and {other} both have {path}",
        f"leave one out: the layer ([layers.{layer.source.name}] in the recipe), or the other package with the file",
    )


def _owners(root: Path, path: str) -> Iterator[str]:
    """Yield the owners of `path` in the environment at `root`, for a message."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for file in sorted((root / LAYER_LISTS).glob("*.json")):
            known = parse_list(file.read_bytes())
            if any(one.path == path for one in known.files):
                yield f"layer {known.name} {known.version}"
        for file in sorted((root / "conda-meta").glob("*.json")):
            record: Mapping[str, object] = json.loads(file.read_bytes())
            if path in record.get("files", ()):  # type: ignore[operator]
                yield f"conda package {record['name']} {record['version']}"
        for file in sorted(root.glob("lib/python*/site-packages/*.dist-info/RECORD")):
            packages = file.parents[1]
            for line in file.read_text(encoding="utf-8").splitlines():
                if os.path.normpath(packages / line.partition(",")[0]) == os.path.normpath(root / path):
                    yield file.parent.name.removesuffix(".dist-info").replace("-", " ", 1)
