"""The format of squashfs: numbers and records of its tables, and its compressors with their names and options.

Sources: Documentation/filesystems/squashfs.rst and fs/squashfs/squashfs_fs.h of the Linux kernel. Each compressor comes
with a Python package, so that its output is the same on every host. The exception is xz, which uses the host's liblzma
through Python.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from envbuild.base.errors import UsageError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, SYMLINK

# The size of a data block in bytes; docs/howto/squashfs.md explains the choice of 128 KiB.
BLOCK_SIZE = 1 << 17
# This bit in a block's size word marks an uncompressed block.
UNCOMPRESSED = 1 << 24
SIZE_MASK = UNCOMPRESSED - 1
# The size of an uncompressed metadata block in bytes; this bit in its header marks it as stored uncompressed.
METADATA_SIZE = 1 << 13
METADATA_STORED = 1 << 15
MAGIC = 0x73717368
NO_FRAGMENT = NO_XATTRS = 0xFFFFFFFF
NO_TABLE = 0xFFFFFFFFFFFFFFFF
# `Entry` has no constant for sockets, because archives contain none.
SOCKET = "socket"
# The types of basic inodes and of entries in directories, from 1 on; extended inodes have the following numbers.
KINDS = (DIR, FILE, SYMLINK, BLOCK, CHAR, FIFO, SOCKET)

SUPERBLOCK = struct.Struct("<IIIIIHHHHHHQQQQQQQQ")
# A row of the fragment table; a set of extended attributes; the header of the table of these sets.
FRAGMENT = XATTR_SET = XATTR_TABLE = struct.Struct("<QII")
# Before the names of a directory: their count less 1, the block and the number of the first inode.
DIR_HEADER = struct.Struct("<III")
DIR_ENTRY = struct.Struct("<HhHH")
# The head of each inode, and the rest of the basic and the extended ones of files and directories.
INODE = struct.Struct("<HHHHII")
REST = {
    FILE: (struct.Struct("<IIII"), struct.Struct("<QQQIIII")),
    DIR: (struct.Struct("<IIHHI"), struct.Struct("<IIIIHHI")),
}


@dataclass(frozen=True, slots=True)
class Fragment:
    """A block with the ends of files: its position in bytes, and its size word."""

    start: int
    word: int


@dataclass(frozen=True, slots=True)
class Data:
    """The position of a regular file's content in a segment or an image.

    `start` is the offset in bytes of its first block; `words` are the size words of the blocks (0 is a block of zeros
    that is not stored). The rest that does not fill a block may be in fragment block number `fragment`, at `offset` in
    its uncompressed bytes. `digest` is the sha256 of the content (hexadecimal).
    """

    start: int = 0
    words: tuple[int, ...] = ()
    fragment: int = NO_FRAGMENT
    offset: int = 0
    digest: str = ""

    @property
    def stored(self) -> int:
        """The stored size of the blocks in bytes, without the fragment."""
        return sum(word & SIZE_MASK for word in self.words)


Compress = Callable[[bytes | memoryview], bytes]
Decompress = Callable[[bytes, int], bytes]

NAMES = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}


@dataclass(frozen=True, slots=True)
class Codec:
    """A compressor with its level.

    `number` is the compressor's number in the superblock; `options` is the block after the superblock, empty if the
    format needs none; `identity` is everything that determines the compressed bytes. `compress` may be called by
    several threads at once.
    """

    number: int
    identity: str
    options: bytes
    compress: Compress


def codec_of(text: str) -> Codec:
    """Parse `NAME` or `NAME:LEVEL`. Raises UsageError for an unknown compressor or level."""
    name, colon, level_text = text.partition(":")
    if name not in _KNOWN:
        raise UsageError(
            f"compression {text!r}: unknown compressor {name!r}",
            f"one of {', '.join(sorted(_KNOWN))}, with a level if you like: zstd:15",
        )
    number, default, low, high, make, _ = _KNOWN[name]
    if colon and not (level_text.isascii() and level_text.isdigit() and len(level_text) < 5):
        raise UsageError(f"compression {text!r}: {level_text!r} is not a level", f"{low} to {high}")
    level = int(level_text) if colon else default
    if not low <= level <= high:
        raise UsageError(f"compression {text!r}: {name} has no level {level}", f"{low} to {high}")
    version, options, compress = make(level)
    return Codec(number, f"{name} {version or 'of the host'} level {level}", options, compress)


def decompressor(number: int) -> Decompress:
    """Return the decompressor for this compressor number, a function (data, maximum size) → bytes.

    The function raises ValueError for damaged data and for output that exceeds the maximum. Raises UsageError for a
    compressor that is not supported (lzo, lzma).
    """
    name = NAMES.get(number, f"number {number}")
    if name not in _KNOWN:
        raise UsageError(
            f"the compressor {name} of this squashfs cannot be read", "make the image with zstd, gzip, lz4 or xz"
        )
    return _KNOWN[name][-1]


def _gzip(level: int) -> tuple[str, bytes, Compress]:
    from importlib.metadata import version

    from deflate import zlib_compress

    # The window and the strategies are the defaults; they are written because the level may differ from its default.
    options = struct.pack("<IHH", min(level, 9), 15, 1)
    return version("deflate"), options, lambda data: bytes(zlib_compress(data, level))


def _gunzip(data: bytes, most: int) -> bytes:
    return _whole(zlib.decompressobj(), data, most, zlib.error)


def _xz(level: int) -> tuple[str, bytes, Compress]:
    import lzma

    # The kernel's decoder supports no check but CRC32, and a dictionary of at most one block.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": level, "dict_size": BLOCK_SIZE}]
    return "", b"", partial(lzma.compress, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=filters)


def _unxz(data: bytes, most: int) -> bytes:
    import lzma

    return _whole(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=1 << 27), data, most, lzma.LZMAError)


def _whole(decoder: Any, data: bytes, most: int, failure: type[Exception]) -> bytes:
    try:
        content: bytes = decoder.decompress(data, most)
    except failure as error:
        raise ValueError(str(error)) from None
    if not decoder.eof:
        raise ValueError("longer than it may be, or cut short")
    return content


def _lz4(level: int) -> tuple[str, bytes, Compress]:
    from lz4.block import compress
    from lz4.version import version

    high = {"mode": "high_compression", "compression": level} if level else {}
    return version, struct.pack("<II", 1, level > 0), partial(compress, store_size=False, **high)


def _unlz4(data: bytes, most: int) -> bytes:
    from lz4.block import LZ4BlockError, decompress

    try:
        return bytes(decompress(data, uncompressed_size=most))
    except LZ4BlockError as error:
        raise ValueError(str(error)) from None


def _zstd(level: int) -> tuple[str, bytes, Compress]:
    import zstandard

    local = threading.local()  # a compressor serves one thread at a time

    def compress(data: bytes | memoryview) -> bytes:
        if not hasattr(local, "compressor"):
            local.compressor = zstandard.ZstdCompressor(level=level)
        return bytes(local.compressor.compress(data))

    return ".".join(map(str, zstandard.ZSTD_VERSION)), struct.pack("<I", level), compress


def _unzstd(data: bytes, most: int) -> bytes:
    import zstandard

    try:
        # zstandard applies max_output_size only to frames that do not declare their size.
        if zstandard.frame_content_size(data) > most:
            raise ValueError("longer than it may be")
        return bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=most))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


# name → (number, default level, lowest, highest, level → (version, options, compressor), decompressor)
_KNOWN: dict[str, tuple[int, int, int, int, Callable[[int], tuple[str, bytes, Compress]], Decompress]] = {
    "gzip": (1, 6, 1, 12, _gzip, _gunzip),
    "xz": (4, 6, 0, 9, _xz, _unxz),
    "lz4": (5, 0, 0, 12, _lz4, _unlz4),
    "zstd": (6, 3, 1, 19, _zstd, _unzstd),
}
