"""Inodes of squashfs: the basic form if it is sufficient, else the extended form.

Source: the inode structures of fs/squashfs/squashfs_fs.h of the Linux kernel.
"""

from __future__ import annotations

import struct

from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, SYMLINK
from envbuild.image.squashfs.directories import DirectoryListing
from envbuild.image.squashfs.model import Data

# The type of a basic inode and of a directory entry.
TYPES = {DIR: 1, FILE: 2, SYMLINK: 3, BLOCK: 4, CHAR: 5, FIFO: 6}
NO_XATTRS = 0xFFFFFFFF
_EXTENDED = 7  # added to the basic type for an extended inode
_END32 = 1 << 32

# mode, index of the owner and of the group in the id table, mtime, inode number
Head = tuple[int, int, int, int, int]

_HEAD = "<HHHHII"
_FILE = struct.Struct(_HEAD + "IIII")
_LONG_FILE = struct.Struct(_HEAD + "QQQIIII")
_DIR = struct.Struct(_HEAD + "IIHHI")
_LONG_DIR = struct.Struct(_HEAD + "IIIIHHI")
_LINK = struct.Struct(_HEAD + "II")
_DEVICE = struct.Struct(_HEAD + "II")
_FIFO = struct.Struct(_HEAD + "I")
_XATTR = struct.Struct("<I")
_WORD = struct.Struct("<I")


def regular(head: Head, data: Data, size: int, links: int, xattrs: int, block_size: int) -> bytes:
    """Return the inode of a regular file of `size` bytes with `links` names."""
    words = data.words
    sparse = _sparse(words, size, block_size) if 0 in words else 0
    if links == 1 and xattrs == NO_XATTRS and not sparse and size < _END32 and data.start < _END32:
        record = _FILE.pack(TYPES[FILE], *head, data.start, data.fragment, data.offset, size)
    else:
        kind = TYPES[FILE] + _EXTENDED
        record = _LONG_FILE.pack(kind, *head, data.start, size, sparse, links, data.fragment, data.offset, xattrs)
    if len(words) == 1:
        return record + _WORD.pack(words[0])
    return record + struct.pack(f"<{len(words)}I", *words)


def directory(head: Head, listing: DirectoryListing, links: int, parent: int, xattrs: int) -> bytes:
    """Return the inode of a directory.

    `links` is 2 plus the number of subdirectories; `parent` is the inode number of the parent directory.
    """
    block, offset = listing.reference >> 16, listing.reference & 0xFFFF
    size = listing.size + 3  # the format counts "." and ".." as 3 bytes
    if size < 1 << 16 and xattrs == NO_XATTRS and not listing.index:
        return _DIR.pack(TYPES[DIR], *head, block, links, size, offset, parent)
    kind = TYPES[DIR] + _EXTENDED
    count = len(listing.index)
    record = _LONG_DIR.pack(kind, *head, links, size, block, parent, count, offset, xattrs)
    return record + b"".join(listing.index)


def symlink(head: Head, text: bytes, links: int, xattrs: int) -> bytes:
    """Return the inode of a symbolic link to `text`."""
    if xattrs == NO_XATTRS:
        return _LINK.pack(TYPES[SYMLINK], *head, links, len(text)) + text
    kind = TYPES[SYMLINK] + _EXTENDED
    return _LINK.pack(kind, *head, links, len(text)) + text + _XATTR.pack(xattrs)


def device(head: Head, kind: str, numbers: tuple[int, int], links: int, xattrs: int) -> bytes:
    """Return the inode of a device (CHAR or BLOCK) with a major number below 2^12 and a minor number below 2^20."""
    major, minor = numbers
    number = minor & 0xFF | major << 8 | (minor & ~0xFF) << 12
    if xattrs == NO_XATTRS:
        return _DEVICE.pack(TYPES[kind], *head, links, number)
    return _DEVICE.pack(TYPES[kind] + _EXTENDED, *head, links, number) + _XATTR.pack(xattrs)


def fifo(head: Head, links: int, xattrs: int) -> bytes:
    """Return the inode of a named pipe."""
    if xattrs == NO_XATTRS:
        return _FIFO.pack(TYPES[FIFO], *head, links)
    return _FIFO.pack(TYPES[FIFO] + _EXTENDED, *head, links) + _XATTR.pack(xattrs)


def _sparse(words: tuple[int, ...], size: int, block_size: int) -> int:
    """Return the number of a file's bytes in blocks of zeros, which are not stored."""
    sparse = words.count(0) * block_size
    # The last block may be shorter than the others.
    if words[-1] == 0 and len(words) * block_size > size:
        sparse -= len(words) * block_size - size
    return sparse
