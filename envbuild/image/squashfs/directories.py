"""Directory listings of squashfs, with the index that the kernel uses to find names in long listings.

Source: Documentation/filesystems/squashfs.rst of the Linux kernel, section 3.2, and fs/squashfs/namei.c.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.image.squashfs.metadata import METADATA_SIZE, MetadataWriter

# A name, its inode's number, and its type.
Row = tuple[bytes, int, int]

_HEADER = struct.Struct("<III")
_ENTRY = struct.Struct("<HhHH")
_INDEX = struct.Struct("<III")
_RUN_MOST = 256  # maximum entries per header
_FAR = 1 << 15  # entries store their inode number as a difference from the header's
_INDEX_MOST = 0xFFFF


@dataclass(frozen=True, slots=True)
class DirectoryListing:
    """The position of a directory's entries in the directory table, their size in bytes, and the index."""

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
    pack = _ENTRY.pack
    for name, number, kind in rows:
        reference = inodes[number]
        block = reference >> 16
        if block != run_block or count == _RUN_MOST or len(run) >= room or not -_FAR <= number - run_number < _FAR:
            if count:
                table.add(_HEADER.pack(count - 1, run_block, run_number) + run)
                size += _HEADER.size + len(run)
                run.clear()
            at = table.next
            if at >> 16 != indexed_block and len(index) < _INDEX_MOST:
                index.append(_INDEX.pack(size, at >> 16, len(name) - 1) + name)
                indexed_block = at >> 16
            room = METADATA_SIZE - (at & 0xFFFF) - _HEADER.size
            count, run_block, run_number = 0, block, number
        run += pack(reference & 0xFFFF, number - run_number, kind, len(name) - 1)
        run += name
        count += 1
    if count:
        table.add(_HEADER.pack(count - 1, run_block, run_number) + run)
        size += _HEADER.size + len(run)
    return DirectoryListing(beginning, size, tuple(index))
