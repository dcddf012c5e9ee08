"""Members inflated by isal are those that zipfile reads, and damage is told."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.layers.contents import open_member
from examples import examples

DAMAGE = (zipfile.BadZipFile, EOFError)


def archive_of(data: bytes, level: int = 6) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        archive.writestr("first", b"first" * 20_000)
        archive.writestr("large", data)
    return buffer.getvalue()


def content(seed: int, size: int) -> bytes:
    dice = random.Random(seed)
    words = [dice.randbytes(dice.randrange(1, 400)) for _ in range(20)]
    return b"".join(dice.choice(words) for _ in range(size // 100))[:size].ljust(size, b"\0")


@examples(60)
@given(
    st.integers(0, 1 << 30),
    st.integers(65_536, 400_000),
    st.integers(0, 9),
    st.lists(st.sampled_from([1, 7, 100, 4096, 70_000, 1 << 18]), min_size=1, max_size=6),
)
def test_every_way_of_reading_gives_what_zipfile_gives(seed: int, size: int, level: int, steps: list[int]) -> None:
    data = content(seed, size)
    archive = zipfile.ZipFile(io.BytesIO(archive_of(data, level)))
    with open_member(archive, archive.getinfo("large")) as stream:
        found = b""
        for step in steps:
            got = stream.read(step)
            assert len(got) == min(step, size - len(found))
            found += got
        found += stream.read()
        assert found == data and stream.read(1) == b""


@examples(100)
@given(st.integers(0, 99), st.data())
def test_no_damage_goes_unseen(seed: int, data: st.DataObject) -> None:
    whole = content(seed, 100_000)
    raw = bytearray(archive_of(whole))
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        info = archive.getinfo("large")
    at = data.draw(st.integers(info.header_offset + 40, info.header_offset + info.compress_size))
    raw[at] ^= data.draw(st.integers(1, 255))
    archive = zipfile.ZipFile(io.BytesIO(raw))
    with pytest.raises(DAMAGE), open_member(archive, archive.getinfo("large")) as stream:
        while stream.read(10_000):
            pass


def test_an_archive_that_lies_about_a_size_is_refused(tmp_path: Path) -> None:
    for by in (-1, 1):
        with zipfile.ZipFile(io.BytesIO(archive_of(content(1, 100_000)))) as archive:
            info = archive.getinfo("large")
            info.file_size += by
            with pytest.raises(DAMAGE), open_member(archive, info) as stream:
                while stream.read(10_000):
                    pass
