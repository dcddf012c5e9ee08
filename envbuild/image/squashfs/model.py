"""Positions of file content, for segments, images and readers."""

from __future__ import annotations

from dataclasses import dataclass

# The size of a data block in bytes; docs/howto/squashfs.md explains the choice of 128 KiB.
BLOCK_SIZE = 1 << 17
# This bit in a block's size word marks an uncompressed block.
UNCOMPRESSED = 1 << 24
SIZE_MASK = UNCOMPRESSED - 1
NO_FRAGMENT = 0xFFFFFFFF


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
    its uncompressed bytes. `digest` identifies the content; equal digests mean equal contents.
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
