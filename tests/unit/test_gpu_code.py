"""The code for GPUs in ELF files: containers as nvcc and Clang write them, damaged ones, and arbitrary bytes."""

import io
import struct
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.gpu_files import bundle, compressed, fatbin

from envbuild.gpus import UNREADABLE, GpuCodeScanner, read_gpu_code


def fed(data: bytes, sizes: list[int]) -> Counter[tuple[str, ...]]:
    scanner, at, turn = GpuCodeScanner(), 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        scanner.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    return scanner.containers


@pytest.mark.parametrize(
    ("data", "codes"),
    [
        (
            fatbin("sm_80", "sm_90a", "compute_90", "sm_100f", "compute_120f"),
            ("compute_120f", "compute_90", "sm_100f", "sm_80", "sm_90a"),
        ),
        (fatbin("sm_103", header=120), ("sm_103",)),
        (fatbin("lto_90", "sm_90"), ("sm_90",)),
        (
            bundle("gfx90a:xnack-", "gfx1100", "gfx9-4-generic", "gfx90a:sramecc+:xnack+"),
            ("gfx1100", "gfx9-4-generic", "gfx90a:sramecc+:xnack+", "gfx90a:xnack-"),
        ),
        (compressed(bundle("gfx90a", "gfx942:xnack-")), ("gfx90a", "gfx942:xnack-")),
        (compressed(bundle("gfx90a"), version=2), ("gfx90a",)),
        (compressed(bundle("gfx90a"), version=2, method=0), ("gfx90a",)),
        (compressed(bundle("gfx90a"), version=1), (UNREADABLE,)),
    ],
)
def test_each_form_of_a_container(data: bytes, codes: tuple[str, ...]) -> None:
    for text in (data, b"\x7fELF" + bytes(9000) + data + bytes(5)):
        assert read_gpu_code(io.BytesIO(text)) == fed(text, [len(text)]) == {codes: 1}


def test_containers_are_counted_and_their_code_is_not_searched() -> None:
    inner = fatbin("sm_75")
    data = fatbin("sm_90", payload=inner) * 3 + bytes(8) + fatbin("sm_80", "compute_80") + bundle("gfx942")
    assert read_gpu_code(io.BytesIO(data)) == {("sm_90",): 3, ("compute_80", "sm_80"): 1, ("gfx942",): 1}


@pytest.mark.parametrize(
    "data",
    [
        b"\xb8\x50\xed\x55\xba\x01\x00\x10\x00\xff\xff",  # the constant in a program: mov eax, 0xba55ed50
        fatbin("lto_90"),
        fatbin("sm_90")[:-1].replace(struct.pack("<I", 64), struct.pack("<I", 63), 1),
        fatbin("sm_90").replace(struct.pack("<Q", 200), struct.pack("<Q", 201), 1),
        struct.pack("<IHHQ", 0xBA55ED50, 2, 16, 64) + bytes(64),
        struct.pack("<24sQ", b"__CLANG_OFFLOAD_BUNDLE__", 1 << 40) + bytes(99),
        struct.pack("<24sQQQQ", b"__CLANG_OFFLOAD_BUNDLE__", 1, 0, 0, 1 << 50),
        bundle(),
        b"CCOB" * 9,
        struct.pack("<4sHHQQQ", b"CCOB", 3, 1, 100, 400, 7) + bytes(100),
        compressed(b"no bundle"),
    ],
)
def test_what_is_no_container_is_passed_over(data: bytes) -> None:
    assert read_gpu_code(io.BytesIO(data)) == {}
    assert read_gpu_code(io.BytesIO(data + fatbin("sm_90"))) == {("sm_90",): 1}


class Counted(io.BytesIO):
    total = 0

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self.total += len(found)
        return found


def test_the_code_itself_is_not_read() -> None:
    stream = Counted(fatbin("sm_80", "sm_90", payload=b"code" * (2 << 20)) * 2)
    assert read_gpu_code(stream) == {("sm_80", "sm_90"): 2} and stream.total < 3 << 20


pieces: Any = st.one_of(
    st.binary(max_size=60),
    st.builds(fatbin, st.sampled_from(["sm_90", "compute_80", "lto_75"]), payload=st.binary(max_size=80)),
    st.builds(bundle, st.sampled_from(["gfx90a:xnack+", "gfx1100", "x"]), payload=st.binary(max_size=80)),
    st.builds(compressed, st.just(bundle("gfx90a")), st.integers(1, 3), st.integers(0, 1)),
    st.builds(lambda data, size: data[:size], st.just(fatbin("sm_90", "sm_80")), st.integers(0, 400)),
    st.sampled_from([b"CCOB", b"\x50\xed\x55\xba", b"__CLANG_OFFLOAD_BUNDLE__", b"\x50\xed\x55\xba\1\0\x10\0"]),
)


@given(st.lists(pieces, max_size=6), st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_any_bytes_end_and_are_the_same_in_any_pieces(parts: list[bytes], sizes: list[int]) -> None:
    data = b"".join(parts)
    found = fed(data, sizes)
    assert found == fed(data, [max(1, len(data))]) == read_gpu_code(io.BytesIO(data))


@given(st.lists(pieces, min_size=1, max_size=4), st.data())
def test_a_damaged_file_ends_and_little_is_kept(parts: list[bytes], draw: st.DataObject) -> None:
    data = bytearray(b"".join(parts))
    for _ in range(draw.draw(st.integers(0, 8))):
        if data:
            data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    scanner, stream = GpuCodeScanner(), Counted(bytes(data))
    for at in range(0, len(data), 16):
        scanner.feed(bytes(data[at : at + 16]))
        assert len(scanner._rest) < 300_000 and scanner.skip >= 0
    assert read_gpu_code(stream) == scanner.containers and stream.total <= len(data)
