"""Parsers of the inodes and directory listings of a squashfs image."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, SYMLINK
from envbuild.image.squashfs.model import NO_FRAGMENT
from envbuild.image.squashfs.read_tables import Cursor, ImageBytes, MetadataReader

# `Entry` has no constant for sockets, because archives contain none.
SOCKET = "socket"
_KINDS = (DIR, FILE, SYMLINK, BLOCK, CHAR, FIFO, SOCKET)
_COMMON = struct.Struct("<HHHHII")
_DIR = struct.Struct("<IIHHI")
_LONG_DIR = struct.Struct("<IIIIHHI")
_FILE = struct.Struct("<IIII")
_LONG_FILE = struct.Struct("<QQQIIII")
_PAIR = struct.Struct("<II")
_HEADER = struct.Struct("<III")
_NAME = struct.Struct("<HhHH")
# The format counts "." and "..", which a listing does not contain, as three bytes of its size.
_UNLISTED = 3
_MAX_TARGET = 65535
_MAX_LISTED = 256


@dataclass(frozen=True, slots=True)
class Inode:
    """A file of any kind. `size` is that of a regular file in bytes, or that of a directory's listing.

    A regular file's content begins with blocks at `start`, and `words` reads their size words; the end of the content
    may be in `fragment`, at `offset`. A directory's listing begins in block `start` of its table, at `offset`.
    """

    kind: str
    mode: int
    uid: int
    gid: int
    mtime: int
    links: int
    size: int = 0
    start: int = 0
    fragment: int = NO_FRAGMENT
    offset: int = 0
    target: str = ""
    device: tuple[int, int] = (0, 0)
    xattrs: int = NO_FRAGMENT
    words: Cursor | None = None


def read_inode(source: ImageBytes, cursor: Cursor, ids: tuple[int, ...]) -> Inode:
    """Parse the inode at `cursor`. Raises BuildError when it is malformed."""
    number, mode, uid, gid, mtime, _ = _COMMON.unpack(cursor.take(_COMMON.size))
    if not 1 <= number <= 2 * len(_KINDS):
        raise source.damaged(f"an inode of type {number}")
    if uid >= len(ids) or gid >= len(ids):
        raise source.damaged(f"an owner that is number {max(uid, gid)} of {len(ids)}")
    long, index = divmod(number - 1, len(_KINDS))
    kind = _KINDS[index]
    start = size = offset = 0
    links, fragment, xattrs = 1, NO_FRAGMENT, NO_FRAGMENT
    target, device, words = "", (0, 0), None
    if kind == FILE:
        if long:
            start, size, _, links, fragment, offset, xattrs = _LONG_FILE.unpack(cursor.take(_LONG_FILE.size))
        else:
            start, fragment, offset, size = _FILE.unpack(cursor.take(_FILE.size))
        words = cursor
    elif kind == DIR:
        if long:
            links, size, start, _, _, offset, xattrs = _LONG_DIR.unpack(cursor.take(_LONG_DIR.size))
        else:
            start, links, size, offset, _ = _DIR.unpack(cursor.take(_DIR.size))
    elif kind == SYMLINK:
        links, size = _PAIR.unpack(cursor.take(_PAIR.size))
        if not 0 < size <= _MAX_TARGET:
            raise source.damaged(f"a symbolic link of {size} bytes")
        raw = cursor.take(size)
        if b"\0" in raw:
            raise source.damaged("a symbolic link with a NUL in it")
        target, size = os.fsdecode(raw), 0
    elif kind in (BLOCK, CHAR):
        links, both = _PAIR.unpack(cursor.take(_PAIR.size))
        device = (both >> 8) & 0xFFF, (both & 0xFF) | ((both >> 12) & 0xFFF00)
    else:
        links = int.from_bytes(cursor.take(4), "little")
    if long and kind not in (FILE, DIR):
        xattrs = int.from_bytes(cursor.take(4), "little")
    return Inode(
        kind, mode & 0o7777, ids[uid], ids[gid], mtime, links, size, start, fragment, offset, target,
        device, xattrs, words,
    )  # fmt: skip


def listed(source: ImageBytes, table: MetadataReader, inode: Inode) -> Iterator[tuple[bytes, int]]:
    """Yield the names in a directory and the references of their inodes, block << 16 | offset, while reading.

    Raises BuildError for an invalid name, and for a name that is not greater than the previous one in byte order, as
    the format requires; so no name occurs twice.
    """
    left = inode.size - _UNLISTED
    if left <= 0:
        return
    cursor = table.cursor(inode.start, inode.offset)
    before = b""
    while left > 0:
        count, start, _ = _HEADER.unpack(cursor.take(_HEADER.size))
        left -= _HEADER.size
        if count >= _MAX_LISTED:
            raise source.damaged(f"a directory lists {count + 1} names at once")
        for _ in range(count + 1):
            offset, _, _, length = _NAME.unpack(cursor.take(_NAME.size))
            if length >= _MAX_LISTED:
                raise source.damaged(f"a directory lists a name of {length + 1} bytes")
            name = cursor.take(length + 1)
            left -= _NAME.size + length + 1
            if left < 0:
                raise source.damaged("a directory's listing is longer than it says")
            if name <= before:
                raise _bad_name(source, name, "twice, or not in order")
            if name in (b".", b"..") or b"/" in name or b"\0" in name:
                raise _bad_name(source, name, "not a name")
            before = name
            yield name, start << 16 | offset


def _bad_name(source: ImageBytes, name: bytes, what: str) -> BuildError:
    shown = ascii(os.fsdecode(name))
    return source.damaged(f"a directory lists {shown}: {what}")
