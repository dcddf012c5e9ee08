"""Cached layers as segments of a squashfs; the team's cache may still send their data while the image is composed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from envbuild.base import host
from envbuild.base.atomic import replacing
from envbuild.base.errors import BuildError
from envbuild.base.process import forked
from envbuild.base.progress import Log, log, reuse
from envbuild.cache.hashed import read_note, write_note
from envbuild.environment import Environment
from envbuild.image.entry import closing
from envbuild.image.layer import Layer, open_layer
from envbuild.image.layout import opened
from envbuild.image.limits import ImageLimits
from envbuild.image.squashfs.model import Codec
from envbuild.image.squashfs.segment import FORMAT, Segment, load, of_entry, save, write_segment
from envbuild.image.tar import Items, Member, tar_items
from envbuild.layers.layer_cache import (
    CachedSegment,
    LayerRequest,
    blob_items,
    cached,
    known_part,
    read_distributions,
    recorded,
)
from envbuild.store.entry import CacheEntry
from envbuild.store.store import Store


@dataclass(frozen=True, slots=True)
class SegmentCache:
    """The `LayerCache` of segments, compressed with `codec` in `workers` threads; `limits` are for images.

    With `arriving`, initially {}, segments may be returned before their data have arrived from the team's cache; call
    `wait` before reading these.
    """

    store: Store
    codec: Codec
    workers: int
    log: Log
    limits: ImageLimits
    arriving: dict[Path, CacheEntry] | None = None

    def expect(self, parts: Sequence[LayerRequest]) -> None:
        if self.store.remote is not None:
            places = [self._place(part.key) for part in parts]
            ends = (".index", ".data")
            paths = [place for place in places if not all(place.with_suffix(end).exists() for end in ends)]
            self.store.remote.expect([CacheEntry("segment", place.name) for place in paths])

    def part(self, part: LayerRequest) -> CachedSegment:
        rows: list[tuple[str, str, str]] = []
        items = partial(_of_part, part, rows)
        # A tar of the layer in the store contains the same files, including their bytecode.
        if (tar := known_part(part, self.store)) is not None:
            rows += tar.distributions
            items = partial(_of_tar, self.store.blobs.path(tar.layer.blob.digest), part.title)
        return self._made(part.key, part.title, items, rows)

    def blob(self, layer: Layer, title: str) -> CachedSegment:
        """Return the segment of `layer`. Raises BuildError if its tar does not match the configuration's diff_id."""
        return self.tar(layer.diff_id, title, partial(opened, self.store.blobs.path(layer.blob.digest)))

    def tar(self, diff_id: str, title: str, opens: Callable[[], BinaryIO]) -> CachedSegment:
        """Return the layer whose tar, read from `opens`, has the digest `diff_id`. Raises BuildError if it differs."""
        return self._made(_key(diff_id), title, partial(blob_items, opens, title, diff_id, self.limits), [])

    def tars(self, archives: Sequence[tuple[str, str, Callable[[], BinaryIO]]]) -> list[CachedSegment]:
        """Return the layers of an image, each from the arguments of `tar`.

        Reading thousands of small files is Python code, which threads cannot run in parallel. So a second process
        converts layers from the last one backwards, until both meet; not with a team's cache: only this process sends.
        """
        new = [title for diff_id, title, _ in archives if not self._place(_key(diff_id)).with_suffix(".index").exists()]
        with ExitStack() as stack:
            if len(new) > 1 and self.workers > 1 and self.store.remote is None:
                other = replace(self, workers=self.workers // 2)
                stack.enter_context(forked(lambda: [other.tar(*archive) for archive in reversed(archives)]))
            layers = [self.tar(*archive) for archive in archives]
        for title in new:
            reuse("layers", title, False)
        return layers

    def members(self, made: CachedSegment) -> Sequence[Member]:
        return made.segment.members

    def _made(
        self, key: str, title: str, items: Callable[[], Items], rows: list[tuple[str, str, str]]
    ) -> CachedSegment:
        place = self._place(key)
        data = place.with_suffix(".data")

        def write() -> CachedSegment:
            with replacing(data) as path:
                segment = write_segment(items(), path, self.codec, self.workers)
            distributions = tuple(sorted(rows))
            write_note(place.with_suffix(".json"), {"distributions": distributions})
            self.store.digests.record(data, segment.sha256)
            save(segment, place.with_suffix(".index"))  # last: it marks a complete segment
            return CachedSegment(replace(segment, path=data), title, key, distributions)

        entry, remote = CacheEntry("segment", place.name), self.store.remote
        known = partial(_known, place, title, key, self.store)
        if self.arriving is not None and remote is not None:
            if (made := known()) is not None:
                reuse("layers", title, True)
                return made
            if remote.bring(entry, whole=False) and (made := known(whole=False)) is not None:
                self.arriving[data] = entry
                reuse("layers", title, True)
                return made
        return cached(entry, known, write, place, title, self.store, self.log)

    def arrived(self, segment: Segment, end: int) -> Path:
        """Wait until the first `end` bytes of `segment` have arrived, and return the file that contains them.

        Call `wait` before using the bytes, to verify them. Raises MissingData if they do not arrive.
        """
        remote, entry = self.store.remote, (self.arriving or {}).get(segment.path)
        if entry is not None and remote is not None and end < segment.size:
            coming = self.store.blobs.partial(f"sha256:{segment.sha256}")
            if remote.bring_part(entry, coming, end):
                return coming
        self.wait(segment)
        return segment.path

    def wait(self, segment: Segment) -> None:
        """Wait until the data of `segment` have arrived. Raises MissingData for missing data or another sha256."""
        remote, entry = self.store.remote, (self.arriving or {}).pop(segment.path, None)
        if entry is None or remote is None:
            return
        if not remote.bring(entry) or not self.store.digests.keep(segment.path, segment.sha256):
            raise MissingData(f"{segment.path}: its data did not come from the team's cache")

    def _place(self, key: str) -> Path:
        form = hashlib.sha256(f"{FORMAT} {self.codec.identity}".encode()).hexdigest()[:12]
        return self.store.folder("segments") / f"{key}-{form}"


def _key(diff_id: str) -> str:
    """Return the cache key of a layer that is identified by the digest of its tar."""
    return diff_id.partition(":")[2]


def segment_cache(
    environment: Environment, codec: Codec, arriving: dict[Path, CacheEntry] | None = None
) -> SegmentCache:
    """Return the cache of segments in the store of `environment`; `arriving`: see SegmentCache."""
    workers = host.workers(environment.variables)
    return SegmentCache(environment.store, codec, workers, log, environment.site.limits, arriving)


class MissingData(BuildError):
    """Failure of the team's cache to send announced data of a segment. The caller builds again without `arriving`."""


def _known(place: Path, title: str, key: str, store: Store, *, whole: bool = True) -> CachedSegment | None:
    segment = load(place.with_suffix(".index"), place.with_suffix(".data"), store.digests if whole else None)
    if segment is None:
        return None
    try:
        rows = read_note(place.with_suffix(".json"))["distributions"]
        return CachedSegment(segment, title, key, read_distributions(rows))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _of_part(part: LayerRequest, rows: list[tuple[str, str, str]]) -> Items:
    with closing(recorded(part.tree(), rows)) as tree:
        for entry, content in tree:
            yield of_entry(entry), content


def _of_tar(path: Path, name: str) -> Items:
    with open_layer(path, name) as stream:
        yield from tar_items(stream, name)
