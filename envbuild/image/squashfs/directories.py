"""Directory listings of squashfs, with the index by which the kernel finds names in long ones.

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
_RUN_MOST = 256  # entries behind one header
_FAR = 1 << 15  # entries tell their inode number as a difference from the header's
_INDEX_MOST = 0xFFFF


@dataclass(frozen=True, slots=True)
class DirectoryListing:
    """Where a directory's entries lie in the directory table, their bytes, and the index's entries."""

    reference: int
    size: int
    index: tuple[bytes, ...]


def write_listing(
    table: MetadataWriter, rows: Sequence[Row], inodes: Sequence[int]
) -> DirectoryListing:
    """Add the entries of one directory, `rows` in order of their names, to the directory table.

    `inodes` holds the reference of each inode by its number. Entries stand in runs behind a header, whose
    inodes lie in one block. A run begins anew in each block of the table, and there the index points: a block
    is read as a whole, more entries would not save anything.
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
        if (
            block != run_block
            or count == _RUN_MOST
            or len(run) >= room
            or not -_FAR <= number - run_number < _FAR
        ):
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
