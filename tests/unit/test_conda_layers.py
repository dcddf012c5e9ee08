"""conda packages as layers: where each file goes, what prefixes become, which packages are refused."""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.conda_package import PLACEHOLDER
from lab.conda_trees import MTIME, SCHEME, Item, Node, located, named, nodes_of, package, record_rows

from envbuild.artifacts.conda_survey import conda_packages
from envbuild.errors import BuildError
from envbuild.image.entry import HARDLINK
from envbuild.image.layer import header
from envbuild.layers.conda import conda_tree
from envbuild.layers.conda_files import installed_paths
from envbuild.layers.conda_package import read_info, replaced_binary, replaced_text
from envbuild.layers.layer_cache import recorded

FORMS = [".conda", ".tar.bz2"]
SYMLINK, LINK = tarfile.SYMTYPE, tarfile.LNKTYPE
POINT = "tool = tool.cli:App.run"


def tree(path: Path, without: Sequence[str] = ()) -> tuple[dict[str, Node], dict[str, Any]]:
    """The nodes of a package's tree, and the rows of its record by path."""
    nodes, records = nodes_of(conda_tree(named(path), SCHEME, MTIME, frozenset(without)))
    assert len(records) == 1
    return nodes, dict(record_rows(records.values()))


def contents(path: Path) -> dict[str, bytes]:
    items = conda_tree(named(path), SCHEME, MTIME)
    return {e.path: c.read() for e, c in items if c is not None}


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size
    yield data[at:]


def strings_replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    """Binary replacement as its definition reads: each string that a NUL ends, by itself."""
    strings = data.split(b"\0")
    return b"\0".join(s.replace(old, new).ljust(len(s), b"\0") for s in strings)


@given(
    st.lists(st.sampled_from([b"/aab", b"/a", b"\0", b"x", b"/aa", b"b:"]), max_size=40),
    st.lists(st.integers(0, 5), max_size=30),
)
def test_prefixes_are_replaced_wherever_reading_cuts_the_file(words: list[bytes], sizes: list[int]) -> None:
    data, old, new = b"".join(words), b"/aab", b"/e"
    assert b"".join(replaced_text(cut(data, sizes), old, new)) == data.replace(old, new)
    binary = b"".join(replaced_binary(cut(data, sizes), old, new))
    assert binary == strings_replaced(data, old, new) and len(binary) == len(data)


def test_a_prefix_longer_than_its_placeholder_is_refused(tmp_path: Path) -> None:
    item = Item("lib/x.so", b"/p\0")
    row = {**item.row(), "file_mode": "binary", "prefix_placeholder": "/p"}
    made = package(tmp_path, [item], rows=[row])
    with pytest.raises(BuildError, match=r"lab-1.0-0.conda: lib/x.so: .* only 2 bytes"):
        tree(made)


def test_an_endless_string_with_the_prefix_is_refused_instead_of_held_in_memory() -> None:
    chunks = (b"/old" + b"x" * (1 << 20) for _ in range(40))
    with pytest.raises(BuildError, match="a string of more than"):
        for _ in replaced_binary(chunks, b"/old", b"/new", "x"):
            pass


# ---- places, modes, links, records


@pytest.mark.parametrize("suffix", FORMS)
def test_files_of_a_noarch_package_go_where_python_has_them(tmp_path: Path, suffix: str) -> None:
    script = f"#!{PLACEHOLDER}/bin/python\n".encode()
    items = [
        Item("site-packages/tool/cli.py", b"class App: pass\n"),
        Item("site-packages/tool/__pycache__/cli.cpython-311.pyc", b"stale"),
        Item("site-packages/only.pyc", b"no source"),
        Item("python-scripts/old-tool", script, 0o775, prefix="text"),
        Item("share/doc.txt", b"doc", 0o600),
    ]
    made = package(tmp_path, items, noarch="python", entry_points=[POINT], suffix=suffix)
    nodes, rows = tree(made)
    modes = {path: node.mode for path, node in nodes.items()}
    assert modes == {
        "lib/python3.11/site-packages/tool/cli.py": 0o644,
        "lib/python3.11/site-packages/only.pyc": 0o644,
        "bin/old-tool": 0o755,
        "bin/tool": 0o755,
        "share/doc.txt": 0o644,
        "conda-meta/lab-1.0-0.json": 0o644,
    }
    assert rows.keys() == nodes.keys() - {"conda-meta/lab-1.0-0.json"}
    found = contents(made)
    assert found["opt/env/bin/old-tool"] == b"#!/opt/env/bin/python\n"
    text = found["opt/env/bin/tool"].decode()
    assert text.startswith("#!/opt/env/bin/python3.11\n")
    assert "from tool.cli import App\n" in text and "sys.exit(App.run())\n" in text
    assert sorted(installed_paths(read_info(made), SCHEME, "x")) == sorted(rows)


def test_the_record_is_canonical_and_tells_what_is_installed(tmp_path: Path) -> None:
    binary = f"\x7fELF{PLACEHOLDER}/lib:{PLACEHOLDER}/x\0end".encode()
    items = [
        Item("lib/x.so.1", binary, 0o775, prefix="binary"),
        Item("lib/x.so", link="x.so.1", kind=SYMLINK),
        Item("lib/x.pc", f"prefix={PLACEHOLDER}".encode(), prefix="text"),
    ]
    file = located(package(tmp_path, items, depends=["libc >=2"]))
    nodes, records = nodes_of(conda_tree(file, SCHEME, MTIME))
    (text,) = records.values()
    record = json.loads(text)
    assert record["url"] == file.package.url and record["channel"] == file.package.channel
    assert (record["fn"], record["md5"], record["sha256"], record["size"]) == (
        file.path.name, file.package.md5, file.package.sha256, file.size,
    )  # fmt: skip
    assert record["depends"] == ["libc >=2"] and record["link"] == {"source": "", "type": 1}
    assert record["files"] == ["lib/x.pc", "lib/x.so", "lib/x.so.1"]
    assert str(tmp_path).encode() not in text and b"file:" not in text
    for row in record["paths_data"]["paths"]:
        node = nodes[row["_path"]]
        if node.kind == "file":
            assert row["sha256_in_prefix"] == node.what
    rows = {row["_path"]: row for row in record["paths_data"]["paths"]}
    assert rows["lib/x.so.1"]["size_in_bytes"] == len(binary)
    assert rows["lib/x.pc"]["size_in_bytes"] == len("prefix=/opt/env")
    assert nodes["lib/x.so"] == Node("symlink", 0, "x.so.1")


def test_the_digest_of_a_package_is_that_which_a_survey_finds_by_its_record(tmp_path: Path) -> None:
    items = [Item("site-packages/a.py", b"x"), Item("etc/a", PLACEHOLDER.encode(), prefix="text")]
    items.append(Item("site-packages/lab-1.0.dist-info/RECORD", b"a.py,,\n"))
    file = located(package(tmp_path, items, noarch="python", entry_points=["a = a:main"]))
    found: list[tuple[str, str, str]] = []
    _, records = nodes_of(recorded(conda_tree(file, SCHEME, MTIME), found))
    surveyed = conda_packages([json.loads(data) for data in records.values()])
    # The Python distribution inside of it is the conda package's.
    assert found == [(one.name, one.version, one.record) for one in surveyed]
    assert [name for name, _, _ in found] == ["lab"]


def hard_linked(folder: Path, suffix: str = ".conda") -> Path:
    items = [
        Item("bin/git", PLACEHOLDER.encode(), 0o755, prefix="text"),
        Item("bin/git-add", link="bin/git", kind=LINK, prefix="text"),
        Item("lib/a", b"same"),
        Item("lib/b", link="lib/a", kind=LINK),
    ]
    return package(folder, items, suffix=suffix)


@pytest.mark.parametrize("suffix", FORMS)
def test_hard_links_stay_links_with_the_mode_of_their_file(tmp_path: Path, suffix: str) -> None:
    made = hard_linked(tmp_path, suffix)
    links = {e.path: e for e, _ in conda_tree(named(made), SCHEME, MTIME) if e.kind == HARDLINK}
    assert {path: link.target for path, link in links.items()} == {
        "opt/env/bin/git-add": "opt/env/bin/git", "opt/env/lib/b": "opt/env/lib/a",
    }  # fmt: skip
    assert tarfile.TarInfo.frombuf(header(links["opt/env/bin/git-add"]), "utf-8", "strict").mode == 0o755  # fmt: skip
    _, rows = tree(made)
    assert rows["bin/git-add"]["sha256_in_prefix"] == rows["bin/git"]["sha256_in_prefix"]


def test_a_hard_link_to_a_file_that_another_package_keeps_is_a_file_of_its_own(tmp_path: Path) -> None:
    whole, _ = tree(hard_linked(tmp_path))
    nodes, rows = tree(hard_linked(tmp_path), without=["lib/a", "bin/git"])
    assert "lib/a" not in nodes and "lib/a" not in rows and "bin/git" not in rows
    assert nodes["lib/b"] == whole["lib/a"] and nodes["bin/git-add"] == whole["bin/git"]


@pytest.mark.parametrize("info_first", [True, False])
def test_packages_from_before_paths_json_are_read(tmp_path: Path, info_first: bool) -> None:
    items = [
        Item("bin/a b", f"#!{PLACEHOLDER}/bin/sh".encode(), 0o755),
        Item("bin/old", b"#!/opt/anaconda1anaconda2anaconda3/bin/sh", 0o755),
        Item("lib/link", link="../bin/old", kind=SYMLINK),
    ]
    info = {
        "paths.json": None,
        "files": b"bin/a b\nbin/old\nlib/link\n",
        "has_prefix": f'"{PLACEHOLDER}" "text" "bin/a b"\nbin/old\n'.encode(),
    }
    made = package(tmp_path, items, suffix=".tar.bz2", info=info, info_first=info_first)
    found = contents(made)
    assert found["opt/env/bin/a b"] == b"#!/opt/env/bin/sh" == found["opt/env/bin/old"]
    nodes, rows = tree(made)
    assert nodes["lib/link"].what == "../bin/old" and rows["lib/link"]["path_type"] == "softlink"


# ---- what is refused

FILE = Item("lib/a", b"content")


def changed(**more: Any) -> list[dict[str, Any]]:
    return [{**FILE.row(), **more}]


@pytest.mark.parametrize("suffix", FORMS)
@pytest.mark.parametrize(
    "items, more, said",
    [
        ([], {"rows": [FILE.row()]}, r"lists files that the package does not contain: lib/a"),
        ([FILE], {"rows": changed(sha256="0" * 64)}, r"lib/a: not the file that"),
        ([FILE], {"rows": changed(size_in_bytes=3)}, r"lib/a: a file, which info/paths.json"),
        ([FILE], {"rows": changed(path_type="softlink")}, r"lib/a: a file, which"),
        ([FILE], {"rows": changed(path_type="fifo")}, r"lib/a: unknown path_type 'fifo'"),
        ([FILE], {"rows": changed(_path="../a")}, r"'../a' is not a path inside"),
        ([FILE], {"rows": changed(_path="/etc/passwd")}, r"'/etc/passwd' is not a path inside"),
        ([FILE], {"rows": changed(_path=7)}, r"7 is not a path inside"),
        ([FILE], {"rows": changed(sha256="zz")}, r"'zz' is not a sha256"),
        ([FILE], {"rows": changed(prefix_placeholder="/p", file_mode="x")}, r"unknown file_mode"),
        ([FILE, Item("../../etc/x", b"")], {}, r"'../../etc/x' is not a path inside"),
        ([FILE, Item("/etc/x", b"")], {}, r"'/etc/x' is not a path inside"),
        ([FILE, FILE], {"rows": [FILE.row()]}, r"lib/a: comes twice"),
        ([Item("lib/f", kind=tarfile.FIFOTYPE)], {}, r"lib/f: a fifo, which"),
        ([Item("lib/f", link="lib/gone", kind=LINK)], {}, r"a link to 'lib/gone', which is not"),
        ([FILE], {"info": {"paths.json": b"{"}}, r"info/paths.json: not JSON"),
        ([FILE], {"info": {"paths.json": b"[]"}}, r"info/paths.json: not a JSON object"),
        ([FILE], {"info": {"paths.json": b'{"paths": 1}'}}, r"has no list of paths"),
        ([FILE], {"info": {"paths.json": None}}, r"it has no info/paths.json"),
        ([FILE], {"info": {"index.json": None}}, r"it has no info/index.json"),
        ([FILE], {"info": {"index.json": b'{"name": "x"}'}}, r"it is x None None, locked is lab"),
        ([FILE], {"noarch": "python", "entry_points": ["../x = a:b"]}, r"entry point '../x = a:b'"),
        ([FILE], {"noarch": "python", "entry_points": ["x = a;b:c"]}, r"entry point 'x = a;b:c'"),
    ],
)  # fmt: skip
def test_a_package_that_is_not_what_it_says_is_refused_by_name(
    tmp_path: Path, items: list[Item], more: dict[str, Any], said: str, suffix: str
) -> None:
    made = package(tmp_path, items, suffix=suffix, **more)
    with pytest.raises(BuildError, match=said) as caught:
        tree(made)
    assert caught.value.message.startswith(made.name)


@pytest.mark.parametrize("suffix", FORMS)
@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(0, 255))
def test_a_damaged_package_is_refused_or_gives_what_it_holds(suffix: str, at: float, flip: int) -> None:
    """Cut short (0) or with one byte changed: never a traceback, never another tree."""
    with tempfile.TemporaryDirectory() as folder:
        made = package(Path(folder), [FILE, Item("lib/b", bytes(range(256)) * 9)], suffix=suffix)
        whole, _ = tree(made)
        data = bytearray(made.read_bytes())
        place = int(at * len(data))
        if flip:
            data[place] ^= flip
        else:
            del data[place:]
        made.write_bytes(data)
        try:
            nodes, _ = tree(made)
        except BuildError as error:
            assert error.message.startswith(made.name)
        else:
            record = "conda-meta/lab-1.0-0.json"  # it holds the file's digest, which is another
            assert flip and nodes.keys() == whole.keys()
            assert {k: v for k, v in nodes.items() if k != record and v != whole[k]} == {}


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"not a package at all", b"PK\5\6" + bytes(18)])
@pytest.mark.parametrize("suffix", FORMS)
def test_what_is_no_package_is_refused(tmp_path: Path, suffix: str, data: bytes) -> None:
    path = tmp_path / f"lab-1.0-0{suffix}"
    path.write_bytes(data)
    with pytest.raises(BuildError, match=r"lab-1\.0-0"):
        tree(path)
