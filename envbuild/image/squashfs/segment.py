"""The files of one layer, compressed once into blocks for every image with this layer.

Files smaller than a block share blocks and larger ones have their own, as in the default layout of mksquashfs. The
bytes depend on the layer and the compressor alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.base.errors import BuildError
from envbuild.base.workers import Behind, beside_reader
from envbuild.cache.hashed import Digests
from envbuild.image.entry import FILE, Entry, Readable
from envbuild.image.member_table import packed, read_table, unpacked, write_table
from envbuild.image.squashfs.codec import Codec
from envbuild.image.squashfs.model import BLOCK_SIZE, SIZE_MASK, Data, Fragment
from envbuild.image.squashfs.packing import CHUNK, Packed, Packer, Tails
from envbuild.image.tar_stream import Member

# Increase it when the format of indexes changes, or when the same layer results in other bytes: old segments are then
# not found.
FORMAT = 4
_BEHIND = 8  # chunks
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
    found: list[Member] = []
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
                files.add(len(found), member, content)
            found.append(member)
        data, fragments, sha256 = files.finish()
    return Segment(path, packer.position, sha256, tuple(found), data, fragments)


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
        found = self._small | {ordinal: _large(*large) for ordinal, large in self._large.items()}
        return dict(sorted(found.items())), tuple(self._tails.fragments), sha256

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
    pieces, left = [], size
    while left > 0 and (data := content.read(left)):
        pieces.append(data)
        left -= len(data)
    if left:
        raise _not_as_long(member)
    return b"".join(pieces)


def _not_as_long(member: Member) -> BuildError:
    return BuildError(f"{member.name}: not {member.size} bytes long as its archive says")


def save(segment: Segment, index: Path) -> None:
    """Write the index of `segment` to `index` atomically. Raises OSError."""
    files = segment.data.values()
    table: dict[str, Any] = {
        "format": [FORMAT, BLOCK_SIZE],
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
        table = _table(index)
        if digests and (data.stat().st_size != table["size"] or not digests.keep(data, table["sha256"])):
            return None
        return _segment(table, data)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def stored_digest(index: Path) -> str:
    """Return the sha256 (hexadecimal) of the data of the segment in `index`, "" for a damaged index."""
    try:
        return str(_table(index)["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _table(index: Path) -> dict[str, Any]:
    table = read_table(index)
    if table["format"] != [FORMAT, BLOCK_SIZE]:
        raise ValueError("another format")
    return table


def _segment(table: dict[str, Any], path: Path) -> Segment:
    found = unpacked(table)
    words = {int(ordinal): tuple(words) for ordinal, words in table["words"].items()}
    data = {
        ordinal: Data(start, words.get(ordinal, ()), fragment, offset, found[ordinal].sha256)
        for ordinal, start, fragment, offset in zip(table["files"], *table["places"], strict=True)
    }
    fragments = tuple(Fragment(start, word) for start, word in table["fragments"])
    size: int = table["size"]
    if any(f.start + (f.word & SIZE_MASK) > size for f in fragments):
        raise ValueError("a block beyond the end")
    return Segment(path, size, str(table["sha256"]), found, data, fragments)
