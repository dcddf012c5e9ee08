"""A pool that compresses blocks in several threads and writes them in the order of submission."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import BinaryIO

from envbuild.image.squashfs.codec import Codec, Compress
from envbuild.image.squashfs.model import BLOCK_SIZE, SIZE_MASK, UNCOMPRESSED, Fragment
from envbuild.workers import Answer, Behind, Workers

# The input of one task of a thread: large enough that the handover costs nothing.
CHUNK = 8 * BLOCK_SIZE
_ZEROS = bytes(BLOCK_SIZE)
_BEHIND = 8  # chunks
_MORE = 4  # chunks for the workers while the caller reads many small files

# A written chunk: its offset in bytes, and the size word of each of its blocks.
Packed = tuple[int, Sequence[int]]
Done = Callable[[Packed], object]
_Blocks = Sequence[tuple[int, bytes]]  # (size word, bytes)


class Packer:
    """A writer that compresses chunks in threads and writes them to `out`, whose position is `position`.

    It holds at most four chunks more than there are workers, and those that a thread of its own writes. The output
    does not depend on the order in which threads finish.
    """

    def __init__(self, out: BinaryIO, codec: Codec, workers: int, position: int = 0) -> None:
        self.position = position
        self._out, self._compress = out, codec.compress
        self._pool = Workers(workers)
        self._most = workers + _MORE
        self._pending: deque[tuple[Answer[_Blocks], Done]] = deque()
        self._written, self._sha256 = Behind(_BEHIND), hashlib.sha256()

    def put(self, chunk: bytes, done: Done, *, holes: bool = True) -> None:
        """Submit a chunk of at most CHUNK bytes; `done` is called once it is written.

        It consists of whole blocks, of which the last may be shorter. With `holes`, a block of zeros gets the size word
        0 and is not stored.
        """
        while self._pending and (len(self._pending) >= self._most or self._pending[0][0].ready()):
            self._drain()
        self._pending.append((self._pool.submit(_pack, chunk, self._compress, holes), done))

    def finish(self) -> str:
        """Write all submitted chunks, and return the sha256 (hexadecimal) of what was written."""
        while self._pending:
            self._drain()
        self._written.finish()
        return self._sha256.hexdigest()

    def close(self) -> None:
        """End the threads; chunks that are not written yet are lost."""
        self._pool.close()
        self._written.close()

    def _drain(self) -> None:
        answer, done = self._pending.popleft()
        blocks = answer.result()
        start = self.position
        words, parts = zip(*blocks, strict=True)
        self.position += sum(map(len, parts))
        self._written.submit(self._write, parts)
        done((start, words))

    def _write(self, parts: Sequence[bytes]) -> None:
        for data in parts:
            self._out.write(data)
            self._sha256.update(data)


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
        start, words = packed
        self.fragments.append(Fragment(start, words[0]))


def _pack(chunk: bytes, compress: Compress, holes: bool) -> _Blocks:
    blocks: list[tuple[int, bytes]] = []
    for start in range(0, len(chunk), BLOCK_SIZE):
        size = min(BLOCK_SIZE, len(chunk) - start)
        if holes and chunk.startswith(_ZEROS[:size], start):
            blocks.append((0, b""))
            continue
        block = chunk[start : start + size]
        packed = compress(block)
        word = len(packed)
        if word >= size:
            packed, word = block, size | UNCOMPRESSED
        blocks.append((word, packed))
    return blocks


def unpack(data: bytes, word: int, expand: Callable[[bytes, int], bytes]) -> bytes:
    """Return the content of a stored block. Raises ValueError when it is damaged."""
    if len(data) != word & SIZE_MASK:
        raise ValueError("cut short")
    return data if word & UNCOMPRESSED else expand(data, BLOCK_SIZE)
