"""Compressors of squashfs: their names, numbers and options.

Each compressor comes with a Python package, so that its output is the same on every host. The exception is xz, which
uses the host's liblzma through Python.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from envbuild.errors import UsageError
from envbuild.image.squashfs.model import BLOCK_SIZE

Compress = Callable[[bytes], bytes]
Decompress = Callable[[bytes, int], bytes]


@dataclass(frozen=True, slots=True)
class Codec:
    """A compressor with its level.

    `number` is the compressor's number in the superblock; `options` is the block after the superblock, empty if the
    format needs none; `identity` is everything that determines the compressed bytes. `compress` may be called by
    several threads at once.
    """

    name: str
    number: int
    level: int
    identity: str
    options: bytes
    compress: Compress


# name → (number, default level, lowest, highest)
_KNOWN = {"gzip": (1, 6, 1, 12), "xz": (4, 6, 0, 9), "lz4": (5, 0, 0, 12), "zstd": (6, 3, 1, 19)}
NAMES = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}
DEFAULT = "zstd"


def codec_of(text: str) -> Codec:
    """Parse `NAME` or `NAME:LEVEL`. Raises UsageError for an unknown compressor or level."""
    name, colon, level_text = text.partition(":")
    if name not in _KNOWN:
        raise UsageError(
            f"compression {text!r}: no compressor is called {name!r}",
            f"one of {', '.join(sorted(_KNOWN))}, with a level if you like: zstd:15",
        )
    number, default, low, high = _KNOWN[name]
    if colon and not (level_text.isascii() and level_text.isdigit()):
        raise UsageError(f"compression {text!r}: {level_text!r} is no level", f"{low} to {high}")
    level = int(level_text) if colon else default
    if not low <= level <= high:
        raise UsageError(f"compression {text!r}: {name} has no level {level}", f"{low} to {high}")
    make = {"gzip": _gzip, "xz": _xz, "lz4": _lz4, "zstd": _zstd}[name]
    version, options, compress = make(level)
    return Codec(name, number, level, f"{name} {version or 'of the host'} level {level}", options, compress)


def decompressor(number: int) -> Decompress:
    """Return the decompressor for this compressor number, a function (data, maximum size) → bytes.

    The function raises ValueError for damaged data and for output that exceeds the maximum. Raises UsageError for a
    compressor that is not supported (lzo, lzma).
    """
    found = {1: _gunzip, 4: _unxz, 5: _unlz4, 6: _unzstd}.get(number)
    if found is None:
        name = NAMES.get(number, f"number {number}")
        raise UsageError(
            f"the compressor {name} of this squashfs cannot be read", "make the image with zstd, gzip, lz4 or xz"
        )
    return found


def _gzip(level: int) -> tuple[str, bytes, Compress]:
    from importlib.metadata import version

    from deflate import zlib_compress

    # The window and the strategies are the defaults; they are written because the level may differ from its default.
    options = struct.pack("<IHH", min(level, 9), 15, 1)
    return version("deflate"), options, lambda data: bytes(zlib_compress(data, level))


def _xz(level: int) -> tuple[str, bytes, Compress]:
    import lzma

    # The kernel's decoder supports no check but CRC32, and a dictionary of at most one block.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": level, "dict_size": BLOCK_SIZE}]
    return "", b"", partial(lzma.compress, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=filters)  # fmt: skip


def _lz4(level: int) -> tuple[str, bytes, Compress]:
    from lz4.block import compress
    from lz4.version import version

    if level == 0:
        return version, struct.pack("<II", 1, 0), lambda data: compress(data, store_size=False)
    high = partial(compress, mode="high_compression", compression=level, store_size=False)
    return version, struct.pack("<II", 1, 1), high


def _zstd(level: int) -> tuple[str, bytes, Compress]:
    import zstandard

    local = threading.local()  # a compressor serves one thread at a time

    def compress(data: bytes) -> bytes:
        try:
            one = local.one
        except AttributeError:
            one = local.one = zstandard.ZstdCompressor(level=level)
        return bytes(one.compress(data))

    return ".".join(map(str, zstandard.ZSTD_VERSION)), struct.pack("<I", level), compress


class _BlockDecoder(Protocol):
    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, most: int, /) -> bytes: ...


def _gunzip(data: bytes, most: int) -> bytes:
    import zlib

    return _whole(zlib.decompressobj(), data, most, zlib.error)


def _unxz(data: bytes, most: int) -> bytes:
    import lzma

    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=1 << 27)
    return _whole(decoder, data, most, lzma.LZMAError)


def _whole(decoder: _BlockDecoder, data: bytes, most: int, failure: type[Exception]) -> bytes:
    try:
        found = decoder.decompress(data, most)
    except failure as error:
        raise ValueError(str(error)) from None
    if not decoder.eof:
        raise ValueError("longer than it may be, or cut short")
    return found


def _unlz4(data: bytes, most: int) -> bytes:
    from lz4.block import LZ4BlockError, decompress

    try:
        return bytes(decompress(data, uncompressed_size=most))
    except LZ4BlockError as error:
        raise ValueError(str(error)) from None


def _unzstd(data: bytes, most: int) -> bytes:
    import zstandard

    try:
        # zstandard applies max_output_size only to frames that do not declare their size.
        if zstandard.frame_content_size(data) > most:
            raise ValueError("longer than it may be")
        return bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=most))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
