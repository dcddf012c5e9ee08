"""Selection of the blocks that an image needs from its layers' segments.

Files hidden by upper layers are left out, and equal files are stored once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from envbuild.base.errors import BuildError
from envbuild.image.entry import FILE
from envbuild.image.squashfs.model import NO_FRAGMENT, SIZE_MASK, Data, Fragment
from envbuild.image.squashfs.segment import Segment
from envbuild.image.tree import MergedEntry

# A fragment block of a layer of which the image needs only some files: their digests and sizes by offset.
Repack = tuple[int, Fragment, dict[int, tuple[str, int]]]


@dataclass(slots=True)
class Choice:
    """The blocks of an image; offsets are relative to the start of its data.

    `spans` are (layer, offset in its segment, bytes) to be copied one after another, `size` bytes in total; `fragments`
    are the fragment blocks among them. `homes` maps digests to the positions of the contents, still without those of
    `repacks`.
    """

    spans: list[tuple[int, int, int]] = field(default_factory=list)
    size: int = 0
    fragments: list[Fragment] = field(default_factory=list)
    repacks: list[Repack] = field(default_factory=list)
    homes: dict[str, Data] = field(default_factory=dict)

    def add(self, layer: int, start: int, size: int) -> int:
        """Append `size` bytes of a segment to the spans, and return their position in the image's data."""
        position = self.size
        last = self.spans[-1] if self.spans else (-1, 0, 0)
        if last[0] == layer and last[1] + last[2] == start:
            self.spans[-1] = (layer, last[1], last[2] + size)
        else:
            self.spans.append((layer, start, size))
        self.size += size
        return position


_Small = dict[int, dict[int, tuple[str, int]]]  # fragment number → offset → (digest, size)


def choose(entries: Iterable[MergedEntry], segments: Sequence[Segment]) -> Choice:
    """Select the blocks of `segments` that the files of `entries` need; of equal contents the lowest layer's is used.

    Raises BuildError when a segment lacks a file.
    """
    choice = Choice()
    large: list[dict[int, Data]] = [{} for _ in segments]  # by start
    small: list[_Small] = [defaultdict(dict) for _ in segments]
    for merged in entries:
        entry = merged.entry
        if entry.kind != FILE or not entry.size:
            continue
        data = data_of(merged, segments)
        if data.fragment != NO_FRAGMENT:
            small[merged.layer][data.fragment][data.offset] = (data.digest, entry.size)
        elif any(data.words):
            large[merged.layer][data.start] = data
        else:  # nothing of it is stored
            choice.homes[data.digest] = data
    for layer, segment in enumerate(segments):
        known = set(choice.homes)
        parts: list[tuple[int, int, Data | int]] = []  # start, size, file or fragment number
        for start, data in sorted(large[layer].items()):
            if data.digest not in known:
                known.add(data.digest)
                parts.append((start, data.stored, data))
        for number in _fragments(choice, layer, segment, small[layer]):
            fragment = segment.fragments[number]
            parts.append((fragment.start, fragment.word & SIZE_MASK, number))
        for start, size, what in sorted(parts, key=itemgetter(0)):
            position = choice.add(layer, start, size)
            if isinstance(what, Data):
                choice.homes[what.digest] = Data(position, what.words, digest=what.digest)
                continue
            for offset, (digest, _) in small[layer][what].items():
                choice.homes.setdefault(digest, Data(fragment=len(choice.fragments), offset=offset, digest=digest))
            choice.fragments.append(Fragment(position, segment.fragments[what].word))
    return choice


def data_of(merged: MergedEntry, segments: Sequence[Segment]) -> Data:
    """Return the position of a regular file's content in its segment.

    Raises BuildError when the segment lacks the file.
    """
    data = segments[merged.layer].data.get(merged.member)
    if data is None or (merged.entry.size > 0 and not data.digest):
        raise damaged(segments[merged.layer], f"it does not hold /{merged.entry.path}")
    return data


def damaged(segment: Segment, what: str) -> BuildError:
    """Return the error for a segment that does not match its index."""
    return BuildError(
        f"{segment.path}: damaged: {what}",
        "remove this file: it is a cache of compressed blocks, and envbuild writes it again",
    )


def _fragments(choice: Choice, layer: int, segment: Segment, small: _Small) -> list[int]:
    """Return the fragment blocks of a segment that are copied unchanged.

    The other blocks with needed files are added to `repacks`.
    """
    places: dict[int, set[int]] = defaultdict(set)
    for data in segment.data.values():
        if data.fragment != NO_FRAGMENT:
            places[data.fragment].add(data.offset)
    copied: list[int] = []
    promised = {digest for _, _, needed in choice.repacks for digest, _ in needed.values()}
    for number in sorted(small):
        if number >= len(segment.fragments):
            raise damaged(segment, f"it has no fragment block {number}")
        seen = small[number]
        needed = {
            offset: (digest, size)
            for offset, (digest, size) in sorted(seen.items())
            if digest not in choice.homes and digest not in promised
        }
        if not needed:
            continue
        new, all_of_it = (sum(size for _, size in files.values()) for files in (needed, seen))
        # A block with hidden files is never copied: they must not be in the image. Storing a few bytes twice costs less
        # than recompressing a block.
        if len(seen) == len(places[number]) and 2 * new >= all_of_it:
            copied.append(number)
        else:
            choice.repacks.append((layer, segment.fragments[number], needed))
            promised.update(digest for digest, _ in needed.values())
    return copied
