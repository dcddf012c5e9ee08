"""Inodes and directory listings of squashfs; an inode has the basic form if it is sufficient, else the extended one.

Sources: Documentation/filesystems/squashfs.rst, section 3.2, fs/squashfs/squashfs_fs.h and namei.c of the Linux kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.image.entry import BLOCK, CHAR, DIR, FILE, SYMLINK, Entry
from envbuild.image.squashfs import model
from envbuild.image.squashfs.metadata import MetadataWriter, encoded
from envbuild.image.squashfs.model import BLOCK_SIZE, METADATA_SIZE, NO_XATTRS, Data

# A name, its inode's number, and its type.
Row = tuple[bytes, int, int]
# mode, index of the owner and of the group in the id table, mtime, inode number
Head = tuple[int, int, int, int, int]

# The type of a basic inode and of a directory entry.
TYPES = {kind: number for number, kind in enumerate(model.KINDS, 1)}
_END32 = 1 << 32
_WORD = struct.Struct("<I")
_INDEX = struct.Struct("<III")
_RUN_MOST = 256  # maximum entries per header
_FAR = 1 << 15  # entries store their inode number as a difference from the header's
_INDEX_MOST = 0xFFFF


@dataclass(frozen=True, slots=True)
class DirectoryListing:
    """The position of a directory's entries in the directory table, their size in bytes, and the index.

    The kernel uses the index to find names in long listings.
    """

    reference: int
    size: int
    index: tuple[bytes, ...]


def write_listing(table: MetadataWriter, rows: Sequence[Row], inodes: Sequence[int]) -> DirectoryListing:
    """Add the entries of one directory, `rows` in order of their names, to the directory table.

    `inodes` maps inode numbers to references. Entries form runs, each after a header; the inodes of a run are in one
    metadata block. Each block of the table begins a new run, and the index points to it. The kernel reads whole blocks,
    so more index entries would not help.
    """
    beginning = table.next
    size = 0
    index: list[bytes] = []
    indexed_block = beginning >> 16
    run = bytearray()
    count, run_block, run_number, room = 0, -1, 0, 0

    def end_run() -> int:
        if not count:
            return 0
        table.add(model.DIR_HEADER.pack(count - 1, run_block, run_number) + run)
        return model.DIR_HEADER.size + len(run)

    for name, number, kind in rows:
        reference = inodes[number]
        block = reference >> 16
        if block != run_block or count == _RUN_MOST or len(run) >= room or not -_FAR <= number - run_number < _FAR:
            size += end_run()
            run.clear()
            at = table.next
            if at >> 16 != indexed_block and len(index) < _INDEX_MOST:
                index.append(_INDEX.pack(size, at >> 16, len(name) - 1) + name)
                indexed_block = at >> 16
            room = METADATA_SIZE - (at & 0xFFFF) - model.DIR_HEADER.size
            count, run_block, run_number = 0, block, number
        run += model.DIR_ENTRY.pack(reference & 0xFFFF, number - run_number, kind, len(name) - 1) + name
        count += 1
    return DirectoryListing(beginning, size + end_run(), tuple(index))


def regular(head: Head, data: Data, size: int, links: int, xattrs: int) -> bytes:
    """Return the inode of a regular file of `size` bytes with `links` names."""
    words = data.words
    sparse = _sparse(words, size) if 0 in words else 0
    long = links > 1 or xattrs != NO_XATTRS or sparse > 0 or size >= _END32 or data.start >= _END32
    if long:
        rest = model.REST[FILE][1].pack(data.start, size, sparse, links, data.fragment, data.offset, xattrs)
    else:
        rest = model.REST[FILE][0].pack(data.start, data.fragment, data.offset, size)
    return _head(FILE, head, long) + rest + struct.pack(f"<{len(words)}I", *words)


def directory(head: Head, listing: DirectoryListing, links: int, parent: int, xattrs: int) -> bytes:
    """Return the inode of a directory.

    `links` is 2 plus the number of subdirectories; `parent` is the inode number of the parent directory.
    """
    block, offset = listing.reference >> 16, listing.reference & 0xFFFF
    size = listing.size + 3  # the format counts "." and ".." as 3 bytes
    if size < 1 << 16 and xattrs == NO_XATTRS and not listing.index:
        return _head(DIR, head, False) + model.REST[DIR][0].pack(block, links, size, offset, parent)
    rest = model.REST[DIR][1].pack(links, size, block, parent, len(listing.index), offset, xattrs)
    return _head(DIR, head, True) + rest + b"".join(listing.index)


def special(entry: Entry, head: Head, links: int, xattrs: int) -> bytes:
    """Return the inode of a symbolic link, a device or a named pipe."""
    long = xattrs != NO_XATTRS
    content = b""
    if entry.kind == SYMLINK:
        text = encoded(entry.target, entry.path)
        content = _WORD.pack(len(text)) + text
    elif entry.kind in (CHAR, BLOCK):
        major, minor = entry.device
        content = _WORD.pack(minor & 0xFF | major << 8 | (minor & ~0xFF) << 12)
    return _head(entry.kind, head, long) + _WORD.pack(links) + content + (_WORD.pack(xattrs) if long else b"")


def _head(kind: str, head: Head, long: bool) -> bytes:
    return model.INODE.pack(TYPES[kind] + long * len(model.KINDS), *head)


def _sparse(words: tuple[int, ...], size: int) -> int:
    """Return the number of a file's bytes in blocks of zeros, which are not stored."""
    sparse = words.count(0) * BLOCK_SIZE
    # The last block may be shorter than the others.
    return sparse - max(len(words) * BLOCK_SIZE - size, 0) if words[-1] == 0 else sparse
