"""Resolving on small hand-made package lists."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.debian import stanza

from envbuild.base.errors import LockError
from envbuild.debian.base import PackageIndex, resolve


@pytest.fixture
def index(tmp_path: Path) -> PackageIndex:
    """A suite with every kind of relationship."""
    return made(
        tmp_path,
        stanza("app", depends="lib (>= 2), awk, tool:any | other"),
        stanza("lib", "2.1", pre_depends="libc6"),
        stanza("libc6", depends="libgcc-s1"),
        stanza("libgcc-s1", depends="libc6"),  # a cycle
        stanza("gawk", provides="awk"),
        stanza("mawk", provides="awk"),
        stanza("other"),
        stanza("tool"),
        stanza("old", depends="lib (<< 2)"),
        stanza("missing", depends="app, nowhere | nobody (>= 3)"),
        stanza("api-user", depends="api (>= 2)"),
        stanza("api1", provides="api (= 1)"),
        stanza("api2", provides="api (= 2.5)"),
        stanza("api-plain", provides="api"),
        stanza("scripts", depends="debconf (>= 0.5) | debconf-2.0, lib"),
        stanza("debconf", "1.5", depends="perl"),
        stanza("cdebconf", provides="debconf-2.0"),
        stanza("perl"),
        stanza("enemy", conflicts="lib (>= 2)"),
        stanza("breaker", breaks="awk"),
        stanza("foreign", depends="lib:arm64 | tool"),
        stanza("mta-a", provides="mta", conflicts="mta"),
        stanza("mta-b", provides="mta", conflicts="mta"),
    )


def made(tmp_path: Path, *stanzas: str, archive: str = "debian") -> PackageIndex:
    path = tmp_path / "Packages.xz"
    path.write_bytes(lzma.compress(("\n\n".join(stanzas) + "\n\n").encode()))
    index = PackageIndex()
    index.add(path, archive)
    return index


def names(index: PackageIndex, *wanted: str, without: tuple[str, ...] = ()) -> list[str]:
    return [package.name for package in resolve(index, wanted, without, "amd64")]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (["libc6"], ["libc6", "libgcc-s1"]),
        (["app"], ["app", "gawk", "lib", "libc6", "libgcc-s1", "tool"]),
        (["app", "mawk", "other"], ["app", "lib", "libc6", "libgcc-s1", "mawk", "other"]),
        (["api-user"], ["api-user", "api2"]),
        (["foreign"], ["foreign", "tool"]),
        (["mta-a"], ["mta-a"]),
        ([], []),
    ],
    ids=[
        "cycle",
        "first alternative, provider by name",
        "a chosen one will do",
        "versioned provides",
        "another architecture",
        "it excludes its own kind",
        "nothing",
    ],
)
def test_what_is_needed_is_chosen(index: PackageIndex, wanted: list[str], chosen: list[str]) -> None:
    assert names(index, *wanted) == chosen
    assert names(index, *reversed(wanted), *wanted) == chosen


def test_what_is_left_out_brings_neither_its_needs_nor_its_substitute(index: PackageIndex) -> None:
    assert names(index, "scripts", without=("debconf",)) == ["lib", "libc6", "libgcc-s1", "scripts"]
    assert "perl" in names(index, "scripts")


def test_a_wanted_package_is_never_left_out(index: PackageIndex) -> None:
    assert names(index, "debconf", "scripts", without=("debconf", "perl", "lib")) == ["debconf", "scripts"]


@pytest.mark.parametrize(
    ("wanted", "message", "hint"),
    [
        (["libgc-s1"], "no package 'libgc-s1'", "did you mean libgcc-s1"),
        (["awk"], "no package 'awk'", "gawk, mawk provide it"),
        (["old"], r"nothing meets lib \(<< 2\), needed by old; lib is 2.1", "mirror"),
        (["missing"], r"nothing meets nowhere \| nobody \(>= 3\), needed by missing; no package", "mirror"),
        (["enemy", "app"], "enemy 1 conflicts with lib 2.1.*\n +enemy\n +lib, needed by app", "leave one"),
        (["breaker", "mawk"], "breaker 1 breaks with mawk 1", "leave one"),
        (["mta-a", "mta-b"], "mta-a 1 conflicts with mta-b 1", "leave one"),
    ],
)
def test_what_cannot_be_is_explained(index: PackageIndex, wanted: list[str], message: str, hint: str) -> None:
    with pytest.raises(LockError, match=message) as caught:
        names(index, *wanted)
    assert hint in str(caught.value.hint)


def test_the_chain_names_everyone_who_asked(tmp_path: Path) -> None:
    index = made(tmp_path, stanza("a", depends="b"), stanza("b", depends="c"), stanza("c", depends="d"))
    with pytest.raises(LockError, match="nothing meets d, needed by c, needed by b, needed by a;"):
        names(index, "a")


def test_the_newest_version_of_all_suites_is_taken_and_its_provides_alone_count(tmp_path: Path) -> None:
    index = made(tmp_path, stanza("lib", "1.9", provides="abi-9"), stanza("same", "1"))
    newer = tmp_path / "security.gz"
    newer.write_bytes(
        gzip.compress("\n\n".join([stanza("lib", "1.10", provides="abi-10"), stanza("same", "1")]).encode())
    )
    index.add(newer, "debian-security")
    chosen = resolve(index, ["lib", "same"], (), "amd64")
    assert [(p.version, p.archive) for p in chosen] == [("1.10", "debian-security"), ("1", "debian")]
    with pytest.raises(LockError):
        names(index, "abi-9")
    older = PackageIndex()
    older.add(newer, "debian-security")
    older.add(tmp_path / "Packages.xz", "debian")
    assert resolve(older, ["lib"], (), "amd64")[0].version == "1.10"


@pytest.mark.parametrize("data", [b"", b"no xz", lzma.compress(b"Package: a\nno version")])
def test_a_damaged_list_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "Packages.xz"
    path.write_bytes(data)
    if not data:  # an empty xz file is an end too early; a list of nothing is fine
        path.write_bytes(lzma.compress(b"Package: a\nVersion: 1\n")[:-4])
    with pytest.raises(LockError, match=r"Packages\.xz: not a list of packages"):
        PackageIndex().add(path, "debian")


letters = st.sampled_from("abcdefgh")


@given(st.dictionaries(letters, st.lists(letters, max_size=3), min_size=1))
def test_the_choice_is_closed_and_holds_nothing_else(graph: dict[str, list[str]]) -> None:
    import tempfile

    known = {name: [need for need in needs if need in graph] for name, needs in graph.items()}
    with tempfile.TemporaryDirectory() as folder:
        # Single letters are no names of packages.
        needs = {name: ", ".join(f"p{need}" for need in known[name]) for name in known}
        index = made(Path(folder), *(stanza(f"p{n}", depends=text) for n, text in needs.items()))
    start = sorted(graph)[0]
    reached, waiting = {start}, [start]
    while waiting:
        new = set(known[waiting.pop()]) - reached
        reached |= new
        waiting += new
    assert names(index, f"p{start}") == sorted(f"p{name}" for name in reached)
