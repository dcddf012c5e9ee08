"""squashfs images that mksquashfs made, read; and what hostile ones do, which is nothing but an error.

tests/unit/data holds one tree as four images: blocks of 4 KiB (lz4: 8 KiB, no fragments), xz with metadata
that is not compressed and without an export table.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.image.entry import CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.squashfs.model import NAMES
from envbuild.image.squashfs.read import SquashfsImage
from envbuild.image.squashfs.unpack import unpack
from examples import examples

DATA = Path(__file__).with_name("data")
CODECS = ("gzip", "xz", "lz4", "zstd")
IMAGES = {name: (DATA / f"{name}.sqsh").read_bytes() for name in CODECS}
PLAIN = IMAGES["xz"]  # its metadata can be changed where it lies
NUMBERS = "".join(f"{n}\n" for n in range(1, 2001)).encode()
STATE = b'{"recipe": "lab"}'
ODD = os.fsdecode(b"odd\xff")
# path → kind, mode, size, target
TREE = {
    "": (DIR, 0o755, 0, ""),
    "empty": (DIR, 0o755, 0, ""),
    "fifo": (FIFO, 0o644, 0, ""),
    "many": (DIR, 0o755, 0, ""),
    **{f"many/{n}": (FILE, 0o644, len(f"{n}\n"), "") for n in sorted(map(str, range(1, 301)))},
    "null": (CHAR, 0o644, 0, ""),
    "numbers": (FILE, 0o644, 8893, ""),
    ODD: (FILE, 0o644, 3, ""),
    "opt": (DIR, 0o755, 0, ""),
    "opt/env": (DIR, 0o755, 0, ""),
    "opt/env/envbuild.json": (FILE, 0o644, 17, ""),
    "opt/link": (SYMLINK, 0o777, 0, "../opt"),
    "random": (FILE, 0o644, 5000, ""),
    "same": (HARDLINK, 0o644, 17, "opt/env/envbuild.json"),
    "sparse": (FILE, 0o644, 20001, ""),
    "zero": (FILE, 0o4750, 0, ""),
}


def filed(data: bytes) -> BinaryIO:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it is removed when nobody refers to it
    file.write(data)
    file.flush()
    return cast(BinaryIO, file)


def opened(data: bytes) -> SquashfsImage:
    return SquashfsImage(filed(data), 0, "lab.sqsh")


def read_all(data: bytes) -> dict[str, str]:
    """Path → sha256 of each file of an image; all else in it is looked at too."""
    image = opened(data)
    found = {}
    for entry, handle in image.entries():
        if entry.kind == FILE:
            seen = hashlib.sha256()
            for piece, length in image.blocks(handle):
                seen.update(bytes(length) if piece is None else piece)
            found[entry.path] = seen.hexdigest()
    image.find("opt/env/envbuild.json")
    return found


def patched(at: int, form: str, *values: int | bytes) -> bytes:
    data = bytearray(PLAIN)
    struct.pack_into(form, data, at, *values)
    return bytes(data)


@pytest.mark.parametrize("codec", CODECS)
def test_the_tree_is_the_same_whatever_compresses_it(codec: str) -> None:
    image = opened(IMAGES[codec])
    entries = {entry.path: entry for entry, _ in image.entries()}
    handles = {entry.path: handle for entry, handle in image.entries()}
    shape = {path: (e.kind, e.mode, e.size, e.target) for path, e in entries.items()}
    assert list(shape.items()) == list(TREE.items())
    assert {e.mtime for e in entries.values()} == {1600000000}
    assert (entries["zero"].uid, entries["zero"].gid) == (1000, 2000)
    assert entries["null"].device == (1, 3)
    digits = "".join(map(str, range(1, 201))).encode()
    assert entries["numbers"].xattrs == (("trusted.big", digits),)
    notes = {path for path, e in entries.items() if e.xattrs == (("user.note", b"text"),)}
    assert notes == {"empty", "opt/env/envbuild.json", "same"}
    assert handles["same"] == handles["opt/env/envbuild.json"] == image.find("same")
    contents = {"numbers": NUMBERS, "zero": b"", ODD: b"odd", "same": STATE, "many/300": b"300\n"}
    contents["sparse"] = b"x" + bytes(19999) + b"y"
    for path, expected in contents.items():
        assert image.content(handles[path], 1 << 20) == expected, path
        assert image.content(handles[path], 5) == expected[:5], path
    assert len({read_all(data)["random"] for data in IMAGES.values()}) == 1
    about = image.superblock
    assert (NAMES[about.compressor], about.mtime, about.inodes) == (codec, 1700000000, len(TREE) - 1)


def test_an_image_within_a_file_is_read_where_it_lies_and_by_several_readers_at_once() -> None:
    stream = filed(b"x" * 4096 + IMAGES["zstd"] + b"behind it")
    image = SquashfsImage(stream, 4096, "lab.sif")
    numbers, sparse = image.find("numbers"), image.find("sparse")
    assert numbers is not None and sparse is not None
    pieces = list(zip_longest(image.blocks(numbers), image.blocks(sparse), fillvalue=(b"", 0)))
    assert b"".join(data or bytes(length) for (data, length), _ in pieces) == NUMBERS
    assert b"".join(data or bytes(length) for _, (data, length) in pieces) == b"x" + bytes(19999) + b"y"


@pytest.mark.parametrize(
    "path", ["opt/env/none", "opt/link/env/envbuild.json", "opt/env", "zzz", "a", "numbers/x", "", "opt//env"]
)
def test_what_is_no_file_at_its_own_path_is_not_found(path: str) -> None:
    assert opened(PLAIN).find(path) is None


@pytest.mark.parametrize("codec", CODECS)
def test_an_image_is_unpacked_as_it_is(codec: str, tmp_path: Path) -> None:
    unpack(opened(IMAGES[codec]), tmp_path / "deep/into")
    into = tmp_path / "deep/into"
    found = {os.path.relpath(p, into): p.lstat() for p in [into, *into.rglob("*")]}
    found[""] = found.pop(".")
    assert found.keys() | {"null"} == TREE.keys()
    for path, (kind, mode, size, _) in TREE.items():
        if path in found and kind != SYMLINK:
            # nothing gets the rights of whoever unpacks it
            assert found[path].st_mode & 0o7777 == mode & 0o1777, path
            assert found[path].st_mtime == 1600000000, path
            assert kind not in (FILE, HARDLINK) or found[path].st_size == size
    assert os.readlink(into / "opt/link") == "../opt"
    assert found["same"].st_ino == found["opt/env/envbuild.json"].st_ino
    assert (into / "numbers").read_bytes() == NUMBERS
    assert found["sparse"].st_blocks * 512 < 20001
    with pytest.raises(BuildError, match="not empty"):
        unpack(opened(PLAIN), into)


@given(st.sampled_from(CODECS), st.data())
@examples(400)
def test_a_damaged_image_is_an_error_and_never_worse(codec: str, data: st.DataObject) -> None:
    image = bytearray(IMAGES[codec])
    superblock, rest = st.integers(0, 95), st.integers(0, len(image) - 1)
    metadata = st.integers(len(image) * 6 // 10, len(image) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(superblock | rest | metadata)
        known = st.sampled_from([0, 255, image[at] ^ 1, image[at] ^ 128])
        image[at] = data.draw(known | st.integers(0, 255))
    del image[data.draw(st.just(len(image)) | rest) :]
    try:
        read_all(bytes(image))
    except BuildError as error:
        assert error.message.startswith("lab.sqsh: ")


# Where PLAIN has what the tests below change, and a check that it is there.
INODES, LISTS = struct.unpack_from("<QQ", PLAIN, 64)
ROOT = struct.unpack_from("<Q", PLAIN, 32)[0]
FIRST_OF_MANY = LISTS + 2 + 12 + 8  # behind the headers of block and listing, and the entry
SECOND = INODES + (ROOT >> 16) + 2  # the block of inodes that the root is in


def entry_at(name: bytes) -> int:
    return PLAIN.index(name, LISTS) - 8


def inode_of(name: bytes) -> int:
    at: int = SECOND + struct.unpack_from("<H", PLAIN, entry_at(name))[0]
    assert SECOND < at < LISTS
    return at


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cut short"),
        (b"hsqs", "cut short"),
        (bytes(96), "not a squashfs"),
        (PLAIN[:-1], "cut short"),
        (patched(28, "<HH", 3, 1), "squashfs 3.1"),
        (patched(20, "<H", 3), "lzo"),
        (patched(20, "<H", 77), "number 77"),
        (patched(12, "<I", 1 << 30), "blocks of"),
        (patched(4, "<I", 5), "more than 5 files"),
        (patched(32, "<Q", (1 << 63) + 5), "outside"),
        (patched(26, "<H", 0), "owners"),
        (patched(48, "<Q", 1 << 40), "a table at"),
        (patched(32, "<Q", ROOT & ~0xFFFF | struct.unpack_from("<H", PLAIN, entry_at(b"null"))[0]), "root"),
        (patched(entry_at(b"env"), "<H", ROOT & 0xFFFF), "in two places"),
        (patched(entry_at(b"link"), "<H", struct.unpack_from("<H", PLAIN, entry_at(b"many"))[0]), "in two places"),
        (patched(FIRST_OF_MANY, "<c", b"."), "not a name"),
        (patched(FIRST_OF_MANY, "<c", b"/"), "not a name"),
        (patched(FIRST_OF_MANY, "<c", b"\0"), "not a name"),
        (patched(FIRST_OF_MANY, "<c", b"9"), "not in order"),
        (patched(entry_at(b"link") + 8, "<4s", b"env\0"), "not a name"),
        (patched(entry_at(b"link") + 6, "<H", 0xFFFF), "a name of 65536 bytes"),
        (patched(LISTS + 2, "<I", 256), "257 names"),
        (patched(inode_of(b"random") + 28, "<I", 0xFFFFFFFF), "not 4096"),
        (patched(inode_of(b"random") + 16, "<I", 0xFFFFFFF0), "outside"),
        (patched(inode_of(b"random") + 20, "<I", 7), "row 7"),
        (patched(inode_of(b"link") + 20, "<I", 0xFFFFFFF0), "symbolic link"),
        (patched(inode_of(b"link") + 20, "<I", 0), "symbolic link"),
        (patched(inode_of(b"link") + 24, "<c", b"\0"), "NUL"),
        (patched(inode_of(b"random"), "<H", 15), "type 15"),
        (patched(inode_of(b"random") + 4, "<H", 9), "an owner"),
        (patched(INODES, "<H", 0x8000 | 9000), "is of 9000 bytes"),
    ],
)
def test_each_lie_is_found(data: bytes, said: str) -> None:
    with pytest.raises(BuildError, match=f"^lab.sqsh: .*{said}"):
        read_all(data)


def test_no_capability_comes_to_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = (("security.capability", b"\1"), ("user.note", b"kept"))
    seen = []
    monkeypatch.setattr("os.setxattr", lambda _, name, *__, **___: seen.append(name))
    image = Image([Entry("su", FILE, 0o755, size=1, xattrs=attributes)])
    unpack(cast(SquashfsImage, image), tmp_path / "into")
    assert seen == ["user.note"] and (tmp_path / "into/su").exists()


class Image:
    """The part of an image that is read for unpacking."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def entries(self) -> Iterator[tuple[Entry, int]]:
        yield from ((entry, 0) for entry in self._entries)

    def each_file(self, files: Any, write: Any) -> None:
        for entry, handle in files:
            write(entry, handle)

    def blocks(self, _: int) -> Iterator[tuple[bytes, int]]:
        yield b"x", 1
