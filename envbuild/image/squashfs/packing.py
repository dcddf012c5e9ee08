"""A pool that compresses blocks in several threads and writes them in the order of submission."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import BinaryIO

from envbuild.image.squashfs.codec import Codec, Compress
from envbuild.image.squashfs.model import BLOCK_SIZE, SIZE_MASK, UNCOMPRESSED, Fragment
from envbuild.workers import Answer, Workers

# The input of one task of a thread: large enough that the handover costs nothing.
CHUNK = 8 * BLOCK_SIZE
_ZEROS = bytes(BLOCK_SIZE)

# A written chunk: its offset in bytes, and the size word and the sha256 of each of its blocks.
Packed = tuple[int, Sequence[int], Sequence[bytes]]
Done = Callable[[Packed], object]
_Blocks = Sequence[tuple[int, bytes, bytes]]  # (size word, bytes, their sha256)


class Packer:
    """A writer that compresses chunks in threads and writes them to `out`, whose position is `position`.

    It holds at most one chunk more than there are workers. The output does not depend on the order in which threads
    finish.
    """

    def __init__(self, out: BinaryIO, codec: Codec, workers: int, position: int = 0) -> None:
        self.position = position
        self._out, self._compress = out, codec.compress
        self._pool = Workers(workers)
        self._most = workers + 1
        self._pending: deque[tuple[Answer[_Blocks], Done]] = deque()

    def put(self, chunk: bytes, done: Done, *, holes: bool = True) -> None:
        """Submit a chunk of at most CHUNK bytes; `done` is called once it is written.

        It consists of whole blocks, of which the last may be shorter. With `holes`, a block of zeros gets the size word
        0 and is not stored.
        """
        while self._pending and (len(self._pending) >= self._most or self._pending[0][0].ready()):
            self._drain()
        self._pending.append((self._pool.submit(_pack, chunk, self._compress, holes), done))

    def finish(self) -> None:
        """Write all submitted chunks."""
        while self._pending:
            self._drain()

    def close(self) -> None:
        """End the threads; chunks that are not written yet are lost."""
        self._pool.close()

    def _drain(self) -> None:
        answer, done = self._pending.popleft()
        blocks = answer.result()
        start = self.position
        for _, data, _ in blocks:
            self._out.write(data)
            self.position += len(data)
        words, _, digests = zip(*blocks, strict=True)
        done((start, words, digests))


class Tails:
    """A writer of small contents, which fills fragment blocks in the order of submission."""

    def __init__(self, packer: Packer, first: int = 0) -> None:
        """Begin with the fragment block number `first`."""
        self.fragments: list[Fragment] = []  # complete once the packer has finished
        self._packer = packer
        self._number = first
        self._pieces: list[bytes] = []
        self._filled = 0

    def add(self, data: bytes) -> tuple[int, int]:
        """Add a content of at most BLOCK_SIZE bytes, and return (number of its block, offset in it)."""
        if self._filled + len(data) > BLOCK_SIZE:
            self.flush()
        place = (self._number, self._filled)
        self._pieces.append(data)
        self._filled += len(data)
        return place

    def flush(self) -> None:
        """End the current block."""
        if self._pieces:
            self._packer.put(b"".join(self._pieces), self._written, holes=False)
            self._number += 1
            self._pieces, self._filled = [], 0

    def _written(self, packed: Packed) -> None:
        start, words, _ = packed
        self.fragments.append(Fragment(start, words[0]))


def _pack(chunk: bytes, compress: Compress, holes: bool) -> _Blocks:
    blocks: list[tuple[int, bytes, bytes]] = []
    for start in range(0, len(chunk), BLOCK_SIZE):
        size = min(BLOCK_SIZE, len(chunk) - start)
        if holes and chunk.startswith(_ZEROS[:size], start):
            blocks.append((0, b"", b""))
            continue
        block = chunk[start : start + size]
        packed = compress(block)
        word = len(packed)
        if word >= size:
            packed, word = block, size | UNCOMPRESSED
        blocks.append((word, packed, hashlib.sha256(packed).digest()))
    return blocks


def unpack(data: bytes, word: int, expand: Callable[[bytes, int], bytes]) -> bytes:
    """Return the content of a stored block. Raises ValueError when it is damaged."""
    if len(data) != word & SIZE_MASK:
        raise ValueError("cut short")
    return data if word & UNCOMPRESSED else expand(data, BLOCK_SIZE)
