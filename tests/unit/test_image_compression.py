"""Layers read uncompressed: each form, cut anywhere, damaged anywhere."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import lzma
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.image.layer import Hashed, decompressed, kind_of, open_layer


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


SKIPPED = b"\x50\x2a\x4d\x18\x05\x00\x00\x00notes"
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "none": lambda data: b"tar:" + data,
    "gzip": gzip.compress,
    "gzip, members": lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
    "gzip, padded": lambda data: gzip.compress(data) + bytes(700),
    "xz": lzma.compress,
    "xz, streams": lambda data: lzma.compress(data[:1000]) + bytes(8) + lzma.compress(data[1000:]) + bytes(4),
    "zstd": zstd,
    "zstd, frames": lambda data: zstd(data[:1000]) + zstd(b"") + zstd(data[1000:]),
    "zstd, skipped frames": lambda data: SKIPPED + zstd(data) + SKIPPED,
}
DATA = random.Random(1).randbytes(9000) + bytes(3 << 20) + b"end" * 50_000


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_whole_in_any_steps(form: str, tmp_path: Path) -> None:
    stored = FORMS[form](DATA)
    wanted = stored if form == "none" else DATA
    path = tmp_path / "layer"
    path.write_bytes(stored)
    with open_layer(path, "lab") as stream:
        assert stream.seekable() == (form == "none")
        assert stream.read() == wanted
    for size in (1000, 4096, 1 << 21):
        with decompressed(io.BytesIO(stored), "lab") as stream:
            parts = list(iter(lambda: stream.read(size), b""))  # noqa: B023 - used up at once
        assert b"".join(parts) == wanted
        assert {len(part) for part in parts[:-1]} <= {size}
    with io.BufferedReader(decompressed(io.BytesIO(stored), "lab")) as buffered:  # type: ignore[type-var]
        assert buffered.read(10) == wanted[:10]


@pytest.mark.parametrize("form", ["gzip", "gzip, members", "xz", "zstd", "zstd, frames"])
def test_a_blob_cut_short_is_an_error_that_names_the_layer(form: str) -> None:
    data = DATA[:20_000]
    stored = FORMS[form](data)
    for cut in (5, 17, len(stored) // 2, *range(len(stored) - 20, len(stored))):
        with pytest.raises(BuildError, match=r"^layer 3: the \w+ data is cut short$"):
            decompressed(io.BytesIO(stored[:cut]), "layer 3").read()


@given(st.sampled_from(["gzip", "xz", "zstd"]), st.integers(0, 5000), st.integers(1, 255))
def test_a_damaged_blob_never_gives_other_data(form: str, at: int, flip: int) -> None:
    """Checksums of all formats see it; bytes that say nothing (times, names) may change."""
    data = DATA[:6000]
    stored = bytearray(FORMS[form](data))
    stored[at] ^= flip
    try:
        read = decompressed(io.BytesIO(bytes(stored)), "lab").read()
    except BuildError as error:
        assert error.message.startswith("lab: the ")
    else:
        assert read == data or kind_of(bytes(stored[:4])) == "none"


def test_junk_after_the_end_is_an_error() -> None:
    for form in ("gzip", "xz", "zstd"):
        with pytest.raises(BuildError, match="corrupt"):
            decompressed(io.BytesIO(FORMS[form](DATA) + b"junk"), "lab").read()


def test_a_bomb_is_read_in_bounded_memory() -> None:
    """40 GB of zeros in a few kilobytes: the first bytes come at once."""
    import resource

    block = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for stored in (block * 640, gzip.compress(bytes(16 << 20), 9) * 40, lzma.compress(bytes(16 << 20)) * 40):
        stream = decompressed(io.BytesIO(stored), "lab")
        for _ in range(40):
            assert stream.read(1 << 20) == bytes(1 << 20)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 400 << 10  # in KiB


def test_a_blob_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"layer 1: .*No such file"):
        open_layer(tmp_path / "none", "layer 1")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("processors", [1, 8])
def test_a_hashed_stream_has_the_digest_of_all_bytes_however_they_are_read(
    monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    monkeypatch.setattr("envbuild.base.host.workers", lambda _: processors)
    data = bytes(range(251)) * 20_000
    stream = Hashed(io.BytesIO(data))
    found, sizes = b"", itertools.cycle([0, 1, 512, 200_000, 3, 1 << 20, 131_071, 131_072])
    while len(found) < 4_000_000:
        found += stream.read(next(sizes))
    assert found == data[: len(found)]
    assert stream.finish() == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert stream.read(1) == b""
    stream.close()
