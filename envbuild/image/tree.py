"""A file system tree in memory, without data, to which layers are applied in order.

Rules: OCI image specification 1.1, "Image Layer Filesystem Changeset". For cases that it does not specify, members are
applied as by `umoci unpack`, in the order of the archive. No path ever leads out of the root.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from envbuild.errors import BuildError
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK
from envbuild.image.tar_stream import Member

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_AUFS = ".wh..wh."
_LINKS = 255  # maximum number of symbolic links followed in one path
_PATH_MAX, _NAME_MAX = 4095, 255  # bytes, as on Linux


@dataclass(slots=True, eq=False)
class Node:
    """A file of any kind, with one or several names. `member` is None for a directory that no layer describes."""

    member: Member | None
    layer: int
    ordinal: int
    children: dict[str, Node] | None = None

    @property
    def target(self) -> str | None:
        """The target of a symbolic link; None for any other kind."""
        member = self.member
        return member.link if member is not None and member.kind == SYMLINK else None


class MergedTree:
    """The merged tree of the layers so far."""

    def __init__(self) -> None:
        self.node = _directory()
        self._layer = -1
        # The paths that the current layer has added, and their parents: its own whiteouts do not remove them.
        self._upper: set[str] = set()

    def begin(self) -> None:
        """Begin the next layer."""
        self._layer += 1
        self._upper = set()

    def apply(self, member: Member, ordinal: int, layer: str) -> None:
        """Apply one member. Raises BuildError, naming `layer` and the path, when the member is invalid."""
        parts = _clean(member.name)
        if parts and parts[0].startswith(_AUFS) and parts[0] != _OPAQUE:
            return  # aufs's own bookkeeping, in layers from old daemons
        try:
            self._apply(member, parts, ordinal)
        except _Refused as error:
            raise BuildError(f"{layer}: {'/'.join(parts) or '/'}: {error}") from None

    def has(self, path: str) -> bool:
        """Return whether an entry exists at `path`; links among its parents are resolved, `path` itself is not."""
        return self._named(path) is not None

    def is_file(self, path: str) -> bool:
        """Return whether `path` leads to a regular file; symbolic links are resolved within the root."""
        try:
            node = self._at(self._resolve(path.split("/")))
        except _Refused:
            return False
        return node is not None and node.member is not None and node.member.kind == FILE

    def walk(self) -> list[tuple[str, Node]]:
        """Return the paths with their nodes, sorted by path; the root, "", comes first."""
        found = [("", self.node)]
        for path, node in found:  # which grows meanwhile
            found += [(f"{path}/{name}".lstrip("/"), child) for name, child in (node.children or {}).items()]
        return sorted(found, key=lambda item: item[0])

    def _apply(self, member: Member, parts: list[str], ordinal: int) -> None:
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
        parent = self._make(folder)
        assert parent.children is not None
        old = parent.children.get(name)
        if old is not None and old.children is not None and member.kind == DIR:
            old.member, old.layer, old.ordinal = member, self._layer, ordinal
        else:
            parent.children.pop(name, None)
            parent.children[name] = self._new(member, ordinal)
        self._mark([*folder, name])

    def _new(self, member: Member, ordinal: int) -> Node:
        if member.kind == HARDLINK:
            node = self._named(member.link)
            if node is None:
                raise _Refused(f"a hard link to {member.link!r}, which is not there")
            if node.children is not None:
                raise _Refused(f"a hard link to {member.link!r}, a directory")
            return node
        if member.kind == SYMLINK and not member.link:
            raise _Refused("a symbolic link to nothing")
        if member.kind == SYMLINK and len(os.fsencode(member.link)) > _PATH_MAX:
            raise _Refused("a symbolic link longer than Linux allows")
        return Node(member, self._layer, ordinal, {} if member.kind == DIR else None)

    def _whiteout(self, folder: list[str], name: str) -> None:
        opaque = name == _OPAQUE
        hidden = name.removeprefix(_WHITEOUT)
        if hidden in ("", ".", ".."):
            raise _Refused("a whiteout without a name")
        top = folder if opaque else [*folder, hidden]
        node = self._at(top)
        if node is None:
            return
        path = "/".join(top)
        if not opaque and path not in self._upper:
            parent = self._at(folder)
            assert parent is not None and parent.children is not None
            del parent.children[hidden]
            return
        # The paths that this layer has added stay, with their parents; all others are removed.
        folders = [(path, node)]
        for path, node in folders:  # which grows meanwhile
            for name, child in list((node.children or {}).items()):
                below = f"{path}/{name}".lstrip("/")
                if below not in self._upper:
                    assert node.children is not None
                    del node.children[name]
                elif child.children is not None:
                    folders.append((below, child))

    def _resolve(self, parts: list[str]) -> list[str]:
        """Resolve symbolic links in `parts` within the root; parts that do not exist are kept."""
        nodes = [self.node]  # the nodes of `done` as far as they exist, the root first
        done: list[str] = []
        todo = parts[::-1]
        links = 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if done:
                    done.pop()
                    del nodes[len(done) + 1 :]
                continue
            children = nodes[-1].children if len(nodes) == len(done) + 1 else None
            node = children.get(part) if children is not None else None
            target = node.target if node is not None else None
            if target is None:
                done.append(part)
                if node is not None:
                    nodes.append(node)
                continue
            links += 1
            if links > _LINKS:
                raise _Refused("too many symbolic links on the way")
            if target.startswith("/"):
                done, nodes = [], [self.node]
            todo += target.split("/")[::-1]
        return done

    def _named(self, path: str) -> Node | None:
        """Return the node at `path`; links among its parents are resolved, `path` itself is not."""
        parts = _clean(path)
        return self._at(self._resolve(parts[:-1]) + parts[-1:])

    def _at(self, parts: list[str]) -> Node | None:
        """Return the node at a path without symbolic links."""
        node: Node | None = self.node
        for part in parts:
            if node is None or node.children is None:
                return None
            node = node.children.get(part)
        return node

    def _make(self, folder: list[str]) -> Node:
        """Return the directory at a path without symbolic links; missing directories are created.

        A lower layer's file in the way is replaced, as a mounted overlay would hide it.
        """
        node = self.node
        for depth, part in enumerate(folder, 1):
            assert node.children is not None
            child = node.children.get(part)
            if child is None or child.children is None:
                path = "/".join(folder[:depth])
                if child is not None and path in self._upper:
                    raise _Refused(f"{path} is not a directory")
                child = node.children[part] = _directory()
            node = child
        return node

    def _mark(self, parts: list[str]) -> None:
        path = "/".join(parts)
        while path and path not in self._upper:
            self._upper.add(path)
            path = path.rpartition("/")[0]


class _Refused(Exception):
    """The fault of a member, without the member's name."""


def _directory() -> Node:
    return Node(None, -1, -1, {})


def _clean(name: str) -> list[str]:
    """Return the parts of a path below the root; ".." at the root has no effect."""
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return parts


def _check(folder: list[str], name: str) -> None:
    path = "/".join([*folder, name])
    size = len(path) if path.isascii() else len(os.fsencode(path))
    if size > _PATH_MAX or (size > _NAME_MAX and any(len(os.fsencode(part)) > _NAME_MAX for part in (*folder, name))):
        raise _Refused("a path longer than Linux allows")
