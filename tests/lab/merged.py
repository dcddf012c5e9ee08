"""Layers merged, with the content of the files in the final tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from envbuild.image.tar import PositionedStream, members, tar_items
from envbuild.image.tree import MergedEntry, MergedTree

# A layer's name for messages, and a function that opens its uncompressed tar at the start.
Layer = tuple[str, Callable[[], BinaryIO]]


@dataclass(frozen=True)
class Merged:
    entries: dict[str, MergedEntry]
    layers: Sequence[Layer]

    def contents(self) -> dict[str, bytes]:
        """Return the content of each file, under all its names."""
        found: dict[tuple[int, int], bytes] = {}
        for number, (name, start) in enumerate(self.layers):
            with start() as stream:
                for ordinal, (_, content) in enumerate(tar_items(stream, name)):
                    if content is not None:
                        found[number, ordinal] = content.read()
        places = ((path, (item.layer, item.member)) for path, item in self.entries.items())
        return {path: found[place] for path, place in places if place in found}


def merge(layers: Sequence[Layer]) -> Merged:
    merging = MergedTree()
    for name, start in layers:
        with start() as stream:
            source = PositionedStream(stream, name)
            merging.add(name, members(source))
            source.finish()
    return Merged(merging.entries(), layers)
