"""Merge of layers into the tree that a container sees: a tree in memory, without data, to which layers are applied.

Rules: OCI image specification 1.1, "Image Layer Filesystem Changeset". For cases that it does not specify, members are
applied as by `umoci unpack`, in the order of the archive. No path ever leads out of the root.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from envbuild.base.errors import BuildError
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK, Entry, path_parts
from envbuild.image.limits import Quota
from envbuild.image.tar import Member

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_AUFS = ".wh..wh."
_LINKS = 255  # maximum number of symbolic links followed in one path
# Parts of link targets that all members together may follow: real images need below 20 per member.
_STEPS, _STEPS_PER_MEMBER = 1 << 20, 64
_ID_END = 1 << 32
_PATH_MAX, _NAME_MAX = 4095, 255  # bytes, as on Linux
# Of all nodes but directories: an empty dict for each would be a tenth of the tree's memory. Nothing is added to it.
_NO_CHILDREN: dict[str, Node] = {}


class _Refused(Exception):
    """The fault of a member, without the member's name."""


@dataclass(slots=True, eq=False)
class Node:
    """A file of any kind, with one or several names. `member` is None for a directory that no layer describes."""

    member: Member | None = None
    layer: int = -1
    ordinal: int = -1
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of file, as that of an `Entry`."""
        return DIR if self.member is None else self.member.kind


@dataclass(frozen=True, slots=True)
class MergedEntry:
    """A path of the final tree, with the layer (0 is the lowest) and the member that its metadata and data come from.

    When a file has several names, the first in order is the file and the others are hard links to it, regardless of the
    layers' choice. `layer` and `member` are -1 for a directory that no layer describes.
    """

    entry: Entry
    layer: int
    member: int


class MergedTree:
    """The merged tree of the layers so far; they are added one after another, lowest first."""

    def __init__(self, quota: Quota | None = None) -> None:
        self.node = Node()
        self._layer = -1
        self._quota = quota or Quota()
        self._steps = _STEPS
        # By folder, the names that the current layer has added, or below which it has: its own whiteouts keep them.
        self._upper: dict[Node, set[str]] = {}
        # Nodes with several names, or that had them.
        self._linked: set[Node] = set()
        # Folders below which nothing of lower layers is left, so that no whiteout has to look there again.
        self._cleared: set[Node] = set()
        # The last member's folder, and its node; None if links led there, or after a whiteout.
        self._head = ""
        self._parent: Node | None = None

    def add(self, name: str, members: Iterable[Member]) -> None:
        """Add a layer on top; `name` is for messages. Raises BuildError."""
        self.begin()
        for ordinal, member in enumerate(members):
            for number in (member.uid, member.gid, *member.device):
                if not 0 <= number < _ID_END:
                    raise BuildError(f"{name}: {member.name}: an owner or device number of {number}")
            self.apply(member, ordinal, name)

    def begin(self) -> None:
        """Begin the next layer."""
        self._layer += 1
        self._upper, self._cleared, self._parent = {}, set(), None

    def apply(self, member: Member, ordinal: int, layer: str) -> None:
        """Apply one member. Raises BuildError, naming `layer` and the path, when the member is invalid."""
        self._steps += _STEPS_PER_MEMBER
        self._quota.entry(layer)
        self._quota.content(layer, member.size)
        head, _, name = member.name.rpartition("/")
        try:
            if self._parent is None or head != self._head or not _is_plain(member.name, name):
                self._apply(member, path_parts(member.name), ordinal)
            else:  # most members are in the folder of the one before, and nothing on the way to it has changed
                self._upper[self._parent].add(name)
                self._put(member, self._parent, name, ordinal)
        except _Refused as error:
            raise BuildError(f"{layer}: {'/'.join(path_parts(member.name)) or '/'}: {error}") from None

    def has(self, path: str) -> bool:
        """Return whether an entry exists at `path`; links among its parents are resolved, `path` itself is not."""
        try:
            return self._named(path) is not None
        except _Refused:
            return False

    def is_file(self, path: str) -> bool:
        """Return whether `path` leads to a regular file; symbolic links are resolved within the root."""
        node = self._at(self.resolved(path.split("/")))
        return node is not None and node.kind == FILE

    def resolved(self, parts: list[str]) -> list[str]:
        """Return `parts` of a path with symbolic links resolved within the root, unchanged if these are too many."""
        try:
            return self._resolve(parts)
        except _Refused:
            return parts

    def walk(self) -> list[tuple[str, Node]]:
        """Return the paths with their nodes, sorted by path; the root, "", comes first. Raises BuildError."""
        members = [("", self.node)]
        for path, node in members:  # which grows meanwhile
            # Through symbolic links, short names in a layer can make long paths.
            self._quota.text("the merged layers", more=len(path))
            for name, child in node.children.items():
                longer = f"{path}/{name}" if path else name
                # An equal string of the member is used: paths are most of the memory of a tree.
                same = child.member is not None and child.member.name == longer
                members.append((child.member.name if child.member and same else longer, child))
        return sorted(members, key=lambda item: item[0])

    def entries(self) -> dict[str, MergedEntry]:
        """Return the paths of the tree in order: parents and link targets come first. The root "" is included."""
        entries: dict[str, MergedEntry] = {}
        first: dict[Node, str] = {}
        for path, node in self.walk():
            target = first.setdefault(node, path) if node in self._linked else path
            entry = _entry(path, node, None if target == path else target)
            entries[path] = MergedEntry(entry, node.layer, node.ordinal)
        return entries

    def _apply(self, member: Member, parts: list[str], ordinal: int) -> None:
        self._parent = None
        if parts and parts[0].startswith(_AUFS) and parts[0] != _OPAQUE:
            return  # aufs's own bookkeeping, in layers from old daemons
        if not parts:
            if member.kind != DIR:
                raise _Refused("the root can be nothing but a directory")
            self.node.member, self.node.layer, self.node.ordinal = member, self._layer, ordinal
            return
        name = parts[-1]
        folder = self._resolve(parts[:-1])
        if name.startswith(_WHITEOUT):
            self._whiteout(folder, name)
            return
        _check(folder, name)
        parent = self._folder(folder)
        self._mark(folder, name)
        self._put(member, parent, name, ordinal)
        self._head = "/".join(folder)
        self._parent = parent if member.name.rpartition("/")[0] == self._head else None

    def _put(self, member: Member, parent: Node, name: str, ordinal: int) -> None:
        old = parent.children.get(name)
        if old is not None and old.kind == DIR and member.kind == DIR:
            old.member, old.layer, old.ordinal = member, self._layer, ordinal
        else:
            parent.children.pop(name, None)
            parent.children[name] = self._new(member, ordinal)

    def _new(self, member: Member, ordinal: int) -> Node:
        if member.kind == HARDLINK:
            node = self._named(member.link)
            if node is None:
                raise _Refused(f"a hard link to {member.link!r}, which is missing")
            if node.kind == DIR:
                raise _Refused(f"a hard link to {member.link!r}, a directory")
            self._linked.add(node)
            return node
        if member.kind == SYMLINK and not member.link:
            raise _Refused("a symbolic link to nothing")
        if member.kind == SYMLINK and len(os.fsencode(member.link)) > _PATH_MAX:
            raise _Refused("a symbolic link longer than Linux allows")
        return Node(member, self._layer, ordinal, {} if member.kind == DIR else _NO_CHILDREN)

    def _whiteout(self, folder: list[str], name: str) -> None:
        opaque = name == _OPAQUE
        hidden = name.removeprefix(_WHITEOUT)
        if hidden in ("", ".", ".."):
            raise _Refused("a whiteout without a name")
        top = folder if opaque else [*folder, hidden]
        node = self._at(top)
        if node is None:
            return
        if not opaque:
            parent = self._folder(folder)
            if hidden not in self._upper.get(parent, ()):
                del parent.children[hidden]
                return
        # The paths that this layer has added stay, with their parents; all others are removed.
        folders = [node]
        for node in folders:  # which grows meanwhile
            if node in self._cleared:
                continue
            self._cleared.add(node)
            added = self._upper.get(node, set())
            node.children = {name: child for name, child in node.children.items() if name in added}
            folders += node.children.values()

    def _resolve(self, parts: list[str]) -> list[str]:
        """Resolve symbolic links in `parts` within the root; parts that do not exist are kept."""
        nodes = [self.node]  # the nodes of `done` as far as they exist, the root first
        done: list[str] = []
        todo, links = parts[::-1], 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                del done[-1:]
                del nodes[len(done) + 1 :]
                continue
            node = nodes[-1].children.get(part) if len(nodes) == len(done) + 1 else None
            if node is None or node.member is None or node.member.kind != SYMLINK:
                done.append(part)
                if node is not None:
                    nodes.append(node)
                continue
            links += 1
            target = node.member.link
            self._steps -= 1 + target.count("/")
            if links > _LINKS or self._steps < 0:
                raise _Refused("too many symbolic links on the way")
            if target.startswith("/"):
                done, nodes = [], [self.node]
            todo += target.split("/")[::-1]
        return done

    def _named(self, path: str) -> Node | None:
        """Return the node at `path`; links among its parents are resolved, `path` itself is not."""
        parts = path_parts(path)
        return self._at(self._resolve(parts[:-1]) + parts[-1:])

    def _at(self, parts: list[str]) -> Node | None:
        """Return the node at a path without symbolic links."""
        node: Node | None = self.node
        for part in parts:
            node = node.children.get(part) if node is not None else None
        return node

    def _folder(self, folder: list[str]) -> Node:
        """Return the directory at a path without links; it is made if missing, and in place of a lower layer's file."""
        node = self.node
        for depth, part in enumerate(folder, 1):
            child = node.children.get(part)
            if child is None or child.kind != DIR:
                if child is not None and part in self._upper.get(node, ()):
                    raise _Refused(f"{'/'.join(folder[:depth])} is not a directory")
                self._quota.entry("the merged layers")
                child = node.children[part] = Node()
            node = child
        return node

    def _mark(self, folder: list[str], name: str) -> None:
        node = self.node
        for part in folder:
            self._upper.setdefault(node, set()).add(part)
            node = node.children[part]
        self._upper.setdefault(node, set()).add(name)


def _is_plain(path: str, name: str) -> bool:
    """Return whether `path` needs no cleaning at its last part `name`, and is surely short enough for Linux."""
    return len(path) <= _NAME_MAX and path.isascii() and name not in ("", ".", "..") and not name.startswith(_WHITEOUT)


def _check(folder: list[str], name: str) -> None:
    path = "/".join([*folder, name])
    size = len(path) if path.isascii() else len(os.fsencode(path))
    if size > _PATH_MAX or (size > _NAME_MAX and any(len(os.fsencode(part)) > _NAME_MAX for part in (*folder, name))):
        raise _Refused("a path longer than Linux allows")


def _entry(path: str, node: Node, link: str | None) -> Entry:
    member = node.member
    if member is None:
        return Entry(path, DIR, 0o755)
    kind, target = (member.kind, member.link) if link is None else (HARDLINK, link)
    mode = 0o777 if member.kind == SYMLINK else member.mode
    return Entry(
        path, kind, mode, member.size, target, member.uid, member.gid, member.mtime, member.device, member.xattrs
    )
