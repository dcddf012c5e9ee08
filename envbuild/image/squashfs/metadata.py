"""Metadata of squashfs: records in blocks of 8 KiB, each compressed separately.

Source: Documentation/filesystems/squashfs.rst of the Linux kernel, sections 3 and 3.3 to 3.5.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from envbuild.image.squashfs.codec import Compress

# The size of an uncompressed metadata block in bytes.
METADATA_SIZE = 1 << 13
_STORED = 1 << 15  # bit in a block's header: the block is stored uncompressed
_HEADER = struct.Struct("<H")


def stored_block(data: bytes) -> bytes:
    """Return `data`, at most 8 KiB, as an uncompressed metadata block."""
    return _HEADER.pack(_STORED | len(data)) + data


@dataclass(slots=True)
class MetadataWriter:
    """A writer of consecutive records in metadata blocks. A record may span several blocks.

    A reference to a record, in inodes and in the superblock, is the offset of its block from the table's start, shifted
    left by 16, plus the record's offset in the uncompressed block.
    """

    compress: Compress
    _blocks: bytearray = field(default_factory=bytearray)
    _pending: bytearray = field(default_factory=bytearray)

    @property
    def next(self) -> int:
        """The reference of the next record."""
        return len(self._blocks) << 16 | len(self._pending)

    def add(self, record: bytes | bytearray) -> int:
        """Add a record and return its reference."""
        reference = len(self._blocks) << 16 | len(self._pending)
        self._pending += record
        if len(self._pending) >= METADATA_SIZE:
            whole = len(self._pending) // METADATA_SIZE * METADATA_SIZE
            for start in range(0, whole, METADATA_SIZE):
                self._pack(bytes(self._pending[start : start + METADATA_SIZE]))
            del self._pending[:whole]
        return reference

    def finish(self) -> bytes:
        """Return the complete table. No record can be added afterwards."""
        if self._pending:
            self._pack(bytes(self._pending))
            self._pending.clear()
        return bytes(self._blocks)

    def _pack(self, data: bytes) -> None:
        packed = self.compress(data)
        if len(packed) < len(data):
            self._blocks += _HEADER.pack(len(packed)) + packed
        else:
            self._blocks += stored_block(data)


def indexed(records: bytes | bytearray, at: int, compress: Compress) -> tuple[bytes, int]:
    """Return a table with lookup by number: its blocks, followed by the list of their positions.

    `at` is the table's offset in the image. No record in `records` may cross a multiple of 8 KiB. Returns the table's
    bytes, and the offset in the image of the list of positions, which the superblock refers to.
    """
    blocks = MetadataWriter(compress)
    places = []
    for start in range(0, len(records), METADATA_SIZE):
        places.append(at + (blocks.next >> 16))
        blocks.add(records[start : start + METADATA_SIZE])
    data = blocks.finish()
    return data + struct.pack(f"<{len(places)}Q", *places), at + len(data)
