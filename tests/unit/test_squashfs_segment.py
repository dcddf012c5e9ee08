"""Layers as segments: every content is found again, whatever threads, caches and archives did on the way."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.base.files import copy_span
from envbuild.cache.hashed import Digests
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK, Entry, Readable
from envbuild.image.layer import header
from envbuild.image.limits import Quota
from envbuild.image.squashfs import write
from envbuild.image.squashfs.model import BLOCK_SIZE, NO_FRAGMENT, SIZE_MASK, UNCOMPRESSED, codec_of, decompressor
from envbuild.image.squashfs.segment import CHUNK, Segment, load, of_entry, save, unpack, write_segment
from envbuild.image.tar import Member, tar_items
from envbuild.image.tree import MergedTree
from examples import examples

ZSTD = codec_of("zstd:1")
EDGES = (0, 1, 511, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, CHUNK + 5)
Items = Iterable[tuple[Member, Readable | None]]

# No digest is noted here: every file is hashed.
NOTHING_KNOWN = Digests(Path("/dev/null/none"))


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def content(kind: str, size: int, seed: int) -> bytes:
    if kind == "holes":
        # Some data, zeros in between, and in the end what does not fill a block.
        data = bytearray(size)
        data[size // 2 : size // 2 + 9] = noise(9, seed)[: len(data[size // 2 : size // 2 + 9])]
        return bytes(data)
    if kind == "text":
        return (f"line {seed} of a file\n".encode() * (size // 12 + 1))[:size]
    return bytes(size) if kind == "zeros" else noise(size, seed)


contents = st.builds(
    content,
    st.sampled_from(["holes", "text", "zeros", "noise"]),
    st.one_of(st.sampled_from(EDGES), st.integers(0, 70_000)),
    st.integers(0, 2),
)


def files(*data: bytes) -> list[tuple[Entry, bytes]]:
    return [(Entry(f"f{i}", size=len(each)), each) for i, each in enumerate(data)]


def items(tree: Sequence[tuple[Entry, bytes]]) -> Iterator[tuple[Member, Readable | None]]:
    for entry, data in tree:
        yield of_entry(entry), io.BytesIO(data) if entry.kind == FILE else None


def made(tree: Items, folder: Path, name: str = "segment", workers: int = 2) -> Segment:
    return write_segment(tree, folder / name, ZSTD, workers)


def read_back(segment: Segment, ordinal: int, number: int = 6) -> bytes:
    """A file's content as a reader of squashfs finds it."""
    stored, data = segment.path.read_bytes(), segment.data[ordinal]
    size, position, parts = segment.members[ordinal].size, data.start, []
    expand = decompressor(number)
    for place, word in enumerate(data.words):
        length = word & SIZE_MASK
        wanted = min(BLOCK_SIZE, size - place * BLOCK_SIZE)
        block = stored[position : position + length]
        parts.append(unpack(block, word, expand) if word else bytes(wanted))
        assert len(parts[-1]) == wanted
        position += length
    if data.fragment != NO_FRAGMENT:
        fragment = segment.fragments[data.fragment]
        block = stored[fragment.start : fragment.start + (fragment.word & SIZE_MASK)]
        parts.append(unpack(block, fragment.word, expand)[data.offset : data.offset + size])
    return b"".join(parts)


@examples(20)
@given(st.lists(contents, max_size=8))
def test_every_content_is_found_again_and_no_thread_makes_a_difference(data: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = made(items(files(*data)), folder, "1", 1)
        many = made(items(files(*data)), folder, "64", 64)
        assert one.path.read_bytes() == many.path.read_bytes()
        assert (one.data, one.fragments, one.size) == (many.data, many.fragments, many.size)
        assert one.size == one.path.stat().st_size
        for ordinal, each in enumerate(data):
            assert read_back(one, ordinal) == each
            for other, theirs in enumerate(data):
                same = one.data[ordinal].digest == one.data[other].digest
                assert same == (each == theirs)
        save(one, folder / "index")
        assert load(folder / "index", one.path, NOTHING_KNOWN) == one


@pytest.mark.parametrize("name", ["gzip", "xz:1", "lz4", "lz4:9", "zstd:3"])
def test_every_compressor_gives_back_what_it_took(name: str, tmp_path: Path) -> None:
    codec = codec_of(name)
    kinds = ["holes", "text", "zeros", "noise"]
    data = [content(kind, size, 3) for kind in kinds for size in (1, 9000, BLOCK_SIZE + 700)]
    segment = write_segment(items(files(*data)), tmp_path / "segment", codec, 2)
    assert [read_back(segment, i, codec.number) for i in range(len(data))] == data


def test_blocks_of_zeros_are_not_stored_and_noise_grows_by_nothing(tmp_path: Path) -> None:
    zeros, mixed = bytes(3 * BLOCK_SIZE + 77), bytes(BLOCK_SIZE) + noise(2 * BLOCK_SIZE)
    segment = made(items(files(zeros, mixed, noise(500))), tmp_path)
    assert segment.data[0].words == (0, 0, 0, 0) and segment.data[0].start == 0
    raw = UNCOMPRESSED | BLOCK_SIZE
    assert segment.data[1].words == (0, raw, raw)
    assert segment.fragments[0].word == UNCOMPRESSED | 500
    assert segment.size == 2 * BLOCK_SIZE + 500


def test_small_files_share_blocks_in_their_order_and_equal_ones_a_place(tmp_path: Path) -> None:
    small = [noise(60_000, seed) for seed in range(4)]
    segment = made(items(files(*small, small[1], b"")), tmp_path)
    places = [(segment.data[i].fragment, segment.data[i].offset) for i in range(5)]
    assert places == [(0, 0), (0, 60_000), (1, 0), (1, 60_000), (0, 60_000)]
    assert [fragment.word & SIZE_MASK for fragment in segment.fragments] == [120_000, 120_000]
    assert segment.data[5].fragment == NO_FRAGMENT and not segment.data[5].words


class Drip:
    """A stream that gives less than it is asked for."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    def read(self, size: int = -1, /) -> bytes:
        return self._stream.read(min(size, 40_001))


def test_a_content_may_come_in_pieces_of_any_length(tmp_path: Path) -> None:
    data = noise(CHUNK + BLOCK_SIZE + 3)
    segment = made([(of_entry(Entry("f", size=len(data))), Drip(data))], tmp_path)
    assert read_back(segment, 0) == data


@pytest.mark.parametrize("said", [0, 10, BLOCK_SIZE, CHUNK + 1])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_that_is_not_as_long_as_said_is_named(said: int, more: int, tmp_path: Path) -> None:
    if said + more < 0:
        return
    tree = [(Entry("opt/x.so", size=said), noise(said + more))]
    with pytest.raises(BuildError, match=rf"opt/x\.so: not {said} bytes long"):
        made(items(tree), tmp_path)
    if said:
        with pytest.raises(BuildError, match=r"opt/x\.so: a file without content"):
            made([(of_entry(tree[0][0]), None)], tmp_path)


TREE: list[tuple[Entry, bytes]] = [
    (Entry("d", DIR, 0o750, uid=70_000, xattrs=(("user.a", b"\xff\0"),)), b""),
    (Entry("d/caf\udce9", size=9, mtime=7), noise(9)),
    (Entry("d/large", mode=0o4755, size=CHUNK + 99), content("text", CHUNK + 99, 1)),
    (Entry("l", SYMLINK, 0o777, target="d/ü\udcff"), b""),
    (Entry("h", HARDLINK, target="d/large"), b""),
    (Entry("d/.wh.gone"), b""),
    (Entry("dev/null", "char", device=(1, 3)), b""),
    (Entry("empty"), b""),
]


def tar_of(tree: Sequence[tuple[Entry, bytes]]) -> bytes:
    return b"".join(header(e) + d + bytes(-len(d) % 512) for e, d in tree) + bytes(1024)


def test_a_layers_tar_and_its_tree_give_the_same_segment(tmp_path: Path) -> None:
    plain = made(items(TREE), tmp_path, "tree")
    packed = made(tar_items(io.BytesIO(tar_of(TREE)), "layer"), tmp_path, "tar")
    assert plain.path.read_bytes() == packed.path.read_bytes()
    assert (plain.data, plain.fragments) == (packed.data, packed.fragments)
    for ours, theirs in zip(plain.members, packed.members, strict=True):
        theirs.name = theirs.name.rstrip("/")  # as a tar marks directories
        theirs.offset = ours.offset
        assert ours == theirs
    assert set(plain.data) == {1, 2, 5, 7}  # the regular files


def test_a_sparse_member_is_what_its_reader_sees(tmp_path: Path) -> None:
    """As GNU tar writes it with --sparse-version=0.1."""
    data = noise(700)
    size = 5 * BLOCK_SIZE
    records = [f"GNU.sparse.size={size}", f"GNU.sparse.map={BLOCK_SIZE},700", "path=sparse"]
    body = b"".join(_record(text) for text in records)
    head = header(Entry("p", size=len(body)))
    pax = head[:156] + b"x" + head[157:]
    pax = pax[:148] + b"%06o\0 " % (sum(pax[:148]) + 256 + sum(pax[156:])) + pax[156:]
    tar = pax + body + bytes(-len(body) % 512) + header(Entry("p", size=700)) + data
    segment = made(tar_items(io.BytesIO(tar + bytes(-700 % 512 + 1024)), "layer"), tmp_path)
    assert segment.members[0].name == "sparse" and segment.data[0].words[2:] == (0, 0, 0)
    assert read_back(segment, 0) == bytes(BLOCK_SIZE) + data + bytes(size - BLOCK_SIZE - 700)
    save(segment, tmp_path / "index")
    assert load(tmp_path / "index", segment.path, NOTHING_KNOWN) == segment
    data = bytearray(segment.path.read_bytes())
    data[len(data) // 2] ^= 1
    segment.path.write_bytes(data)
    assert load(tmp_path / "index", segment.path, NOTHING_KNOWN) is None and not segment.path.exists()


def _record(text: str) -> bytes:
    length = len(text) + 2
    while len(f"{length} {text}\n") != length:
        length += 1
    return f"{length} {text}\n".encode()


@pytest.mark.parametrize("cut", [100, 700, 512 * 5 + 3])
def test_a_layer_cut_short_is_told_by_name(cut: int, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"base layer: (the tar archive is|not a tar archive, or) cut short"):
        made(tar_items(io.BytesIO(tar_of(TREE)[:cut]), "base layer"), tmp_path)


names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
raw_names = st.binary(max_size=20).map(lambda b: b.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
numbers = st.integers(-(1 << 40), 1 << 62)
members = st.builds(
    Member,
    st.one_of(names, raw_names),
    st.sampled_from([DIR, SYMLINK, HARDLINK, FILE]),
    st.integers(0, 0o7777),
    numbers,
    numbers,
    numbers,
    numbers,
    raw_names,
    st.tuples(st.integers(0, 1 << 31), st.integers(0, 1 << 31)),
    numbers,
    numbers,
    st.none() | st.lists(st.tuples(numbers, numbers), max_size=2).map(tuple),
    st.lists(st.tuples(raw_names, st.binary(max_size=9)), max_size=2).map(tuple),
)


@examples(50)
@given(st.lists(members, max_size=5), st.data())
def test_an_index_gives_back_its_members_or_nothing(found: list[Member], data: st.DataObject) -> None:
    """It is a cache: cut, damaged or of other data it is as if it were not there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        segment = made(items(files(b"x" * 99)), folder)
        places = {0: replace(segment.data[0], digest=found[0].sha256)} if found else {}
        segment = Segment(segment.path, 0, hashlib.sha256().hexdigest(), tuple(found), places, ())
        segment.path.write_bytes(b"")
        index = folder / "index"
        save(segment, index)
        assert load(index, segment.path, NOTHING_KNOWN) == segment
        assert sorted(os.listdir(folder)) == ["index", "segment"]
        whole = index.read_bytes()
        place = data.draw(st.integers(0, len(whole) - 1))
        index.write_bytes(whole[:place])
        assert load(index, segment.path, NOTHING_KNOWN) is None
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert load(index, segment.path, NOTHING_KNOWN) in (None, segment)
        index.write_bytes(whole)
        segment.path.write_bytes(b"!")
        assert load(index, segment.path, NOTHING_KNOWN) is None
        segment.path.unlink()
        assert load(index, segment.path, NOTHING_KNOWN) is None


@pytest.mark.parametrize("vanishes", [False, True])
def test_an_image_is_the_same_if_data_come_while_it_is_written(
    vanishes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "_MOST", 70_000)
    segment = made(items(files(noise(300_000), noise(9), noise(500_000, 2))), tmp_path)
    merging = MergedTree(Quota(None))
    merging.add("one", segment.members)
    tree, coming, asked = list(merging.entries().values()), tmp_path / "coming", list[int]()

    def arrived(one: Segment, end: int) -> Path:
        asked.append(end)
        coming.write_bytes(one.path.read_bytes()[:end])
        if vanishes:  # it gets its name just now
            coming.unlink()
        return coming if end < one.size else one.path

    images = []
    for number, way in enumerate((arrived, lambda one, _end: one.path)):
        with (tmp_path / f"image{number}").open("x+b") as out:
            write.write_image(tree, [segment], out, 0, ZSTD, 0, 2, arrived=way)
            out.seek(0)
            images.append(out.read())
    assert images[0] == images[1]
    assert len(asked) > 10 and [one for one in asked if one < segment.size] == sorted(set(asked) - {segment.size})


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, 0, None])
def test_spans_are_copied_where_the_kernel_does_not_help(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        if number:
            raise OSError(number, "refused")
        return 0

    if number is not None:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    data = noise(5 << 20)
    moved: list[int] = []
    (tmp_path / "a").write_bytes(data)
    with (tmp_path / "a").open("rb") as source, (tmp_path / "b").open("w+b") as out:
        files = source.fileno(), out.fileno()
        copy_span(*files, 100, 7, len(data) - 200, moved.append)
        copy_span(*files, 0, 0, 7, moved.append)
        with pytest.raises(EOFError):
            copy_span(*files, len(data) - 5, 0, 6, moved.append)
    assert (tmp_path / "b").read_bytes()[7:] == data[100:-100]
    assert sum(moved) == len(data) - 200 + 7 + 5
