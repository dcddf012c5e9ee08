"""What segments, images and their readers share: where the content of files lies."""

from __future__ import annotations

from dataclasses import dataclass

# The size of a data block in bytes; why 128 KiB: docs/howto/squashfs.md.
BLOCK_SIZE = 1 << 17
# A block's size word has this bit when the block is stored as it is.
UNCOMPRESSED = 1 << 24
SIZE_MASK = UNCOMPRESSED - 1
NO_FRAGMENT = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Fragment:
    """A block that holds the ends of files: where it lies, in bytes, and its size word."""

    start: int
    word: int


@dataclass(frozen=True, slots=True)
class Data:
    """Where the content of a regular file lies, in a segment or an image.

    `start` is the offset in bytes of its first block, `words` the size word of each block (0 is a block of
    zeros that is not stored). What does not fill a block may lie in fragment block number `fragment`,
    `offset` bytes into it when uncompressed. `digest` names the content; equal digests are equal contents.
    """

    start: int = 0
    words: tuple[int, ...] = ()
    fragment: int = NO_FRAGMENT
    offset: int = 0
    digest: str = ""

    @property
    def stored(self) -> int:
        """The bytes that its blocks take, without the fragment."""
        return sum(word & SIZE_MASK for word in self.words)
