"""The folder in which a container starts: what the last layer of an image adds for it to the layers below."""

from __future__ import annotations

from collections.abc import Sequence

from envbuild.image.entry import DIR, SYMLINK, Entry, path_parts
from envbuild.image.quota import Quota
from envbuild.image.tar_stream import Member
from envbuild.image.tree import MergedTree, Node
from envbuild.site.tables import LimitsTable

_LINKS = 40  # as many as Linux follows in one path


def missing_folder(
    path: str, layers: Sequence[Sequence[Member]], limits: LimitsTable | None, mtime: int
) -> tuple[list[str], list[Entry]]:
    """Return what a layer on top of `layers` (lowest first) needs so that `path` is a folder: it, and its parents.

    Nothing is needed where the folder is there, also by way of links, as it keeps its mode, owner and content; nor for
    a missing parent. Those that are there are returned as they are: a folder in a layer replaces mode and owner.
    Raises BuildError when the layers cannot be merged.
    """
    tree = MergedTree(Quota(limits))
    for number, members in enumerate(layers, 1):
        tree.add(f"layer {number}", members)
    nodes: list[Node] = [tree.node]  # of `done`, as far as they are there
    done: list[str] = []
    todo, links = path_parts(path)[::-1], 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            del done[-1:]
            del nodes[len(done) + 1 :]
            continue
        node = nodes[-1].children.get(part) if len(nodes) == len(done) + 1 else None
        if node is not None and node.member is not None and node.kind == SYMLINK and links < _LINKS:
            links += 1
            target = node.member.link
            if target.startswith("/"):
                done, nodes = [], [tree.node]
            todo += target.split("/")[::-1]
            continue
        done.append(part)
        if node is not None and node.kind == DIR:
            nodes.append(node)
    if len(nodes) == len(done) + 1:
        return [], []
    parents = []
    for depth, node in enumerate(nodes[1:], 1):
        if one := node.member:
            there = "/".join(done[:depth])
            parents.append(Entry(there, DIR, one.mode, 0, "", one.uid, one.gid, mtime, (0, 0), one.xattrs))
    return ["/" + "/".join(done)], parents
