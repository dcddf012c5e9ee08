"""SIF files: what is written is what the specification says, what is read is checked."""

from __future__ import annotations

import io
import struct
import tempfile
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.image.sif import DEFINITION, JSON, PARTITION, finish_sif, is_sif, read_object, read_sif, write_sif_front
from envbuild.image.squashfs.read import SquashfsImage

IMAGE = Path(__file__).with_name("data").joinpath("zstd.sqsh").read_bytes()
DEFINITION_TEXT = b"Bootstrap: docker\nFrom: debian:12\n"
JSONS = (("inspect-metadata.json", b'{"type":"container"}'), ("oci-config.json", b"{}"))
PART = 4096 + 3 * 585  # the descriptor of the partition


def filed(data: bytes) -> BinaryIO:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it is removed when nobody refers to it
    file.write(data)
    file.flush()
    return cast(BinaryIO, file)


def made(
    definition: bytes = DEFINITION_TEXT,
    jsons: tuple[tuple[str, bytes], ...] = JSONS,
    arch: str = "x86_64",
    image: bytes = IMAGE,
    mtime: int = 1577836800,
) -> bytes:
    out = io.BytesIO()
    start = write_sif_front(out, definition, jsons, arch)
    assert out.tell() == start
    out.write(image)
    finish_sif(out, definition, jsons, arch, partition_size=len(image), mtime=mtime)
    assert out.tell() == start + len(image)
    return out.getvalue()


def patched(at: int, form: str, *values: int | bytes) -> io.BytesIO:
    data = bytearray(made())
    struct.pack_into(form, data, at, *values)
    return io.BytesIO(data)


def test_the_header_and_each_descriptor_are_where_the_specification_has_them() -> None:
    data = made()
    assert data[:32] == b"#!/usr/bin/env run-singularity\n\0"
    assert data[32:48] == b"SIF_MAGIC\x0001\x0002\0"
    assert data[48:64] != bytes(16)
    times_and_sizes = struct.unpack_from("<8q", data, 64)
    assert times_and_sizes == (1577836800, 1577836800, 44, 48, 4096, 28080, 32176, 592 + len(IMAGE))
    found = [struct.unpack_from("<iBIIIqqqqqqq", data, 4096 + 585 * n) for n in range(5)]
    sizes = [len(DEFINITION_TEXT), len(JSONS[0][1]), len(JSONS[1][1]), len(IMAGE)]
    offsets = [32176, 32176 + sizes[0], 32176 + sizes[0] + sizes[1], 32768]
    padded = [*sizes[:3], sizes[3] + 32768 - offsets[2] - sizes[2]]
    for n, kind in enumerate((0x4001, 0x4006, 0x4006, 0x4004)):
        same = (1577836800, 1577836800, 0, 0)
        place = (offsets[n], sizes[n], padded[n])
        assert found[n] == (kind, 1, n + 1, 0xF0000001, 0, *place, *same)
    assert found[4] == (0,) * 12 and not any(data[4096 + 585 * 4 : 32176])
    name = 4096 + 585 + 73
    assert data[name : name + 128] == b"inspect-metadata.json".ljust(128, b"\0")
    extra = PART + 73 + 128
    assert data[extra : extra + 384] == struct.pack("<ii3s", 1, 2, b"02\0").ljust(384, b"\0")
    assert data[32768:] == IMAGE


def test_the_bytes_depend_on_the_input_alone() -> None:
    assert made() == made()
    others = [made(b""), made(jsons=()), made(arch="aarch64"), made(jsons=JSONS[::-1])]
    identifiers = [data[48:64] for data in (made(), *others)]
    assert len(set(identifiers)) == len(identifiers)
    assert made(mtime=5)[48:64] == identifiers[0]


@given(
    st.binary(max_size=9000),
    st.lists(st.tuples(st.text("abc.é", max_size=20), st.binary(max_size=9000)), max_size=5),
    st.sampled_from(["x86_64", "aarch64"]),
    st.integers(0, 1 << 33),
)
def test_what_was_written_is_read(definition: bytes, jsons: list[tuple[str, bytes]], arch: str, mtime: int) -> None:
    data = made(definition, tuple(jsons), arch, mtime=mtime)
    stream = filed(data)
    assert is_sif(data[:64])
    sif = read_sif(stream, "lab.sif")
    assert (sif.arch, sif.mtime) == (arch, mtime)
    assert [item.kind for item in sif.objects] == [DEFINITION, *[JSON] * len(jsons), PARTITION]
    found = [(item.name, read_object(stream, item, "lab.sif")) for item in sif.objects]
    assert found == [("", definition), *jsons, ("", IMAGE)]
    assert sif.partition.offset % 4096 == 0
    image = SquashfsImage(stream, sif.partition.offset, "lab.sif")
    assert image.find("numbers") is not None


def test_a_sif_with_more_than_we_write_is_read() -> None:
    data = bytearray(made())
    # a signature behind the partition, as `apptainer sign` adds it, and an object of a kind to come
    for slot, kind in ((4, 0x4005), (5, 0x4FFF)):
        row = struct.pack("<iBIIIqqqqqqq", kind, 1, slot + 1, 0, 4, len(data), 3, 3, 0, 0, 0, 0)
        data[4096 + 585 * slot : 4096 + 585 * slot + len(row)] = row
        data += b"abc"
    struct.pack_into("<q", data, 80, 42)
    data[:32] = b"#!/usr/bin/env run-other\n".ljust(32, b"\0")
    sif = read_sif(io.BytesIO(data), "lab.sif")
    assert [item.kind for item in sif.objects[4:]] == ["signature", "type 0x4fff"]
    assert sif.partition.size == len(IMAGE)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (io.BytesIO(), "cut short"),
        (io.BytesIO(bytes(200)), "not a SIF"),
        (io.BytesIO(made()[:30000]), "cut short"),
        (io.BytesIO(made()[:-1]), "outside of the file"),
        (patched(42, "<3s", b"02\0"), "unknown version '02'"),
        (patched(88, "<q", 1 << 40), "descriptors"),
        (patched(88, "<q", -1), "descriptors"),
        (patched(80, "<q", 48), "descriptors"),
        (patched(80, "<q", 12), "36 are announced"),
        (patched(96, "<q", -4096), "cut short"),
        (patched(96, "<q", 1 << 62), "cut short"),
        (patched(PART + 17, "<q", -1), "outside of the file"),
        (patched(PART + 25, "<q", (1 << 63) - 1), "outside of the file"),
        (patched(PART + 201, "<i", 5), "encrypted"),
        (patched(PART + 201, "<i", 2), "ext3"),
        (patched(PART + 201, "<i", 99), "number 99"),
        (patched(PART + 205, "<i", 3), "0 primary partitions"),
        (patched(PART + 209, "<3s", b"04\0"), "made for x86_64, with a partition for aarch64"),
    ],
)
def test_each_lie_is_found(stream: io.BytesIO, said: str) -> None:
    with pytest.raises(BuildError, match=f"^lab.sif: .*{said}"):
        read_sif(stream, "lab.sif")


@given(st.lists(st.tuples(st.integers(0, 4096 + 5 * 585), st.integers(0, 255)), max_size=6))
def test_a_damaged_sif_is_an_error_and_never_worse(changes: list[tuple[int, int]]) -> None:
    data = bytearray(made())
    for at, value in changes:
        data[at] = value
    stream = filed(data)
    try:
        sif = read_sif(stream, "lab.sif")
        for item in sif.objects:
            assert len(read_object(stream, item, "lab.sif")) == item.size
        SquashfsImage(stream, sif.partition.offset, "lab.sif")
    except BuildError as error:
        assert error.message.startswith("lab.sif: ")


def test_what_a_sif_cannot_hold_is_refused() -> None:
    with pytest.raises(BuildError, match="architecture 'z80'"):
        made(arch="z80")
    with pytest.raises(BuildError, match="too long"):
        made(jsons=(("n" * 128, b""),))
    with pytest.raises(BuildError, match="48 objects"):
        made(jsons=(("n", b""),) * 47)
    huge = read_sif(io.BytesIO(made()), "x").objects[0]
    with pytest.raises(BuildError, match="too many for a definition object"):
        read_object(io.BytesIO(), type(huge)(huge.kind, "", 0, 1 << 40), "lab.sif")
