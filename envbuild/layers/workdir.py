"""The folder in which a container starts: what the last layer of an image adds for it to the layers below."""

from __future__ import annotations

from collections.abc import Sequence

from envbuild.image.entry import DIR, Entry, path_parts
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.tar import Member
from envbuild.image.tree import MergedTree


def missing_folder(
    path: str, layers: Sequence[Sequence[Member]], limits: ImageLimits | None, mtime: int
) -> tuple[list[str], list[Entry]]:
    """Return what a layer on top of `layers` (lowest first) needs so that `path` is a folder: it, and its parents.

    Nothing is needed where the folder is there, also by way of links, as it keeps its mode, owner and content; nor for
    a missing parent. Those that are there are returned as they are: a folder in a layer replaces mode and owner.
    Raises BuildError when the layers cannot be merged.
    """
    tree = MergedTree(Quota(limits))
    for number, members in enumerate(layers, 1):
        tree.add(f"layer {number}", members)
    done, node = tree.resolved(path_parts(path)), tree.node
    parents: list[Entry] = []
    for depth, part in enumerate(done, 1):
        below = node.children.get(part)
        if below is None or below.kind != DIR:
            return ["/" + "/".join(done)], parents
        if one := below.member:
            there = "/".join(done[:depth])
            parents.append(Entry(there, DIR, one.mode, 0, "", one.uid, one.gid, mtime, (0, 0), one.xattrs))
        node = below
    return [], []
