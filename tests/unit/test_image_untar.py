"""Tar headers read by hand, against Python's tarfile and GNU tar, and against damage."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import BinaryIO, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lab.merged import merge
from lab.tar_blocks import END, pax, plain, special

from envbuild.base.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK
from envbuild.image.layer import decompressed
from envbuild.image.tar import Member, PositionedStream, members, tar_items

TYPES = {
    FILE: tarfile.REGTYPE,
    DIR: tarfile.DIRTYPE,
    SYMLINK: tarfile.SYMTYPE,
    HARDLINK: tarfile.LNKTYPE,
    CHAR: tarfile.CHRTYPE,
    BLOCK: tarfile.BLKTYPE,
    FIFO: tarfile.FIFOTYPE,
}
FORMATS: dict[str, Literal[0, 1, 2]] = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
}


def forward(data: bytes) -> BinaryIO:
    """`data` as a stream that cannot seek."""
    return decompressed(io.BytesIO(data), "lab")


def read(data: bytes, seekable: bool = True) -> list[tuple[Member, bytes]]:
    """The members with their stored bytes."""
    source = PositionedStream(io.BytesIO(data) if seekable else forward(data), "lab")
    return [(member, source.exactly(member.stored)) for member in members(source)]


text = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=30)
names = st.one_of(
    st.lists(text, min_size=1, max_size=4).map("/".join),
    st.builds("{}/{}".format, text.map(lambda part: part * 9), text.map(lambda part: part * 5)),
    st.sampled_from(["d/" * 60 + "f", "d/" * 120 + "f"]),
    st.just("\udcff\udc80name"),
)


@st.composite
def infos(draw: st.DrawFn) -> tarfile.TarInfo:
    info = tarfile.TarInfo(draw(names))
    kind = draw(st.sampled_from(list(TYPES)))
    info.type = TYPES[kind]
    info.mode = draw(st.integers(0, 0o7777))
    info.uid, info.gid = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**21 - 1))
    info.mtime = draw(st.integers(-1000, 2**40))
    info.size = draw(st.sampled_from([0, 1, 511, 512, 513, 3000])) if kind == FILE else 0
    info.linkname = draw(names) if kind in (SYMLINK, HARDLINK) else ""
    if kind in (CHAR, BLOCK):
        info.devmajor, info.devminor = draw(st.integers(0, 4095)), draw(st.integers(0, 2**20))
    info.pax_headers = {
        f"SCHILY.xattr.user.{key}": value
        for key, value in draw(st.dictionaries(st.sampled_from("ab"), text, max_size=2)).items()
    }
    return info


@given(st.lists(infos(), max_size=5), st.sampled_from(list(FORMATS)), st.booleans())
def test_what_tarfile_writes_is_read_as_tarfile_reads_it(
    written: list[tarfile.TarInfo], form: str, seekable: bool
) -> None:
    data = b""
    for number, info in enumerate(written):
        if form != "pax":
            info.pax_headers = {}
        try:
            data += info.tobuf(FORMATS[form], "utf-8", "surrogateescape")
        except ValueError:  # what ustar cannot say
            continue
        data += bytes([number]) * info.size + bytes(-info.size % 512)
    data += bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8") as archive:
        expected = [
            (
                info.name,
                info.type,
                (info.mode, info.uid, info.gid, info.mtime // 1, info.size, info.linkname),
                (info.devmajor, info.devminor) if info.isdev() and not info.isfifo() else (0, 0),
                [key for key in sorted(info.pax_headers) if key.startswith("SCHILY")],
                archive.extractfile(info).read() if info.isreg() else b"",  # type: ignore[union-attr]
            )
            for info in archive
        ]
    assert expected == [
        (
            # tarfile drops the slash that it writes itself after a directory's name
            m.name.rstrip("/") if m.kind == DIR or len(m.name) > 100 else m.name,
            TYPES[m.kind],
            (m.mode, m.uid, m.gid, m.mtime, m.size, m.link),
            m.device,
            [f"SCHILY.xattr.{key}" for key, _ in m.xattrs],
            content,
        )
        for m, content in read(data, seekable)
    ]


@given(st.binary(max_size=1100))
@example(bytes(156) + b"5" + bytes(355))
def test_any_bytes_are_an_archive_or_refused(data: bytes) -> None:
    for seekable in (True, False):
        try:
            read(data, seekable)
        except BuildError as error:
            assert error.message.startswith("lab: ")


def test_a_checksum_that_is_wrong_by_the_modulus_of_adler_32_is_refused() -> None:
    info = tarfile.TarInfo("\xff" * 100)
    info.linkname = info.uname = "\xff" * 30
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT, "latin-1"))
    header[345:500] = b"\xff" * 155
    total = sum(header) - sum(header[148:156]) + 8 * 32
    assert total > 65521
    for said, good in ((total, True), (total - 65521, False)):
        header[148:156] = b"%06o\0 " % said
        if good:
            assert len(read(bytes(header) + bytes(1024), True)) == 1
        else:
            with pytest.raises(BuildError, match="a wrong header checksum"):
                read(bytes(header) + bytes(1024), True)


@given(st.integers(0, 4 * 512 - 1), st.integers(0, 255), st.booleans())
def test_a_changed_byte_is_read_or_refused(at: int, value: int, fix_sum: bool) -> None:
    """With a right checksum too: then every field can be absurd."""
    info = tarfile.TarInfo("dir/file")
    info.size = 600
    info.pax_headers = {"comment": "x", "SCHILY.xattr.user.a": "b"}
    data = bytearray(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024) + bytes(1024))
    data[at] = value
    start = at // 512 * 512
    if fix_sum and not 148 <= at - start < 156 and start != 512:
        block = data[start : start + 512]
        data[start + 148 : start + 156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    try:
        merge([("lab", lambda: io.BytesIO(bytes(data)))])
    except BuildError as error:
        assert error.message.startswith("lab: ")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (bytes(512), []),
        (END + b"anything", []),
        (plain(), ["f"]),
        (plain(data=b"x" * 600)[: 512 + 600], ["f"]),  # the last padding is missing
        (pax(("path", b"a/b")) + plain() + plain(), ["a/b", "f"]),
        (pax(("path", b"a"), ("path", b"b")) + plain(), ["b"]),
        (pax(("path", b"")) + plain(), ["f"]),
        (pax(("path", b"g"), kind=b"g") + plain() + pax(("path", b"x")) + plain(), ["g", "x"]),
        (pax(("path", b"caf\xe9")) + plain(), ["caf\udce9"]),
        (special(b"L", b"long\0junk") + pax(("path", b"other")) + plain(), ["long"]),
        (plain("d/", kind=tarfile.AREGTYPE), ["d/"]),
        (plain(kind=tarfile.CONTTYPE), ["f"]),
    ],
)
def test_odd_archives_are_read(data: bytes, expected: list[str]) -> None:
    for seekable in (True, False):
        assert [member.name for member, _ in read(data, seekable)] == expected


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"x", "not a tar archive, or cut short: it has 1 bytes"),
        (b"GIF89a" + bytes(600), "not a tar archive"),
        (plain()[:-1], "cut short"),
        (plain(data=b"x" * 600)[: 512 + 599], "cut short"),
        (bytes(512) + plain(), "one block of zeros"),
        (pax(("path", b"a")), "cut short"),
        (special(b"L", b"name"), "cut short"),
        (special(b"x", b"", size=2 << 20), "an extended tar header of 2097152 bytes"),
        (special(b"x", b"9 path=ab"), "a damaged pax header"),
        (special(b"x", b"99 path=ab\n"), "a damaged pax header"),
        (special(b"x", b"-3 path=ab\n"), "a damaged pax header"),
        (special(b"x", b"9" * 30), "a damaged pax header"),
        (pax(("size", b"-1")) + plain(), "is not a number|a size of"),
        (pax(("size", b"9" * 19)) + plain(), "a size of 9999999999999999999 bytes"),
        (pax(("size", b"999999")) + plain(), "cut short"),
        (pax(("uid", b"1_0")) + plain(), "is not a number"),
        (pax(("mtime", b"nan")) + plain(), "is not a number"),
        (pax(("path", b"a\0b")) + plain(), "a name with a NUL"),
        (pax(("linkpath", b"a\0b")) + plain(kind=b"2"), "a name with a NUL"),
        (plain(kind=b"V"), "f: a member of unknown kind b'V'"),
        (plain(uid=-5), "an owner or device number of -5"),
        (pax(("uid", b"4294967296")) + plain(), "an owner or device number of 4294967296"),
    ],
)
def test_a_damaged_archive_is_refused(data: bytes, says: str) -> None:
    for make in (io.BytesIO, forward):
        with pytest.raises(BuildError, match=says) as caught:
            merge([("lab", lambda: make(data))])  # noqa: B023 - used up at once
        assert caught.value.message.startswith("lab: ")


def test_times_are_rounded_down() -> None:
    for told, seconds in ((b"1.9", 1), (b"-1.5", -2), (b"-1.0", -1), (b"7", 7)):
        assert read(pax(("mtime", told)) + plain())[0][0].mtime == seconds


@pytest.mark.skipif(not shutil.which("tar"), reason="there is no tar")
@pytest.mark.parametrize(
    "form", ["--format=gnu", "--sparse-version=0.0", "--sparse-version=0.1", "--sparse-version=1.0"]
)
@pytest.mark.parametrize("pieces", [1, 3, 4, 5, 30, 60])
def test_sparse_files_as_gnu_tar_writes_them_are_whole(form: str, pieces: int, tmp_path: Path) -> None:
    place = tmp_path / "sparse"
    with place.open("wb") as stream:
        for number in range(pieces):
            stream.seek(number * 300_000 + 100_000)
            stream.write(os.urandom(5000))
        stream.truncate(pieces * 300_000 + 77)
    flags = [form] if "gnu" in form else ["--format=posix", form]
    (tmp_path / "after").write_bytes(b"after")
    line = ["tar", "-C", str(tmp_path), "-cSf", f"{tmp_path}/a.tar", *flags, "sparse", "after"]
    subprocess.run(line, check=True)
    data = (tmp_path / "a.tar").read_bytes()
    assert len(data) < place.stat().st_size
    for make in (io.BytesIO, forward):
        found = {}
        for member, content in tar_items(make(data), "lab"):
            assert content is not None
            found[member.name] = content.read(1000) + content.read(123_457) + content.read()
            assert member.size == len(found[member.name]) and content.read(1) == b""
        assert found == {"sparse": place.read_bytes(), "after": b"after"}


@pytest.mark.parametrize(
    "records",
    [
        [("major", b"1"), ("minor", b"0"), ("realsize", b"9")],
        [("major", b"2"), ("minor", b"0"), ("realsize", b"9")],
        [("map", b"0,600"), ("size", b"500")],
        [("map", b"0,300,200,300"), ("size", b"1000")],
        [("map", b"0,600,1"), ("size", b"1000")],
        [("map", b"0,300"), ("size", b"1000")],
        [("map", b"0,600,600,100"), ("size", b"1000")],
        [("map", b"0,-600"), ("size", b"1000")],
        [("map", b"0,600"), ("size", b"99999999999999999")],
        [("map", b"0,600")],
        [("numbytes", b"600"), ("offset", b"0"), ("size", b"600")],
    ],
)
def test_a_sparse_map_that_makes_no_sense_is_refused(records: list[tuple[str, bytes]]) -> None:
    header = pax(*[(f"GNU.sparse.{key}", value) for key, value in records])
    with pytest.raises(
        BuildError, match=r"lab: (f: (the map of a sparse|a sparse file of)|more than 137438953472 bytes)"
    ):
        read(header + plain(data=b"1" * 600) + END)
