"""Layers as segments of a squashfs: compressed once, cached in the store, copied into every image."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from envbuild.atomic import replacing, write_atomically
from envbuild.errors import BuildError
from envbuild.file_lock import file_lock
from envbuild.image.blobs import opened
from envbuild.image.compression import Hashed, decompressed, open_layer
from envbuild.image.entry import Readable, closing
from envbuild.image.layer import Layer
from envbuild.image.squashfs.codec import Codec
from envbuild.image.squashfs.segment import Segment, load, of_entry, save, tar_items, write_segment
from envbuild.image.tar_stream import Member
from envbuild.layers.compose import LayerRequest
from envbuild.layers.layer_cache import Distributions, known_part, read_distributions, recorded, short
from envbuild.store.store import Store

Items = Generator[tuple[Member, Readable | None], None, None]


@dataclass(frozen=True, slots=True)
class CachedSegment:
    """A layer in the store as a segment, its title, and the distributions that it installs."""

    segment: Segment
    title: str
    distributions: Distributions = ()


@dataclass(frozen=True, slots=True)
class SegmentCache:
    """The `LayerCache` of segments, compressed with `codec` in `workers` threads."""

    store: Store
    codec: Codec
    workers: int
    log: Callable[[str], None]

    def part(self, part: LayerRequest) -> CachedSegment:
        """See `LayerCache`.

        If the store has the layer as a tar, the tar is read instead: it contains the same files, including their
        bytecode.
        """
        found: list[tuple[str, str, str]] = []
        tar = known_part(part, self.store)
        if tar is not None:
            found += tar.distributions
            path = self.store.blobs.path(tar.layer.blob.digest)
            items = partial(_of_tar, path, part.title)
        else:
            items = partial(_of_part, part, found)
        return self._made(part.key, part.title, items, found)

    def blob(self, layer: Layer, title: str) -> CachedSegment:
        """See `LayerCache`. Raises BuildError for a layer that does not match its configuration's diff_id."""
        path = self.store.blobs.path(layer.blob.digest)
        return self.tar(layer.diff_id, title, partial(opened, path))

    def tar(self, diff_id: str, title: str, opens: Callable[[], BinaryIO]) -> CachedSegment:
        """Return the layer whose tar has the digest `diff_id`; `opens` opens it as it is stored, if it must be read.

        Raises BuildError when it is damaged or another layer.
        """
        items = partial(_of_tar_checked, opens, title, diff_id)
        return self._made(diff_id.partition(":")[2], title, items, [])

    def _made(
        self, key: str, title: str, items: Callable[[], Items], found: list[tuple[str, str, str]]
    ) -> CachedSegment:
        folder = self.store.folder("segments")
        codec = hashlib.sha256(self.codec.identity.encode()).hexdigest()[:12]
        place = folder / f"{key}-{codec}"
        made = _known(place, title)
        if made is not None:
            return made
        try:
            with file_lock(place.with_suffix(".lock"), remove=True):
                made = _known(place, title)  # another process may have written it
                if made is not None:
                    return made
                self.log(f"  layer: {short(title)}")
                segment = self._write(items(), place)
                distributions = tuple(sorted(found))
                write_atomically(place.with_suffix(".json"), json.dumps(distributions))
                save(segment, place.with_suffix(".index"))  # last: it marks a complete segment
        except OSError as error:
            raise self.store.unwritable(error) from error
        return CachedSegment(segment, title, distributions)

    def _write(self, items: Items, place: Path) -> Segment:
        # Closed now rather than at garbage collection: it may hold archives.
        with replacing(_data(place)) as path, contextlib.closing(items):
            segment = write_segment(items, path, self.codec, self.workers)
        return replace(segment, path=_data(place))


def _data(place: Path) -> Path:
    return place.with_suffix(".data")


def _known(place: Path, title: str) -> CachedSegment | None:
    segment = load(place.with_suffix(".index"), _data(place))
    if segment is None:
        return None
    try:
        rows = json.loads(place.with_suffix(".json").read_text(encoding="utf-8"))
        return CachedSegment(segment, title, read_distributions(rows))
    except (OSError, ValueError, TypeError):
        return None


def _of_part(part: LayerRequest, found: list[tuple[str, str, str]]) -> Items:
    with closing(recorded(part.tree(), found)) as tree:
        for entry, content in tree:
            yield of_entry(entry), content


def _of_tar(path: Path, name: str) -> Items:
    with open_layer(path, name) as stream:
        yield from tar_items(stream, name)


def _of_tar_checked(opens: Callable[[], BinaryIO], name: str, diff_id: str) -> Items:
    with decompressed(opens(), name) as stream, contextlib.closing(Hashed(stream)) as hashed:
        yield from tar_items(cast(BinaryIO, hashed), name)
        if hashed.finish() != diff_id:
            raise BuildError(f"{name}: damaged, or not the layer that the image's configuration names ({diff_id})")
