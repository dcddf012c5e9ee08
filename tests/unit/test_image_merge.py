"""Layers merged: the rules one by one. tests/real/test_umoci.py compares whole stacks with umoci."""

from __future__ import annotations

import dataclasses
import gzip
import io
from collections.abc import Callable
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.merged import Merged, merge

from envbuild.base.errors import BuildError
from envbuild.image.entry import CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.layer import decompressed, header
from envbuild.image.squashfs.segment import of_entry
from envbuild.image.tar import Member, tar_items
from envbuild.image.tree import MergedTree
from examples import examples

Layer = list[Entry]


def tar(layer: Layer, number: int) -> bytes:
    data = []
    for ordinal, entry in enumerate(layer):
        content = f"{number}.{ordinal}".encode() if entry.kind == FILE else b""
        data += [header(dataclasses.replace(entry, size=len(content))), content]
        data.append(bytes(-len(content) % 512))
    return b"".join(data) + bytes(1024)


def opener(data: bytes, seekable: bool = True) -> Callable[[], BinaryIO]:
    if seekable:
        return lambda: io.BytesIO(data)
    return lambda: decompressed(io.BytesIO(gzip.compress(data)), "lab")


def merged(*layers: Layer, seekable: bool = True) -> Merged:
    return merge([(f"layer {n}", opener(tar(layer, n), seekable)) for n, layer in enumerate(layers)])


def contents(tree: Merged) -> dict[str, str]:
    """Each path: `layer.member` for a file as its content says, else its kind and target."""
    found = {path: f"{item.entry.kind} {item.entry.target}".strip() for path, item in tree.entries.items() if path}
    for path, content in tree.contents().items():
        found[path] = content.decode() + found[path].removeprefix("file")
    return found


def a(path: str, target: str = "", kind: str | None = None, **more: Any) -> Entry:
    """`x` is a file, `x/` a directory; with a target it is a symbolic link, or what `kind` says."""
    kind = kind or (SYMLINK if target else DIR if path.endswith("/") else FILE)
    return Entry(path.rstrip("/"), kind, target=target, **more)


def hard(path: str, target: str) -> Entry:
    return Entry(path, HARDLINK, target=target)


@pytest.mark.parametrize("seekable", [True, False])
@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([], {}),
        ([[]], {}),
        ([[a("x/")], [a("x/y")]], {"x": "dir", "x/y": "1.0"}),
        ([[a("x/y/z")]], {"x": "dir", "x/y": "dir", "x/y/z": "0.0"}),
        # later wins, within a layer and between layers
        ([[a("x"), a("x")]], {"x": "0.1"}),
        ([[a("x"), a("y")], [a("x")]], {"x": "1.0", "y": "0.1"}),
        ([[a("x/y")], [a("x")]], {"x": "1.0"}),
        ([[a("x")], [a("x/")]], {"x": "dir"}),
        ([[a("x/y")], [a("x/")]], {"x": "dir", "x/y": "0.0"}),
        ([[a("x/y")], [a("x")], [a("x/")]], {"x": "dir"}),
        ([[a("x", "y")], [a("x/")]], {"x": "dir"}),
        ([[a("x")], [a("x/y")]], {"x": "dir", "x/y": "1.0"}),
        # whiteouts: of lower layers only, wherever they stand
        ([[a("x"), a("y")], [a(".wh.x")]], {"y": "0.1"}),
        ([[a("x/y"), a("x/z")], [a("x/.wh.y")]], {"x": "dir", "x/z": "0.1"}),
        ([[a("x/y")], [a(".wh.x")]], {}),
        ([[a("x")], [a(".wh.x"), a("x")]], {"x": "1.1"}),
        ([[a("x")], [a("x"), a(".wh.x")]], {"x": "1.0"}),
        ([[a("x"), a(".wh.x")]], {"x": "0.0"}),
        ([[a("x/y"), a("x/z")], [a("x/n"), a(".wh.x")]], {"x": "dir", "x/n": "1.0"}),
        ([[a(".wh.x"), a("no/.wh.x"), a("no/.wh..wh..opq")]], {}),
        ([[a("x")], [a(".wh.x")], [a("x/y")]], {"x": "dir", "x/y": "2.0"}),
        ([[a("x")], [a("x/.wh.y")]], {"x": "0.0"}),
        # opaque whiteouts
        ([[a("x/y")], [a("x/.wh..wh..opq"), a("x/n")]], {"x": "dir", "x/n": "1.1"}),
        ([[a("x/y")], [a("x/n"), a("x/.wh..wh..opq")]], {"x": "dir", "x/n": "1.0"}),
        ([[a("x/d/y"), a("x/e/y")], [a("x/d/n"), a("x/.wh..wh..opq")]], {"x": "dir", "x/d": "dir", "x/d/n": "1.0"}),
        ([[a("x"), a("y/z")], [a(".wh..wh..opq"), a("n")]], {"n": "1.1"}),
        # aufs' bookkeeping is no content
        ([[a(".wh..wh.plnk/"), a(".wh..wh.plnk/1.2"), a(".wh..wh.aufs"), a("x")]], {"x": "0.3"}),
        # hard links: to what the name meant then
        ([[a("x"), hard("y", "x")]], {"x": "0.0", "y": "0.0hardlink x"}),
        ([[a("x"), hard("a", "./x")]], {"a": "0.0", "x": "0.0hardlink a"}),
        ([[a("x"), hard("y", "/x")], [a("x")]], {"x": "1.0", "y": "0.0"}),
        ([[a("x")], [hard("y", "x")], [a(".wh.x")]], {"y": "0.0"}),
        ([[a("x")], [hard("y", "x"), a("x")]], {"x": "1.1", "y": "0.0"}),
        ([[a("x", "z"), hard("y", "x")]], {"x": "symlink z", "y": "hardlink x"}),
        ([[a("x"), a("x"), hard("y", "x"), hard("z", "y")]], {"x": "0.1", "y": "0.1hardlink x", "z": "0.1hardlink x"}),
        # names are taken below the root, and through the tree's own links
        ([[a("./x"), a("/y"), a("../../z"), a("d/../../w/")]], {"x": "0.0", "y": "0.1", "z": "0.2", "w": "dir"}),
        ([[a("l", "/etc")], [a("l/x")]], {"l": "symlink /etc", "etc": "dir", "etc/x": "1.0"}),
        ([[a("d/l", "../../../e")], [a("d/l/x")]], {"d": "dir", "d/l": "symlink ../../../e", "e": "dir", "e/x": "1.0"}),
        ([[a("d/l", "/e"), a("d/l/x")]], {"d": "dir", "d/l": "symlink /e", "e": "dir", "e/x": "0.1"}),
        (
            [[a("k", "e"), a("d/l", "../k"), a("d/l/x")]],
            {"k": "symlink e", "d": "dir", "d/l": "symlink ../k", "e": "dir", "e/x": "0.2"},
        ),
        ([[a("e/x"), a("l", "e")], [a("l/.wh.x")]], {"e": "dir", "l": "symlink e"}),
        (
            [[a("e/x"), a("l", "e"), hard("h", "l/x")]],
            {"e": "dir", "e/x": "0.0", "h": "0.0hardlink e/x", "l": "symlink e"},
        ),
    ],
)
def test_the_tree_is_what_the_layers_say(layers: list[Layer], expected: dict[str, str], seekable: bool) -> None:
    assert contents(merged(*layers, seekable=seekable)) == expected


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (hard("y", "none"), "layer 1: y: a hard link to 'none', which is missing"),
        (hard("y", "../../../etc/passwd"), "layer 1: y: a hard link to '../../../etc/passwd', which"),
        (hard("y", "d"), "layer 1: y: a hard link to 'd', a directory"),
        (hard("y", "/"), "layer 1: y: a hard link to '/', a directory"),
        (hard("f", "f"), "layer 1: f: a hard link to 'f', which is missing"),
        (a("", kind=FILE), "layer 1: /: the root can be nothing but a directory"),
        (a("d/../.", "x"), "layer 1: /: the root can be nothing but a directory"),
        (a("d/.wh."), "layer 1: d/.wh.: a whiteout without a name"),
        (a(".wh..."), "layer 1: .wh...: a whiteout without a name"),
        (a("loop/x"), "layer 1: loop/x: too many symbolic links"),
        (a("n" * 256), "a path longer than Linux allows"),
        (a("é" * 128), "a path longer than Linux allows"),
        (a("d/" * 2100 + "x"), "a path longer than Linux allows"),
        (a("l", "t" * 4096), "a symbolic link longer than Linux allows"),
        (a("l", kind=SYMLINK), "layer 1: l: a symbolic link to nothing"),
        (a("new/x"), "layer 1: new/x: new is not a directory"),
    ],
)
def test_what_makes_no_sense_is_refused_by_layer_and_path(entry: Entry, says: str) -> None:
    with pytest.raises(BuildError) as caught:
        merged([a("d/"), a("f"), a("loop", "./loop")], [a("new"), entry])
    assert says in caught.value.message


def test_metadata_is_of_the_last_that_says_it() -> None:
    tree = merged(
        [a("", kind=DIR, mode=0o700), a("d/", mode=0o700, uid=5), a("d/x"), a("l", "d", mode=0o600)],
        [Entry("d", DIR, 0o1777, gid=7, mtime=9, xattrs=(("user.b", b"\xff"), ("user.a", b"")))],
        [a("d/y"), Entry("n", CHAR, 0o666, device=(1, 3))],
    )
    assert list(tree.entries) == ["", "d", "d/x", "d/y", "l", "n"]
    # An empty pax value says nothing.
    assert tree.entries["d"].entry == Entry("d", DIR, 0o1777, gid=7, mtime=9, xattrs=(("user.b", b"\xff"),))
    assert (tree.entries["d"].layer, tree.entries["d"].member) == (1, 0)
    assert tree.entries[""].entry.mode == 0o700
    assert tree.entries["l"].entry.mode == 0o777
    assert tree.entries["n"].entry.device == (1, 3)
    assert tree.entries["d/y"].layer == 2


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/usr/bin/python3", True),
        ("/bin/python3", True),
        ("usr/bin/python", True),
        ("/usr/bin/../bin/same", True),
        ("/usr/bin", False),
        ("/none", False),
        ("/usr/bin/python3/x", False),
        ("/loop", False),
        ("/pipe", False),
        ("/out", True),
    ],
)
def test_a_file_is_found_through_links_within_the_root(path: str, found: bool) -> None:
    layer = [
        a("usr/bin/python3.11"),
        a("usr/bin/python3", "python3.11"),
        a("usr/bin/python", "/bin/python3"),
        hard("usr/bin/same", "usr/bin/python3.11"),
        a("bin", "usr/bin"),
        a("loop", "loop"),
        a("pipe", kind=FIFO),
        a("out", "../../usr/bin/python3"),
    ]
    tree = MergedTree()
    tree.add("lab", map(of_entry, layer))
    assert tree.is_file(path) == found


def test_a_directory_that_no_layer_describes_is_plain() -> None:
    for path in ("", "x", "x/y"):
        item = merged([a("x/y/z")]).entries[path]
        assert (item.entry, item.layer, item.member) == (Entry(path, DIR, 0o755), -1, -1)


def test_content_that_is_not_read_is_passed_over() -> None:
    data = tar([a(name) for name in "abcdef"], 0)
    for seekable in (True, False):
        found = []
        for number, (member, content) in enumerate(tar_items(opener(data, seekable)(), "lab")):
            assert content is not None
            found.append((member.name, content.read(number % 3).decode()))
        assert found == [("a", ""), ("b", "0"), ("c", "0."), ("d", ""), ("e", "0"), ("f", "0.")]


def test_a_corrupt_end_of_a_compressed_layer_is_seen() -> None:
    """Behind the archive's own end: nothing there would be asked for otherwise."""
    packed = gzip.compress(tar([a("x")], 0) + bytes(3 << 20))
    with pytest.raises(BuildError, match="lab: the gzip data is corrupt"):
        merge([("lab", lambda: decompressed(io.BytesIO(packed[:-8] + bytes(8)), "lab"))])


def test_deep_and_wide_trees_are_merged() -> None:
    deep = "/".join("d" * 2000)
    tree = merged([a(deep), *[a(f"w/{n}") for n in range(3000)]], [a(".wh.w"), a(f"{deep}2")])
    assert len(tree.entries) == 2002
    assert len(merged([a(deep)], [a(".wh.d")]).entries) == 1


PARTS = st.sampled_from(["a", "b", "c", "..", ".", "", ".wh.a", ".wh..wh..opq", "é", "x" * 300])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
MEMBERS = st.tuples(PATHS, st.sampled_from([DIR, FILE, SYMLINK, HARDLINK]), PATHS)


@examples(400)
@given(st.lists(st.lists(MEMBERS, max_size=12), min_size=1, max_size=3))
def test_a_member_beside_the_one_before_is_applied_like_any_other(layers: list[list[tuple[str, str, str]]]) -> None:
    """The tree remembers the folder of the last member; here it is made to forget it."""

    def applied(forget: bool) -> list[object]:
        tree, found = MergedTree(), list[object]()
        for number, layer in enumerate(layers):
            tree.begin()
            for ordinal, (name, kind, link) in enumerate(layer):
                member = Member(name, kind, 0o644, 0, 0, 0, 0, link, (0, 0))
                try:
                    tree.apply(member, ordinal, f"layer {number}")
                except BuildError as error:
                    return [*found, error.message]
                if forget:
                    tree._parent = None
                found.append(tree.entries())
        return found

    assert applied(forget=False) == applied(forget=True)
