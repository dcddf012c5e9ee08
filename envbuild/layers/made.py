"""Layers that were made, kept in the store by their inputs, so that each is made once.

An image's layers come in one of two forms: compressed tars for daemons and registries (here), or segments
of a squashfs (`layers/segments.py`). What decides their content is the same, so the rest of the house is
written for a `Maker` of either.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from envbuild.file_lock import file_lock
from envbuild.files import write_atomically
from envbuild.image.entry import Tree, closing
from envbuild.image.layer import Layer, write_layer
from envbuild.image.model import COMPRESSION, Descriptor, is_digest
from envbuild.layers.compose import PREFIX, LayerRequest
from envbuild.names import normalise
from envbuild.record import conda_digest, record_digest
from envbuild.store.store import Store

# Name, version and digest of the RECORD of each distribution that a layer installs.
Distributions = tuple[tuple[str, str, str], ...]
# In a site-packages folder itself, not in one that a package carries inside.
_CONDA = re.compile(re.escape(f"{PREFIX}/conda-meta/") + r"[^/]+\.json")
_RECORD = re.compile(r"(?:(?!site-packages/)[^/]+/)+site-packages/([^/]+)\.dist-info/RECORD")


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """A layer in the store as a compressed tar, its title and what it installs."""

    layer: Layer
    title: str
    distributions: Distributions = ()


class Installs(Protocol):
    """A layer in any form."""

    @property
    def distributions(self) -> Distributions: ...


M_co = TypeVar("M_co", bound=Installs, covariant=True)
M = TypeVar("M", bound=Installs)


class Maker(Protocol[M_co]):
    """Makes layers in one form, or takes them from the store; `say` tells what it does."""

    @property
    def say(self) -> Callable[[str], None]: ...

    def part(self, part: LayerRequest) -> M_co:
        """The layer of `part`. Raises BuildError when it cannot be made."""
        ...

    def blob(self, layer: Layer, title: str) -> M_co:
        """The layer of an existing image, whose blob is in the store."""
        ...


@dataclass(frozen=True, slots=True)
class Tars:
    """The maker of compressed tars."""

    store: Store
    say: Callable[[str], None]

    def part(self, part: LayerRequest) -> CachedLayer:
        """See `Maker`."""
        made = known_part(part, self.store)
        if made is not None:
            return made
        note = _note(part, self.store)
        try:
            with file_lock(note.with_suffix(".lock"), remove=True):
                made = known_part(part, self.store)  # another process may just have made it
                if made is not None:
                    return made
                self.say(f"  layer: {short(part.title)}")
                found: list[tuple[str, str, str]] = []
                layer = write_layer(recorded(part.tree(), found), self.store.blobs)
                made = CachedLayer(layer, part.title, tuple(sorted(found)))
                write_atomically(note, _render(made))
        except OSError as error:
            raise self.store.unwritable(error) from error
        return made

    def blob(self, layer: Layer, title: str) -> CachedLayer:
        """See `Maker`."""
        return CachedLayer(layer, title)


def short(title: str) -> str:
    """A layer's title for one line."""
    return title if len(title) < 90 else title[:88] + " …"


def recorded(tree: Tree, found: list[tuple[str, str, str]]) -> Tree:
    """`tree` as it is; each distribution whose RECORD passes by goes to `found`, or in a layer of conda packages
    each of these: their records tell of all that they hold, Python distributions as well."""
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
    """A conda package as the survey of an environment finds it by its record."""
    rows = [
        # What is made of an entry point is not in the package.
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
    """The tar of `part` if the store has it whole: what is noted of it is only a cache."""
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
    """Distributions as a note holds them. Raises ValueError or TypeError."""
    return tuple((str(name), str(version), str(record)) for name, version, record in rows)


def _note(part: LayerRequest, store: Store) -> Path:
    return store.folder("layers") / f"{part.key}.json"
