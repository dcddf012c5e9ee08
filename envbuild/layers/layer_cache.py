"""Cached layers in the store, identified by their inputs, so that each is written only once.

An image's layers have one of two forms: compressed tars for daemons and registries, or segments of a squashfs. The same
inputs determine the content of both, so other modules use `LayerCache`, the interface of both.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from envbuild.base.atomic import file_lock
from envbuild.base.packages import conda_digest, is_digest, record_digest
from envbuild.base.progress import Log, detail, reuse, step
from envbuild.base.text import normalise
from envbuild.cache.hashed import read_note, write_note
from envbuild.contract.state import PREFIX
from envbuild.image.entry import FILE, Tree, closing
from envbuild.image.layer import Layer, checked_tar, decompressed, write_layer
from envbuild.image.layout import opened
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.model import COMPRESSION, Descriptor
from envbuild.image.squashfs.segment import Segment, of_entry
from envbuild.image.tar import Items, Member, packed, read_table, unpacked, write_table
from envbuild.layers.contents import HashedContent
from envbuild.store.entry import CacheEntry, shared
from envbuild.store.store import Store

# Only in a site-packages folder itself, not in one that a package vendors.
_CONDA = re.compile(re.escape(f"{PREFIX}/conda-meta/") + r"[^/]+\.json")
_RECORD = re.compile(r"(?:(?!site-packages/)[^/]+/)+site-packages/([^/]+)\.dist-info/RECORD")


def recorded(tree: Tree, rows: list[tuple[str, str, str]]) -> Tree:
    """Yield `tree` unchanged, and add its distributions to `rows`.

    A distribution is a Python distribution with a RECORD. In a layer of conda packages, `rows` has the conda packages
    instead: their records list all of their files, those of Python distributions included.
    """
    conda: list[tuple[str, str, str]] = []
    with closing(tree):
        for entry, content in tree:
            record, is_conda = _RECORD.fullmatch(entry.path), _CONDA.fullmatch(entry.path)
            if content is not None and (record or is_conda):
                data = content.read(entry.size)
                content = io.BytesIO(data)
                if record:
                    name, _, version = record[1].rpartition("-")
                    rows.append((normalise(name), version, record_digest(data)))
                else:
                    about = json.loads(data)
                    conda.append((about["name"], about["version"], conda_digest(about["paths_data"]["paths"])))
            yield entry, content
    if conda:
        rows[:] = conda


def hashed(tree: Tree, listed: list[Member]) -> Tree:
    """Yield `tree` unchanged, and add its entries to `listed`, with the sha256 of each file."""
    with closing(tree):
        for entry, content in tree:
            member = of_entry(entry)
            listed.append(member)
            if content is not None and not isinstance(content, HashedContent):
                content = HashedContent(content)
            yield entry, content
            if entry.kind == FILE:
                member.sha256 = (content or HashedContent(io.BytesIO())).digest().hex()


# Name, version and digest of the RECORD of each distribution that a layer installs.
Distributions = tuple[tuple[str, str, str], ...]
# Increase it when the tables of members change their form.
_MEMBERS_FORMAT = 1
# The log names this many new layers at most: conda images and large recipes have more than fit on a screen.
_LISTED = 16


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """A request for one layer: its title, a digest of all inputs that determine its bytes, and its content."""

    title: str
    key: str
    tree: Callable[[], Tree]


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """A layer in the store as a compressed tar, its title, and the distributions that it installs.

    `key` identifies it: the digest of its inputs, or of its tar for a layer of an existing image.
    """

    layer: Layer
    title: str
    key: str
    distributions: Distributions = ()


@dataclass(frozen=True, slots=True)
class CachedSegment:
    """A layer in the store as a segment, its title, and the distributions that it installs; `key`: see CachedLayer."""

    segment: Segment
    title: str
    key: str
    distributions: Distributions = ()


M = TypeVar("M", bound=CachedLayer | CachedSegment)


class LayerCache(Protocol[M]):
    """A cache of layers in one form, which writes missing layers; `log` logs its actions."""

    @property
    def log(self) -> Log: ...

    def expect(self, parts: Sequence[LayerRequest]) -> None:
        """Begin to fetch `parts` that are missing in the store from the team's cache, if there is one."""
        ...

    def part(self, part: LayerRequest) -> M:
        """Return the layer of `part` from the store, or write it. Raises BuildError if it cannot be written."""
        ...

    def blob(self, layer: Layer, title: str) -> M:
        """Return the layer of an existing image whose blob is in the store."""
        ...

    def members(self, made: M) -> Sequence[Member]:
        """Return the members of a layer of this cache with the sha256 of each file. Raises BuildError."""
        ...


@dataclass(frozen=True, slots=True)
class TarCache:
    """The `LayerCache` of compressed tars; `limits` are for images."""

    store: Store
    log: Log
    limits: ImageLimits | None = None

    def expect(self, parts: Sequence[LayerRequest]) -> None:
        if self.store.remote is not None:
            requests = [part for part in parts if not _note(part, self.store).exists()]
            self.store.remote.expect([CacheEntry("layer", part.key) for part in requests])

    def part(self, part: LayerRequest) -> CachedLayer:
        note = _note(part, self.store)

        def write() -> CachedLayer:
            rows: list[tuple[str, str, str]] = []
            listed: list[Member] = []
            layer = write_layer(hashed(recorded(part.tree(), rows), listed), self.store.blobs)
            write_table(_members(part.key, self.store), {"format": _MEMBERS_FORMAT, **packed(listed)})
            blob, distributions = layer.blob, tuple(sorted(rows))
            index = {
                "media_type": blob.media_type,
                "digest": blob.digest,
                "size": blob.size,
                "diff_id": layer.diff_id,
                "unpacked": layer.unpacked,
                "distributions": distributions,
                "members": self.store.digests.of(_members(part.key, self.store)),
            }
            write_note(note, index)
            return CachedLayer(layer, part.title, part.key, distributions)

        entry = CacheEntry("layer", part.key)
        return cached(entry, lambda: known_part(part, self.store), write, note, part.title, self.store, self.log)

    def blob(self, layer: Layer, title: str) -> CachedLayer:
        return CachedLayer(layer, title, layer.diff_id.partition(":")[2])

    def members(self, made: CachedLayer) -> Sequence[Member]:
        """Return the layer's members, from the cache or, failing that, from its blob."""
        path = _members(made.key, self.store)
        try:
            return unpacked(read_table(path, _MEMBERS_FORMAT))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            pass
        opens = partial(opened, self.store.blobs.path(made.layer.blob.digest))
        listed: list[Member] = []
        for member, content in blob_items(opens, made.title, made.layer.diff_id, self.limits):
            listed.append(member)
            if content is not None:
                member.sha256 = HashedContent(content).digest().hex()
        with contextlib.suppress(OSError):  # a read-only store only costs time
            write_table(path, {"format": _MEMBERS_FORMAT, **packed(listed)})
        return listed


def cached(
    entry: CacheEntry,
    known: Callable[[], M | None],
    write: Callable[[], M],
    place: Path,
    title: str,
    store: Store,
    log: Log,
) -> M:
    """Return the layer that `known` finds in the store or the team's cache, else `write` it under a lock.

    Raises BuildError if writing fails.
    """
    layer = known()
    if layer is not None:
        reuse("layers", title, True)
        return layer

    def blobs(made: M) -> list[str]:
        return [made.layer.blob.digest] if isinstance(made, CachedLayer) else []

    def make() -> M:
        shown = f"layer: {textwrap.shorten(title, 72, placeholder=' …')}"
        new = reuse("layers", title, False)
        if new <= _LISTED:
            log(f"  {shown}")
        elif new == _LISTED + 1:
            log("  and more layers; --verbose lists them")
        if new > _LISTED:
            detail(f"  {shown}")
        with step(shown, printed=True):
            return write()

    with store.writing(), file_lock(place.with_suffix(".lock"), remove=True):
        layer = shared(entry, store.remote, known, make, blobs)  # another process may have written it
        reuse("layers", title, True)
        return layer


def known_part(part: LayerRequest, store: Store) -> CachedLayer | None:
    """Return the tar of `part` from the store; None when its index is missing or invalid, or the blob is missing."""
    try:
        data = read_note(_note(part, store))
        blob = Descriptor(str(data["media_type"]), str(data["digest"]), data["size"])
        layer = Layer(blob, str(data["diff_id"]), int(data["unpacked"]))
        distributions = read_distributions(data["distributions"])
        listed = str(data["members"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    good = blob.media_type in COMPRESSION and is_digest(blob.digest) and is_digest(layer.diff_id)
    if not good or not store.blobs.has(blob) or not store.digests.keep(_members(part.key, store), listed):
        return None
    return CachedLayer(layer, part.title, part.key, distributions)


def read_distributions(rows: Iterable[Sequence[object]]) -> Distributions:
    """Return the distributions in a layer's JSON index. Raises ValueError or TypeError when they are malformed."""
    return tuple((str(name), str(version), str(record)) for name, version, record in rows)


def _members(key: str, store: Store) -> Path:
    return store.folder("layers") / f"{key}.members"


def _note(part: LayerRequest, store: Store) -> Path:
    return store.folder("layers") / f"{part.key}.json"


def blob_items(opens: Callable[[], BinaryIO], name: str, diff_id: str, limits: ImageLimits | None) -> Items:
    """Yield the members of a layer that `opens` opens as it is stored, see `checked_tar`."""
    with decompressed(opens(), name) as stream:
        yield from checked_tar(stream, name, diff_id, Quota(limits))
