"""Containers of code for GPUs as compilers write them, with other bytes in place of the code."""

from __future__ import annotations

import struct
import zlib

import zstandard

KINDS = {"compute": 1, "sm": 2, "lto": 8}
FLAGS = {"a": 1 << 20, "f": 1 << 21}


def entry(code: str, payload: bytes, header: int = 64) -> bytes:
    kind, _, number = code.partition("_")
    flags = FLAGS.get(number[-1], 0) | 0x2011
    head = struct.pack(
        "<HHIQIIHHIIIQQQ",
        KINDS[kind],
        0x101,
        header,
        len(payload),
        0,
        0,
        0,
        0,
        int(number.rstrip("af")),
        0,
        0,
        flags,
        0,
        0,
    )
    return head.ljust(header, b"\0") + payload


def fatbin(*codes: str, payload: bytes = b"code" * 50, header: int = 64) -> bytes:
    """Return a container as nvcc 13.5 writes it; its entries' headers have 64, 80, 96 or 120 bytes."""
    entries = b"".join(entry(code, payload, header) for code in codes)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def bundle(*codes: str, payload: bytes = b"\x7fELF" * 50) -> bytes:
    """Return a bundle as clang-offload-bundler writes it."""
    names = [b"host-x86_64-unknown-linux", *(b"hipv4-amdgcn-amd-amdhsa--" + code.encode() for code in codes)]
    table = struct.pack("<24sQ", b"__CLANG_OFFLOAD_BUNDLE__", len(names))
    for number, name in enumerate(names):
        size = len(payload) if number else 0
        table += struct.pack("<QQQ", 4096 + max(0, number - 1) * len(payload), size, len(name)) + name
    return table.ljust(4096, b"\0") + payload * len(codes)


def compressed(data: bytes, version: int = 3, method: int = 1) -> bytes:
    """Return a compressed bundle as `clang-offload-bundler -compress` writes it."""
    text = zlib.compress(data) if method == 0 else zstandard.compress(data)
    sizes = {1: "I", 2: "II", 3: "QQ"}[version]
    head = struct.calcsize(f"<4sHH{sizes}Q")
    both = (len(data),) if version == 1 else (head + len(text), len(data))
    return struct.pack(f"<4sHH{sizes}Q", b"CCOB", version, method, *both, 7) + text
