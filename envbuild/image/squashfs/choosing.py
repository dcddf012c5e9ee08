"""Which blocks of which segments an image needs: what upper layers hide is left out, equal files are one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from envbuild.errors import BuildError
from envbuild.image.entry import FILE
from envbuild.image.merge import MergedEntry
from envbuild.image.squashfs.model import NO_FRAGMENT, SIZE_MASK, Data, Fragment
from envbuild.image.squashfs.segment import Segment


@dataclass(slots=True)
class Repack:
    """A fragment block of which only some files are needed: their digests and sizes by offset."""

    layer: int
    fragment: Fragment
    needed: dict[int, tuple[str, int]]


@dataclass(slots=True)
class Choice:
    """What goes into an image, in terms of offsets from where its data begins.

    `spans` are (layer, offset in its segment, bytes), to be copied one behind the other, `size` bytes in
    all; `fragments` are those among them. `homes` tells by digest where contents lie; those of `repacks` are
    not in it yet.
    """

    spans: list[tuple[int, int, int]] = field(default_factory=list)
    size: int = 0
    fragments: list[Fragment] = field(default_factory=list)
    repacks: list[Repack] = field(default_factory=list)
    homes: dict[str, Data] = field(default_factory=dict)


_Small = dict[int, dict[int, tuple[str, int]]]  # fragment number → offset → (digest, size)


def choose(entries: Iterable[MergedEntry], segments: Sequence[Segment]) -> Choice:
    """What of `segments` the files of `entries` need; of equal contents the lowest layer's is taken.

    Raises BuildError when a segment does not know a file.
    """
    large: list[dict[int, Data]] = [{} for _ in segments]  # by start
    small: list[_Small] = [defaultdict(dict) for _ in segments]
    holes: list[Data] = []
    for merged in entries:
        entry = merged.entry
        if entry.kind != FILE or not entry.size:
            continue
        data = data_of(merged, segments)
        if data.fragment != NO_FRAGMENT:
            small[merged.layer][data.fragment][data.offset] = (data.digest, entry.size)
        elif any(data.words):
            large[merged.layer][data.start] = data
        else:
            holes.append(data)
    choice = Choice(homes={data.digest: data for data in holes})
    for layer, segment in enumerate(segments):
        known = set(choice.homes)
        parts: list[tuple[int, int, Data | int]] = []  # start, size, file or number of a fragment
        for start, data in sorted(large[layer].items()):
            if data.digest not in known:
                known.add(data.digest)
                parts.append((start, data.stored, data))
        for number in _fragments(choice, layer, segment, small[layer]):
            fragment = segment.fragments[number]
            parts.append((fragment.start, fragment.word & SIZE_MASK, number))
        parts.sort(key=lambda part: part[0])
        _place(choice, layer, segment, parts, small[layer])
    return choice


def data_of(merged: MergedEntry, segments: Sequence[Segment]) -> Data:
    """Where the content of a regular file lies in its segment. Raises BuildError when it is not there."""
    data = segments[merged.layer].data.get(merged.member)
    if data is None or (merged.entry.size > 0 and not data.digest):
        raise damaged(segments[merged.layer], f"it does not hold /{merged.entry.path}")
    return data


def damaged(segment: Segment, what: str) -> BuildError:
    """The error for a segment that is not what its index says."""
    return BuildError(
        f"{segment.path}: damaged: {what}",
        "remove this file: it holds what was compressed before, and is made again",
    )


def _fragments(choice: Choice, layer: int, segment: Segment, small: _Small) -> list[int]:
    """The fragment blocks of a segment to copy as they are; others that are needed go to `repacks`."""
    places: dict[int, set[int]] = defaultdict(set)
    for data in segment.data.values():
        if data.fragment != NO_FRAGMENT:
            places[data.fragment].add(data.offset)
    copied: list[int] = []
    promised = {digest for repack in choice.repacks for digest, _ in repack.needed.values()}
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
        # Nothing hidden goes into an image. A few bytes twice cost less than compressing a block anew.
        if len(seen) == len(places[number]) and 2 * new >= all_of_it:
            copied.append(number)
        else:
            choice.repacks.append(Repack(layer, segment.fragments[number], needed))
            promised.update(digest for digest, _ in needed.values())
    return copied


def _place(
    choice: Choice,
    layer: int,
    segment: Segment,
    parts: Iterable[tuple[int, int, Data | int]],
    small: _Small,
) -> None:
    """Put the parts of a segment, in order, behind what is there."""
    for start, size, what in parts:
        position = choice.size
        if isinstance(what, Data):
            choice.homes[what.digest] = Data(position, what.words, digest=what.digest)
        else:
            number = len(choice.fragments)
            choice.fragments.append(Fragment(position, segment.fragments[what].word))
            for offset, (digest, _) in small[what].items():
                home = Data(fragment=number, offset=offset, digest=digest)
                choice.homes.setdefault(digest, home)
        last = choice.spans[-1] if choice.spans else (-1, 0, 0)
        if last[0] == layer and last[1] + last[2] == start:
            choice.spans[-1] = (layer, last[1], last[2] + size)
        else:
            choice.spans.append((layer, start, size))
        choice.size += size
