"""Tables of squashfs, looked at by offset. tests/real/test_squashfs_write.py has the kernel and tools read them."""

from __future__ import annotations

import io
import os
import random
import struct
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.squashfs.model import BLOCK_SIZE, METADATA_SIZE, UNCOMPRESSED, Codec, Data, Fragment, codec_of
from envbuild.image.squashfs.tables import MetadataWriter, Placed, data_start, indexed, write_listing, write_tables

# Nothing becomes smaller, so that metadata is stored as it is and can be found by offset.
AS_IT_IS = Codec(1, "none", b"", lambda data: data)
FIELDS = (
    *("magic", "inodes", "mtime", "block_size", "fragments", "compressor", "block_log", "flags", "ids"),
    *("major", "minor", "root", "used", "id_table", "xattr_table", "inode_table", "directory_table"),
    *("fragment_table", "export_table"),
)
NOWHERE = (1 << 64) - 1
WORD = UNCOMPRESSED | 7


def image(
    placed: Sequence[Placed],
    codec: Codec = AS_IT_IS,
    fragments: Sequence[Fragment] = (),
    base: int = 0,
    mtime: int = 1,
    data: bytes = b"some data",
) -> bytes:
    out = io.BytesIO(bytes(base + data_start(codec)) + data)
    out.seek(0, os.SEEK_END)
    length = write_tables(out, base, placed, fragments, codec, mtime)
    assert out.tell() == base + length == len(out.getvalue())
    assert not any(out.getvalue()[:base])
    return out.getvalue()[base:]


def superblock(found: bytes) -> dict[str, int]:
    return dict(zip(FIELDS, struct.unpack("<IIIIIHHHHHHQQQQQQQQ", found[:96]), strict=True))


def inodes(found: bytes) -> list[tuple[int, bytes]]:
    """Type and following bytes of each inode, by number less 1; for a tree whose inodes are in one block."""
    head = superblock(found)
    at = head["inode_table"] + 2
    (block,) = struct.unpack_from("<Q", found, head["export_table"])
    references = struct.unpack_from(f"<{head['inodes']}Q", found, block + 2)
    return [(found[at + ref], found[at + ref : at + ref + 200]) for ref in references]


def a(path: str, kind: str = FILE, data: Data | None = None, **more: Any) -> Placed:
    return Placed(Entry(path, kind, **more), data)


def test_an_empty_tree_has_a_root_and_all_tables_in_order() -> None:
    found = image([], mtime=1 << 40)
    head = superblock(found)
    assert (head["magic"], head["major"], head["minor"]) == (0x73717368, 4, 0)
    assert head["inodes"] == head["ids"] == 1
    assert head["mtime"] == (1 << 32) - 1
    assert 1 << head["block_log"] == head["block_size"] == BLOCK_SIZE
    assert len(found) % 4096 == 0
    assert len(found) - 4096 < head["used"] <= len(found)
    names = ("inode", "directory", "fragment", "export", "id")
    tables = [head[f"{name}_table"] for name in names]
    assert tables == sorted(tables)
    assert head["xattr_table"] == NOWHERE
    kind, root = inodes(found)[0]
    assert (kind, struct.unpack_from("<H", root, 2)[0]) == (1, 0o755)


@pytest.mark.parametrize("name", ["gzip", "xz", "lz4", "zstd"])
def test_the_superblock_says_what_is_there(name: str) -> None:
    codec = codec_of(name)
    bare = image([], codec)
    full = image([a("f", xattrs=(("user.x", b"1"),))], codec, [Fragment(data_start(codec), 9)])
    assert superblock(bare)["compressor"] == codec.number
    assert bool(superblock(bare)["flags"] & 0x400) == bool(codec.options)
    if codec.options:
        assert bare[98 : 98 + len(codec.options)] == codec.options
        assert struct.unpack_from("<H", bare, 96)[0] == 0x8000 | len(codec.options)
    assert superblock(bare)["flags"] & ~0x400 == 0x10 | 0x40 | 0x80 | 0x200
    assert superblock(full)["flags"] & ~0x400 == 0x40 | 0x80
    assert superblock(full)["xattr_table"] < superblock(full)["used"]


START, EMPTY = data_start(AS_IT_IS), Data()
ONE_BLOCK = Data(START, (WORD,))


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (a("x", FILE, None), 2),
        (a("x", FILE, ONE_BLOCK, size=7), 2),
        (a("x", FILE, Data(START, (), 0, 5), size=7), 2),
        (a("x", FILE, Data((1 << 32) - 1, (WORD,)), size=7), 2),
        (a("x", FILE, Data(1 << 32, (WORD,)), size=7), 9),
        (a("x", FILE, Data(START, (0,)), size=7), 9),
        (a("x", FILE, ONE_BLOCK, size=7, xattrs=(("user.a", b""),)), 9),
        (a("x", DIR), 1),
        (a("x", DIR, xattrs=(("trusted.a", b""),)), 8),
        (a("x", SYMLINK, target="y"), 3),
        (a("x", SYMLINK, target="y", xattrs=(("security.a", b""),)), 10),
        (a("x", BLOCK, device=(8, 1)), 4),
        (a("x", BLOCK, device=(8, 1), xattrs=(("user.a", b""),)), 11),
        (a("x", CHAR, device=(1, 3)), 5),
        (a("x", CHAR, device=(1, 3), xattrs=(("user.a", b""),)), 12),
        (a("x", FIFO), 6),
        (a("x", FIFO, xattrs=(("user.a", b""),)), 13),
    ],
)
def test_an_inode_is_extended_only_where_it_must_be(item: Placed, kind: int) -> None:
    found = image([item], fragments=[Fragment(START, WORD)])
    assert inodes(found)[0][0] == kind


def test_a_file_with_two_names_is_one_inode_that_says_so() -> None:
    tree = [a("b", DIR), a("b/1", HARDLINK, target="z"), a("z", FILE, ONE_BLOCK, size=7, mode=0o4711)]
    kind, record = inodes(image(tree))[0]
    start, size, sparse, links = struct.unpack_from("<QQQI", record, 16)
    assert (kind, start, size, sparse, links) == (9, START, 7, 0, 2)
    assert struct.unpack_from("<H", record, 2)[0] == 0o4711
    assert superblock(image(tree))["inodes"] == 3


@pytest.mark.parametrize(
    ("words", "size", "sparse"),
    [
        ((0,), 5, 5),
        ((0, 0), 2 * BLOCK_SIZE, 2 * BLOCK_SIZE),
        ((0, WORD), BLOCK_SIZE + 7, BLOCK_SIZE),
        ((WORD, 0), BLOCK_SIZE + 7, 7),
    ],
)
def test_sparse_counts_the_bytes_of_blocks_that_are_not_stored(words: tuple[int, ...], size: int, sparse: int) -> None:
    _, record = inodes(image([a("f", FILE, Data(START, words), size=size)]))[0]
    assert struct.unpack_from("<QQQ", record, 16) == (START, size, sparse)
    assert struct.unpack_from(f"<{len(words)}I", record, 56) == words


def test_times_beyond_the_format_become_the_nearest() -> None:
    tree = [a("1", mtime=-5), a("2", mtime=1 << 32), a("3", mtime=77)]
    times = [struct.unpack_from("<I", record, 8)[0] for _, record in inodes(image(tree))[:3]]
    assert times == [0, (1 << 32) - 1, 77]


@given(st.randoms(use_true_random=False), st.integers(0, 3))
def test_bytes_depend_on_neither_order_nor_place(shuffle: random.Random, base: int) -> None:
    tree = [a("", DIR, mode=0o700)]
    tree += [a(f"d{i}", DIR, uid=i, xattrs=(("user.n", bytes([i])),)) for i in range(4)]
    tree += [a(f"d{i}/f{j}", mtime=i * j, gid=9) for i in range(4) for j in range(9)]
    tree += [a("d1/link", HARDLINK, target="d3/f1"), a("d0/link", HARDLINK, target="d3/f1")]
    codec = codec_of("zstd")
    expected = image(tree, codec)
    shuffle.shuffle(tree)
    assert image(tree, codec, base=base * 777) == expected


def test_equal_sets_of_attributes_are_stored_once_in_whatever_order() -> None:
    one, two = ("user.a", b"1" * 50), ("security.b", b"2")
    sets = [(one, two), (two, one), (one,), ()]
    found = image([a(str(n), xattrs=xattrs) for n, xattrs in enumerate(sets)])
    head = superblock(found)
    values, count, unused = struct.unpack_from("<QII", found, head["xattr_table"])
    assert (count, unused) == (2, 0)
    assert found[values:].count(b"1" * 50) == 2
    assert [struct.unpack_from("<I", inodes(found)[n][1], 52)[0] for n in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([a("d/f")], "d/f: its directory 'd'"),
        ([a("f"), a("f/g")], "f/g: its directory 'f'"),
        ([a("/f")], "/f: its directory '/'"),
        ([a("d", DIR), a("d/")], "d/: its last part has 0 bytes"),
        ([a("d", DIR), a("d/..")], "'..' is not a valid file name"),
        ([a("a\0b")], "is not a valid file name"),
        ([a("f"), a("f")], "f: this path is given twice"),
        ([a("é"), a("\udcc3\udca9")], "this path is given twice"),
        ([a("\ud800")], "is not valid Unicode"),
        ([a("n" * 257)], "its last part has 257 bytes"),
        ([a("é" * 129)], "its last part has 258 bytes"),
        ([a("", FILE)], "the root of the image is a file"),
        ([a("l", HARDLINK, target="m")], "l: it is a hard link to 'm', which is missing"),
        ([a("l", HARDLINK, target="")], "l: it is a hard link to '', which is a directory"),
        ([a("d", DIR), a("l", HARDLINK, target="d")], "which is a directory"),
        ([a("l", HARDLINK, target="l")], "which is a hard link itself"),
        ([a("s", SYMLINK)], "s: a symbolic link to a name of 0 bytes"),
        ([a("s", SYMLINK, target="x" * 65536)], "s: a symbolic link to a name of 65536 bytes"),
        ([a("c", CHAR, device=(4096, 0))], "c: squashfs cannot hold a device"),
        ([a("c", BLOCK, device=(0, 1 << 20))], "c: squashfs cannot hold a device"),
        ([a("s", "socket")], "s: squashfs cannot hold an entry of kind 'socket'"),
        ([a("f", uid=-1)], "f: an owner or group of -1"),
        ([a("f", gid=1 << 32)], "f: an owner or group of 4294967296"),
        ([a("f", xattrs=(("system.posix_acl_access", b""),))], "f: squashfs cannot hold its ext"),
        ([a("f", xattrs=(("user.", b""),))], "f: squashfs cannot hold its extended"),
        ([a("f", xattrs=(("user." + "n" * 251, b""),))], "f: its extended attribute .* too large"),
        ([a("f", xattrs=(("user.a", bytes(65537)),))], "f: its extended attribute .* too large"),
        ([a("f", xattrs=(("user.a", b"1"), ("user.a", b"2")))], "is given twice: user.a"),
        ([a("f", size=1)], "f: 0 blocks of data"),
        ([a("f", size=-1)], "f: 0 blocks of data"),
        ([a("f", FILE, ONE_BLOCK, size=BLOCK_SIZE + 1)], "f: 1 blocks of data"),
        ([a("f", FILE, Data(START, (), 1, 0), size=5)], "f: 0 blocks of data, fragment 0x1"),
        ([a("f", FILE, Data(START, (), 0, BLOCK_SIZE), size=1)], "f: 0 blocks of data"),
        ([a("f", FILE, Data(START, (WORD,), 0, 0), size=BLOCK_SIZE)], "f: 1 blocks of data"),
    ],
)
def test_what_squashfs_cannot_hold_is_an_error_that_names_it(tree: list[Placed], message: str) -> None:
    out = io.BytesIO()
    with pytest.raises(BuildError, match=message):
        write_tables(out, 0, tree, [Fragment(START, WORD)], AS_IT_IS, 0)
    assert not out.getvalue()


def test_more_owners_than_squashfs_can_hold_are_an_error() -> None:
    tree = [a(str(n), uid=n) for n in range(65536)]
    test_what_squashfs_cannot_hold_is_an_error_that_names_it(tree, "65536 owners and groups")


def test_the_largest_of_everything_is_accepted() -> None:
    attribute = (("user." + "n" * 250, bytes(65536)),)
    tree = [a("n" * 256), a("é" * 128), a("s", SYMLINK, target="x" * 65535), a("x", xattrs=attribute)]
    tree += [a(f"{n}", uid=n) for n in range(65535)]
    head = superblock(image([*tree, a("c", CHAR, device=(4095, (1 << 20) - 1))]))
    assert head["ids"] == 65535
    assert head["inodes"] == len(tree) + 2


def unblocked(table: bytes) -> tuple[bytes, dict[int, int]]:
    """The content of a table whose blocks are stored as they are, and where in it each block begins."""
    content, at, begins = b"", 0, {}
    while at < len(table):
        size = struct.unpack_from("<H", table, at)[0] & 0x7FFF
        begins[at] = len(content)
        content += table[at + 2 : at + 2 + size]
        at += 2 + size
    return content, begins


@given(
    st.randoms(use_true_random=False),
    st.integers(0, 1500),
    st.sampled_from([2, 30, 256]),
    st.sampled_from([1, 300, 80000]),
    st.integers(0, METADATA_SIZE),
)
def test_a_listing_tells_its_entries_and_its_index_leads_to_headers(
    chance: random.Random, count: int, longest: int, spread: int, before: int
) -> None:
    names = {chance.randbytes(chance.randint(1, longest)) for _ in range(count)}
    # Inodes in order, but for some that lie elsewhere as hard links do.
    numbers = [n if chance.random() < 0.95 else chance.randrange(spread) for n in range(len(names))]
    references = [(n * 40 >> 13) * 8194 << 16 | n * 40 & 8191 for n in range(max(spread, 1500))]
    rows = [(name, number, number % 6 + 1) for name, number in zip(sorted(names), numbers, strict=True)]
    table = MetadataWriter(lambda data: data)
    table.add(bytes(before))
    listing = write_listing(table, rows, references)
    content, begins = unblocked(table.finish())
    start = begins.get(listing.reference >> 16, len(content)) + (listing.reference & 0xFFFF)
    assert start + listing.size == len(content)
    found: list[tuple[bytes, int, int]] = []
    headers, at = {}, start
    while at < len(content):
        headers[at] = len(found)
        count, block, first = struct.unpack_from("<III", content, at)
        at += 12
        assert count < 256
        for _ in range(count + 1):
            offset, difference, kind, size = struct.unpack_from("<HhHH", content, at)
            name = content[at + 8 : at + 9 + size]
            at += 9 + size
            found.append((name, first + difference, kind))
            assert references[first + difference] == block << 16 | offset
    assert found == rows
    crossed = {begins[block] for block in begins if begins[block] > start}
    reached = set()
    for entry in listing.index:
        offset, block, size = struct.unpack_from("<III", entry)
        at = start + offset
        assert entry[12:] == rows[headers[at]][0]
        assert len(entry) == 13 + size
        assert begins[block] <= at < begins[block] + METADATA_SIZE
        reached.add(begins[block])
    last = max(headers, default=0)
    assert {block for block in crossed if block <= last} <= reached
    assert len(reached) == len(listing.index)


@given(st.lists(st.integers(0, 3 * METADATA_SIZE), max_size=9))
def test_references_lead_to_records_whatever_their_sizes(sizes: list[int]) -> None:
    records = [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    table = MetadataWriter(lambda data: data)
    references = [table.add(record) for record in records]
    content, begins = unblocked(table.finish())
    assert content == b"".join(records)
    for reference, record in zip(references, records, strict=True):
        start = begins.get(reference >> 16, len(content)) + (reference & 0xFFFF)
        assert reference & 0xFFFF < METADATA_SIZE
        assert content[start : start + len(record)] == record


def test_metadata_is_compressed_only_where_that_makes_it_smaller() -> None:
    table = MetadataWriter(codec_of("zstd").compress)
    table.add(bytes(METADATA_SIZE))
    second = table.next >> 16
    noise = random.Random(1).randbytes(METADATA_SIZE)
    table.add(noise)
    data = table.finish()
    assert struct.unpack_from("<H", data)[0] == second - 2 < 100
    assert data[second:] == struct.pack("<H", 0x8000 | METADATA_SIZE) + noise


def test_a_lookup_table_lists_the_place_of_each_block() -> None:
    records = random.Random(1).randbytes(2 * METADATA_SIZE + 16)
    data, place = indexed(records, 1000, lambda block: block)
    assert place == 1000 + len(records) + 3 * 2
    expected = (1000, 1000 + 8194, 1000 + 2 * 8194)
    assert struct.unpack("<3Q", data[place - 1000 :]) == expected
    assert indexed(b"", 1000, lambda block: block) == (b"", 1000)


def test_the_tables_of_a_large_environment_take_no_time() -> None:
    tree = [a(f"d{n}", DIR) for n in range(720)]
    tree += [
        a(f"d{n % 720}/module_{n}.py", FILE, Data(START + n, (WORD, n + 1)), size=BLOCK_SIZE + 1) for n in range(35280)
    ]
    begun = time.process_time()
    image(tree, codec_of("zstd"))
    assert time.process_time() - begun < 2.5  # 0.2 s where it was written
