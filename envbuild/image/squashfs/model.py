"""The structures of squashfs 4.0 that its writer and its reader share, and positions of file content.

Sources: Documentation/filesystems/squashfs.rst and fs/squashfs/squashfs_fs.h of the Linux kernel.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

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
