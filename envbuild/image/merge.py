"""Merge of layers into the tree that a container sees: headers are read, no file is unpacked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from envbuild.errors import BuildError
from envbuild.image.blobs import Pulled
from envbuild.image.compression import open_layer
from envbuild.image.entry import DIR, HARDLINK, SYMLINK, Entry
from envbuild.image.tar_stream import Member, PositionedStream
from envbuild.image.tree import MergedTree, Node
from envbuild.image.untar import members

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


class Merging(MergedTree):
    """A merge in progress: layers are added one after another, lowest first."""

    def add(self, name: str, members: Iterable[Member]) -> None:
        """Add a layer on top; `name` is for messages. Raises BuildError."""
        self.begin()
        for ordinal, member in enumerate(members):
            _check_numbers(member, name)
            self.apply(member, ordinal, name)

    def entries(self) -> dict[str, MergedEntry]:
        """Return the paths of the tree in order: parents and link targets come first. The root "" is included."""
        entries: dict[str, MergedEntry] = {}
        first: dict[int, str] = {}
        for path, node in self.walk():
            target = first.setdefault(id(node), path)
            entry = _entry(path, node, None if target == path else target)
            entries[path] = MergedEntry(entry, node.layer, node.ordinal)
        return entries


def merged(pulled: Pulled) -> Merging:
    """Return the merged layers of an image. Raises BuildError when they cannot be merged."""
    merging = Merging()
    for blob in pulled.manifest.layers:
        with open_layer(pulled.blobs.path(blob.digest), blob.digest) as stream:
            source = PositionedStream(stream, blob.digest)
            merging.add(blob.digest, members(source))
            source.finish()
    return merging


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
