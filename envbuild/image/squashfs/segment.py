"""The files of one layer, compressed once into blocks for every image with this layer.

Files smaller than a block share blocks and larger ones have their own, as in the default layout of mksquashfs. The
bytes depend on the layer and the compressor alone. Several threads compress; blocks are written in the order of
submission.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from envbuild.base.errors import BuildError
from envbuild.base.workers import Answer, Behind, Workers, beside_reader
from envbuild.cache.hashed import Digests
from envbuild.image.entry import FILE, Entry, Readable, read_fully
from envbuild.image.squashfs.model import BLOCK_SIZE, SIZE_MASK, UNCOMPRESSED, Codec, Compress, Data, Fragment
from envbuild.image.tar import Member, packed, read_table, unpacked, write_table

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
        if sum(len(data) for data, *_ in self._task) >= CHUNK:
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


# Increase it when the format of indexes changes, or when the same layer results in other bytes: old segments are then
# not found.
FORMAT = 4
_FORM = [FORMAT, BLOCK_SIZE]
_NOTHING = hashlib.sha256().hexdigest()


@dataclass(frozen=True, slots=True)
class Segment:
    """The files of a layer as blocks in the file `path`, `size` bytes long with this `sha256`, in the order of writing.

    `members` are all members of the layer in order, including whiteouts, with their sha256. `data` maps the ordinal of
    each regular file to the position of its content in `path`. Each large file has its own blocks, even if another one
    has the same digest.
    """

    path: Path
    size: int
    sha256: str
    members: tuple[Member, ...]
    data: dict[int, Data]
    fragments: tuple[Fragment, ...]


def write_segment(items: Iterable[tuple[Member, Readable | None]], path: Path, codec: Codec, workers: int) -> Segment:
    """Compress the content of `items` into the file `path`; the caller moves it to its destination.

    Content is read before the next item is requested. `items` may hold archives and processes: the caller closes it.
    Raises BuildError when a file's length differs from its member, and OSError when `path` cannot be written.
    """
    members: list[Member] = []
    with (
        # Not "wb": ext4 writes a file that was truncated, even an empty one, to the disk when it is closed.
        path.open("ab") as out,
        closing(Packer(out, codec, workers)) as packer,
        closing(beside_reader(_BEHIND)) as hashing,
    ):
        if out.tell():
            out.truncate(0)
        files = _Files(packer, hashing)
        for member, content in items:
            if member.kind == FILE:
                files.add(len(members), member, content)
            members.append(member)
        data, fragments, sha256 = files.finish()
    return Segment(path, packer.position, sha256, tuple(members), data, fragments)


def of_entry(entry: Entry) -> Member:
    """Return a path of a tree as the member of a layer."""
    size = entry.size if entry.kind == FILE else 0
    return Member(
        entry.path,
        entry.kind,
        entry.mode,
        entry.uid,
        entry.gid,
        entry.mtime,
        size,
        entry.target,
        entry.device,
        stored=size,
        xattrs=entry.xattrs,
    )


class _Files:
    """The contents of a segment's files: small files share fragment blocks, larger ones have blocks of their own."""

    def __init__(self, packer: Packer, hashing: Behind) -> None:
        self._packer, self._hashing = packer, hashing
        self._tails = Tails(packer)
        self._small: dict[int, Data] = {}
        self._known: dict[str, Data] = {}
        self._large: dict[int, tuple[Member, list[Packed]]] = {}

    def add(self, ordinal: int, member: Member, content: Readable | None) -> None:
        if content is None:
            if member.size:
                raise BuildError(f"{member.name}: a file without content")
            self._small[ordinal] = Data(digest=_NOTHING)
            member.sha256 = _NOTHING
            return
        left = member.size
        if left < BLOCK_SIZE:
            data = _exactly(content, left, member)
            member.sha256 = hashlib.sha256(data).hexdigest()
            self._small[ordinal] = self._tail(data, member.sha256) if data else Data(digest=_NOTHING)
        else:
            parts: list[Packed] = []
            self._large[ordinal] = member, parts
            digest = hashlib.sha256()
            while left:
                chunk = _exactly(content, min(left, CHUNK), member)
                left -= len(chunk)
                self._hashing.submit(digest.update, chunk)
                self._packer.put(chunk, parts.append)
            self._hashing.submit(lambda: setattr(member, "sha256", digest.hexdigest()))
        if content.read(1):
            raise _not_as_long(member)

    def finish(self) -> tuple[dict[int, Data], tuple[Fragment, ...], str]:
        self._tails.flush()
        sha256 = self._packer.finish()
        self._hashing.finish()
        members = self._small | {ordinal: _large(*large) for ordinal, large in self._large.items()}
        return dict(sorted(members.items())), tuple(self._tails.fragments), sha256

    def _tail(self, data: bytes, digest: str) -> Data:
        if digest not in self._known:
            number, offset = self._tails.add(data)
            self._known[digest] = Data(fragment=number, offset=offset, digest=digest)
        return self._known[digest]


def _large(member: Member, parts: Sequence[Packed]) -> Data:
    """Return the position of a file in blocks of its own, from its written chunks."""
    words = tuple(word for _, some in parts for word in some)
    return Data(parts[0][0] if any(words) else 0, words, digest=member.sha256)


def _exactly(content: Readable, size: int, member: Member) -> bytes:
    """Return the next `size` bytes. Raises BuildError when the content is shorter."""
    data = read_fully(content, size)
    if len(data) < size:
        raise _not_as_long(member)
    return data


def _not_as_long(member: Member) -> BuildError:
    return BuildError(f"{member.name}: not {member.size} bytes long as its archive says")


def save(segment: Segment, index: Path) -> None:
    """Write the index of `segment` to `index` atomically. Raises OSError."""
    files = segment.data.values()
    table: dict[str, Any] = {
        "format": _FORM,
        "size": segment.size,
        "sha256": segment.sha256,
        **packed(segment.members),
        "files": list(segment.data),
        "places": [[d.start for d in files], [d.fragment for d in files], [d.offset for d in files]],
        "words": {i: d.words for i, d in segment.data.items() if d.words},
        "fragments": [[f.start, f.word] for f in segment.fragments],
    }
    write_table(index, table)


def load(index: Path, data: Path, digests: Digests | None) -> Segment | None:
    """Return the segment that `save` wrote to `index`, with its blocks in the file `data`.

    Returns None when a file is missing, damaged or of another format: segments are only a cache. Without `digests`,
    `data` is still to come.
    """
    try:
        table = read_table(index, _FORM)
        if digests and (data.stat().st_size != table["size"] or not digests.keep(data, table["sha256"])):
            return None
        return _segment(table, data)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def stored_digest(index: Path) -> str:
    """Return the sha256 (hexadecimal) of the data of the segment in `index`, "" for a damaged index."""
    try:
        return str(read_table(index, _FORM)["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _segment(table: dict[str, Any], path: Path) -> Segment:
    members = unpacked(table)
    words = {int(ordinal): tuple(words) for ordinal, words in table["words"].items()}
    data = {
        ordinal: Data(start, words.get(ordinal, ()), fragment, offset, members[ordinal].sha256)
        for ordinal, start, fragment, offset in zip(table["files"], *table["places"], strict=True)
    }
    fragments = tuple(Fragment(start, word) for start, word in table["fragments"])
    size: int = table["size"]
    if any(f.start + (f.word & SIZE_MASK) > size for f in fragments):
        raise ValueError("a block beyond the end")
    return Segment(path, size, str(table["sha256"]), members, data, fragments)
