"""Merge of layers into the tree that a container sees, without unpacking them.

`merge` reads headers only; file content is streamed from the layers on request.
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

# A layer's name for messages, and a function that opens its uncompressed tar at the start; the stream is closed after
# use.
LayerSource = tuple[str, Callable[[], BinaryIO]]
_ID_END = 1 << 32


@dataclass(frozen=True, slots=True)
class MergedEntry:
    """A path of the final tree, with the layer (0 is the lowest) and the member that its metadata and data come from.

    When a file has several names, the first in order is the file and the others are hard links to it, regardless of the
    layers' choice. `layer` and `member` are -1 for a directory that no layer describes.
    """

    entry: Entry
    layer: int
    member: int


@dataclass(frozen=True, slots=True)
class Merged:
    """The final tree: its paths in order, so parents and link targets come first. The root "" is included."""

    entries: dict[str, MergedEntry]
    _sources: Sequence[LayerSource] = field(repr=False)
    _members: dict[tuple[int, int], Member] = field(repr=False)

    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, Entry, Readable]]:
        """Yield the path, the entry and the content of each file in `wanted`.

        Each layer with a wanted file is read once, in the order of layers and members. A hard link yields the content
        of its file; a layer is opened again only when two names of one file are wanted. The content must be read before
        the next item is requested. Raises KeyError for a path that is not in the tree, and BuildError for a layer that
        has changed or is truncated.
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
    """Return the merged tree of `layers`, lowest first. Raises BuildError, naming layer and path.

    A seekable layer costs one seek per member; any other layer is read completely, once.
    """
    merging = Merging()
    for name, start in layers:
        merging.add(name, _members(name, start))
    entries = merging.entries()
    return Merged(entries, layers, merging.files)


class Merging:
    """A merge in progress: layers are added one after another, lowest first."""

    def __init__(self) -> None:
        self._root = MergedTree()
        self.files: dict[tuple[int, int], Member] = {}
        """The members with the files' content, by layer and member number; filled by `entries`."""

    def add(self, name: str, members: Iterable[Member]) -> None:
        """Add a layer on top; `name` is for messages. Raises BuildError."""
        self._root.begin()
        for ordinal, member in enumerate(members):
            _check_numbers(member, name)
            self._root.apply(member, ordinal, name)

    def has(self, path: str) -> bool:
        """Return whether the tree so far has an entry at `path`; links among its parent folders are resolved."""
        return self._root.has(path)

    def entries(self) -> dict[str, MergedEntry]:
        """Return the paths of the tree in order."""
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
