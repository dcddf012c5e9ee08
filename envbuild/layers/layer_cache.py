"""Cached layers in the store, identified by their inputs, so that each is written only once.

An image's layers have one of two forms: compressed tars for daemons and registries (this module), or segments of a
squashfs (`layers/segments.py`). The same inputs determine the content of both, so other modules use `LayerCache`, the
interface of both.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from envbuild.atomic import write_atomically
from envbuild.file_lock import file_lock
from envbuild.fingerprint import conda_digest, record_digest
from envbuild.image.entry import Tree, closing
from envbuild.image.layer import Layer, write_layer
from envbuild.image.model import COMPRESSION, Descriptor, is_digest
from envbuild.layers.compose import PREFIX, LayerRequest
from envbuild.names import normalise
from envbuild.store.store import Store

# Name, version and digest of the RECORD of each distribution that a layer installs.
Distributions = tuple[tuple[str, str, str], ...]
# Only in a site-packages folder itself, not in one that a package vendors.
_CONDA = re.compile(re.escape(f"{PREFIX}/conda-meta/") + r"[^/]+\.json")
_RECORD = re.compile(r"(?:(?!site-packages/)[^/]+/)+site-packages/([^/]+)\.dist-info/RECORD")


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """A layer in the store as a compressed tar, its title, and the distributions that it installs."""

    layer: Layer
    title: str
    distributions: Distributions = ()


class Installs(Protocol):
    """A cached layer in any form."""

    @property
    def distributions(self) -> Distributions: ...


M_co = TypeVar("M_co", bound=Installs, covariant=True)
M = TypeVar("M", bound=Installs)


class LayerCache(Protocol[M_co]):
    """A cache of layers in one form, which writes missing layers; `log` logs its actions."""

    @property
    def log(self) -> Callable[[str], None]: ...

    def part(self, part: LayerRequest) -> M_co:
        """Return the layer of `part`, from the store if it exists there.

        Raises BuildError when it cannot be written.
        """
        ...

    def blob(self, layer: Layer, title: str) -> M_co:
        """Return the layer of an existing image whose blob is in the store."""
        ...


@dataclass(frozen=True, slots=True)
class TarCache:
    """The `LayerCache` of compressed tars."""

    store: Store
    log: Callable[[str], None]

    def part(self, part: LayerRequest) -> CachedLayer:
        """See `LayerCache`."""
        made = known_part(part, self.store)
        if made is not None:
            return made
        note = _note(part, self.store)
        try:
            with file_lock(note.with_suffix(".lock"), remove=True):
                made = known_part(part, self.store)  # another process may have written it
                if made is not None:
                    return made
                self.log(f"  layer: {short(part.title)}")
                found: list[tuple[str, str, str]] = []
                layer = write_layer(recorded(part.tree(), found), self.store.blobs)
                made = CachedLayer(layer, part.title, tuple(sorted(found)))
                write_atomically(note, _render(made))
        except OSError as error:
            raise self.store.unwritable(error) from error
        return made

    def blob(self, layer: Layer, title: str) -> CachedLayer:
        """See `LayerCache`."""
        return CachedLayer(layer, title)


def short(title: str) -> str:
    """Return a layer's title, shortened to one line."""
    return title if len(title) < 90 else title[:88] + " …"


def recorded(tree: Tree, found: list[tuple[str, str, str]]) -> Tree:
    """Yield `tree` unchanged, and add its distributions to `found`.

    A distribution is a Python distribution with a RECORD. In a layer of conda packages, `found` has the conda packages
    instead: their records list all of their files, those of Python distributions included.
    """
    conda: list[tuple[str, str, str]] = []
    with closing(tree):
        for entry, content in tree:
            match = _RECORD.fullmatch(entry.path)
            if match and content is not None:
                data = content.read(entry.size)
                name, _, version = match[1].rpartition("-")
                found.append((normalise(name), version, record_digest(data)))
                content = io.BytesIO(data)
            elif content is not None and _CONDA.fullmatch(entry.path):
                data = content.read(entry.size)
                conda.append(_conda(json.loads(data)))
                content = io.BytesIO(data)
            yield entry, content
    if conda:
        found[:] = conda


def _conda(record: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return (name, version, digest) of a conda package from its record, as a survey reports them."""
    rows = [
        # Scripts of entry points are generated, so the package has no digest of them.
        (row["_path"], "" if row["path_type"].startswith("unix_") else row.get("sha256", ""))
        for row in record["paths_data"]["paths"]
        if not row["_path"].endswith(".pyc")
    ]
    return record["name"], record["version"], conda_digest(rows)


def _render(made: CachedLayer) -> str:
    layer = made.layer
    return json.dumps(
        {
            "media_type": layer.blob.media_type,
            "digest": layer.blob.digest,
            "size": layer.blob.size,
            "diff_id": layer.diff_id,
            "unpacked": layer.unpacked,
            "distributions": made.distributions,
        }
    )


def known_part(part: LayerRequest, store: Store) -> CachedLayer | None:
    """Return the tar of `part` from the store; None when its index is missing or invalid, or the blob is missing."""
    blobs = store.blobs
    try:
        data = json.loads(_note(part, store).read_text(encoding="utf-8"))
        digest, diff_id, size = str(data["digest"]), str(data["diff_id"]), data["size"]
        blob = Descriptor(str(data["media_type"]), digest, size)
        layer = Layer(blob, diff_id, int(data["unpacked"]))
        found = read_distributions(data["distributions"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if blob.media_type not in COMPRESSION or not is_digest(digest) or not is_digest(diff_id):
        return None
    return CachedLayer(layer, part.title, found) if blobs.has(blob) else None


def read_distributions(rows: Iterable[Sequence[object]]) -> Distributions:
    """Return the distributions in a layer's JSON index. Raises ValueError or TypeError when they are malformed."""
    return tuple((str(name), str(version), str(record)) for name, version, record in rows)


def _note(part: LayerRequest, store: Store) -> Path:
    return store.folder("layers") / f"{part.key}.json"
