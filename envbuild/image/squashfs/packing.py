"""A pool that compresses blocks in several threads and writes them in the order of submission."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import BinaryIO

from envbuild.base.workers import Answer, Behind, Workers
from envbuild.image.squashfs.codec import Codec, Compress
from envbuild.image.squashfs.model import BLOCK_SIZE, SIZE_MASK, UNCOMPRESSED, Fragment

# The least input of one task of a thread: large enough that the handover costs nothing.
CHUNK = 8 * BLOCK_SIZE
_ZEROS = bytes(BLOCK_SIZE)
_BEHIND = 8  # chunks
_MORE = 4  # tasks for the workers while the caller reads many small files

# A written chunk: its offset in bytes, and the size word of each of its blocks.
Packed = tuple[int, Sequence[int]]
Done = Callable[[Packed], object]
_Blocks = Sequence[tuple[int, bytes | memoryview]]  # (size word, bytes)


class Packer:
    """A writer that compresses chunks in threads and writes them to `out`, whose position is `position`.

    It holds at most four tasks more than there are workers, and those that a thread of its own writes. The output
    does not depend on the order in which threads finish.
    """

    def __init__(self, out: BinaryIO, codec: Codec, workers: int, position: int = 0) -> None:
        self.position = position
        self._out, self._compress = out, codec.compress
        self._pool = Workers(workers)
        self._most = workers + _MORE
        self._task: list[tuple[bytes, bool, Done]] = []
        self._pending: deque[tuple[Answer[list[_Blocks]], list[Done]]] = deque()
        self._written, self._sha256 = Behind(_BEHIND), hashlib.sha256()

    def put(self, chunk: bytes, done: Done, *, holes: bool = True) -> None:
        """Submit a chunk of at most CHUNK bytes; `done` is called once it is written.

        It consists of whole blocks, of which the last may be shorter. With `holes`, a block of zeros gets the size word
        0 and is not stored.
        """
        self._task.append((chunk, holes, done))
        if sum(len(one) for one, *_ in self._task) >= CHUNK:
            self._hand_over()

    def finish(self) -> str:
        """Write all submitted chunks, and return the sha256 (hexadecimal) of what was written."""
        self._hand_over()
        while self._pending:
            self._drain()
        self._written.finish()
        return self._sha256.hexdigest()

    def close(self) -> None:
        """End the threads; chunks that are not written yet are lost."""
        self._pool.close()
        self._written.close()

    def _hand_over(self) -> None:
        while self._pending and (len(self._pending) >= self._most or self._pending[0][0].ready()):
            self._drain()
        if self._task:
            chunks = [(chunk, holes) for chunk, holes, _ in self._task]
            dones = [done for *_, done in self._task]
            self._pending.append((self._pool.submit(_pack_all, chunks, self._compress), dones))
            self._task = []

    def _drain(self) -> None:
        answer, dones = self._pending.popleft()
        chunks = answer.result()
        self._written.submit(self._write, chunks)
        for blocks, done in zip(chunks, dones, strict=True):
            start = self.position
            self.position += sum(len(data) for _, data in blocks)
            done((start, [word for word, _ in blocks]))

    def _write(self, chunks: Sequence[_Blocks]) -> None:
        for blocks in chunks:
            for _, data in blocks:
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


def _pack_all(chunks: Sequence[tuple[bytes, bool]], compress: Compress) -> list[_Blocks]:
    return [_pack(chunk, compress, holes) for chunk, holes in chunks]


def _pack(chunk: bytes, compress: Compress, holes: bool) -> _Blocks:
    blocks: list[tuple[int, bytes | memoryview]] = []
    view = memoryview(chunk)
    for start in range(0, len(chunk), BLOCK_SIZE):
        block = view[start : start + BLOCK_SIZE]
        if holes and chunk.startswith(_ZEROS[: len(block)], start):
            blocks.append((0, b""))
            continue
        packed = compress(block)
        good = len(packed) < len(block)
        blocks.append((len(packed), packed) if good else (len(block) | UNCOMPRESSED, block))
    return blocks


def unpack(data: bytes, word: int, expand: Callable[[bytes, int], bytes]) -> bytes:
    """Return the content of a stored block. Raises ValueError when it is damaged."""
    if len(data) != word & SIZE_MASK:
        raise ValueError("cut short")
    return data if word & UNCOMPRESSED else expand(data, BLOCK_SIZE)
