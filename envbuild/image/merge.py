"""Layers merged into the tree that a container sees, without unpacking any.

`merge` reads headers only; the content of files is streamed from their layers when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from envbuild.errors import BuildError
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK, Entry, Readable
from envbuild.image.sparse import Unpacked
from envbuild.image.tar_stream import Member, PositionedStream
from envbuild.image.tree import MergedTree, Node
from envbuild.image.untar import Slice, members

# A layer's name, for messages, and what opens its uncompressed tar at the start; it is closed after use.
LayerSource = tuple[str, Callable[[], BinaryIO]]
_ID_END = 1 << 32


@dataclass(frozen=True, slots=True)
class MergedEntry:
    """A path of the final tree, and the layer (0 is the lowest) and member that it and its data come from.

    Of several names of one file the first by order is the file and the others are hard links to it,
    whatever the layers called them. `layer` and `member` are -1 for a directory that no layer describes.
    """

    entry: Entry
    layer: int
    member: int


@dataclass(frozen=True, slots=True)
class Merged:
    """The final tree: its paths in order, so parents and link targets first, the root "" included."""

    entries: dict[str, MergedEntry]
    _sources: Sequence[LayerSource] = field(repr=False)
    _members: dict[tuple[int, int], Member] = field(repr=False)

    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, Entry, Readable]]:
        """The content of the files among `wanted`, with their paths and entries.

        Each layer that is needed is read once, in the order of layers and members. A hard link gives the
        content of its file; a layer is opened again only where both names are wanted. The content must be
        read before the next item is asked for. Raises KeyError for a path that is not in the tree, and
        BuildError for a layer that has changed or is cut short.
        """
        rounds: list[dict[tuple[int, int], str]] = []
        for path in sorted(wanted):
            merged = self.entries[path]
            place = (merged.layer, merged.member)
            if place not in self._members:
                continue
            for known in rounds:
                if place not in known:
                    known[place] = path
                    break
            else:
                rounds.append({place: path})
        for known in rounds:
            for layer in sorted({place[0] for place in known}):
                places = sorted(place for place in known if place[0] == layer)
                name, start = self._sources[layer]
                with start() as stream:
                    source = PositionedStream(stream, name)
                    for place in places:
                        member = self._members[place]
                        source.go(member.offset)
                        part = Slice(source, member.stored)
                        content: Readable = part
                        if member.pieces is not None:
                            content = Unpacked(part, member.size, member.pieces)
                        yield known[place], self.entries[known[place]].entry, content


def merge(layers: Sequence[LayerSource]) -> Merged:
    """The tree that `layers`, lowest first, make together. Raises BuildError, naming layer and path.

    A layer that can seek costs a seek for each member; any other is read through once.
    """
    merging = Merging()
    for name, start in layers:
        merging.add(name, _members(name, start))
    entries = merging.entries()
    return Merged(entries, layers, merging.files)


class Merging:
    """Layers that are merged one after another, the lowest first."""

    def __init__(self) -> None:
        self._root = MergedTree()
        self.files: dict[tuple[int, int], Member] = {}
        """After `entries`: the members that files come from, by layer and number."""

    def add(self, name: str, members: Iterable[Member]) -> None:
        """Put one layer on top; `name` is for messages. Raises BuildError."""
        self._root.begin()
        for ordinal, member in enumerate(members):
            _check_numbers(member, name)
            self._root.apply(member, ordinal, name)

    def has(self, path: str) -> bool:
        """Whether the tree so far has something at `path`, links among its folders followed."""
        return self._root.has(path)

    def entries(self) -> dict[str, MergedEntry]:
        """The paths of the tree in order."""
        entries: dict[str, MergedEntry] = {}
        first: dict[int, str] = {}
        for path, node in self._root.walk():
            target = first.setdefault(id(node), path)
            if target == path and node.member is not None and node.member.kind == FILE:
                self.files[node.layer, node.ordinal] = node.member
            entry = _entry(path, node, None if target == path else target)
            entries[path] = MergedEntry(entry, node.layer, node.ordinal)
        return entries


def _members(name: str, start: Callable[[], BinaryIO]) -> Iterator[Member]:
    with start() as stream:
        source = PositionedStream(stream, name)
        yield from members(source)
        source.finish()


def _entry(path: str, node: Node, link: str | None) -> Entry:
    member = node.member
    if member is None:
        return Entry(path, DIR, 0o755)
    return Entry(
        path,
        member.kind if link is None else HARDLINK,
        0o777 if member.kind == SYMLINK else member.mode,
        member.size,
        member.link if link is None else link,
        member.uid,
        member.gid,
        member.mtime,
        member.device,
        member.xattrs,
    )


def _check_numbers(member: Member, layer: str) -> None:
    for number in (member.uid, member.gid, *member.device):
        if not 0 <= number < _ID_END:
            raise BuildError(f"{layer}: {member.name}: an owner or device number of {number}")
