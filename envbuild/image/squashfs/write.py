"""Composition of an image from segments: choose and copy the blocks that are visible, and write new tables behind them.

Files hidden by upper layers are left out, and equal files are stored once. The image's bytes depend on the layers'
content, the compressor and the tree alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from envbuild.base.atomic import new_file, replacing_beside
from envbuild.base.errors import BuildError
from envbuild.base.files import copy_span
from envbuild.base.progress import OnProgress
from envbuild.base.system_errors import file_error
from envbuild.image.entry import FILE, Tree
from envbuild.image.entry import closing as closing_tree
from envbuild.image.squashfs.model import (
    BLOCK_SIZE,
    NO_FRAGMENT,
    SIZE_MASK,
    Codec,
    Data,
    Decompress,
    Fragment,
    codec_of,
    decompressor,
)
from envbuild.image.squashfs.segment import Packer, Segment, Tails, of_entry, unpack, write_segment
from envbuild.image.squashfs.tables import Placed, data_start, write_tables
from envbuild.image.tree import MergedEntry, MergedTree

# A fragment block of a layer of which the image needs only some files: their digests and sizes by offset.
Repack = tuple[int, Fragment, dict[int, tuple[str, int]]]


@dataclass(slots=True)
class Choice:
    """The blocks of an image; offsets are relative to the start of its data.

    `spans` are (layer, offset in its segment, bytes) to be copied one after another, `size` bytes in total; `fragments`
    are the fragment blocks among them. `homes` maps digests to the positions of the contents, still without those of
    `repacks`.
    """

    spans: list[tuple[int, int, int]] = field(default_factory=list)
    size: int = 0
    fragments: list[Fragment] = field(default_factory=list)
    repacks: list[Repack] = field(default_factory=list)
    homes: dict[str, Data] = field(default_factory=dict)

    def add(self, layer: int, start: int, size: int) -> int:
        """Append `size` bytes of a segment to the spans, and return their position in the image's data."""
        position = self.size
        last = self.spans[-1] if self.spans else (-1, 0, 0)
        if last[0] == layer and last[1] + last[2] == start:
            self.spans[-1] = (layer, last[1], last[2] + size)
        else:
            self.spans.append((layer, start, size))
        self.size += size
        return position


_Small = dict[int, dict[int, tuple[str, int]]]  # fragment number → offset → (digest, size)


def choose(entries: Iterable[MergedEntry], segments: Sequence[Segment]) -> Choice:
    """Select the blocks of `segments` that the files of `entries` need; of equal contents the lowest layer's is used.

    Raises BuildError when a segment lacks a file.
    """
    choice = Choice()
    large: list[dict[int, Data]] = [{} for _ in segments]  # by start
    small: list[_Small] = [defaultdict(dict) for _ in segments]
    for merged in entries:
        entry = merged.entry
        if entry.kind != FILE or not entry.size:
            continue
        data = data_of(merged, segments)
        if data.fragment != NO_FRAGMENT:
            small[merged.layer][data.fragment][data.offset] = (data.digest, entry.size)
        elif any(data.words):
            large[merged.layer][data.start] = data
        else:  # nothing of it is stored
            choice.homes[data.digest] = data
    for layer, segment in enumerate(segments):
        known = set(choice.homes)
        parts: list[tuple[int, int, Data | int]] = []  # start, size, file or fragment number
        for start, data in sorted(large[layer].items()):
            if data.digest not in known:
                known.add(data.digest)
                parts.append((start, data.stored, data))
        for number in _fragments(choice, layer, segment, small[layer]):
            fragment = segment.fragments[number]
            parts.append((fragment.start, fragment.word & SIZE_MASK, number))
        for start, size, key in sorted(parts, key=itemgetter(0)):
            position = choice.add(layer, start, size)
            if isinstance(key, Data):
                choice.homes[key.digest] = Data(position, key.words, digest=key.digest)
                continue
            for offset, (digest, _) in small[layer][key].items():
                choice.homes.setdefault(digest, Data(fragment=len(choice.fragments), offset=offset, digest=digest))
            choice.fragments.append(Fragment(position, segment.fragments[key].word))
    return choice


def data_of(merged: MergedEntry, segments: Sequence[Segment]) -> Data:
    """Return the position of a regular file's content in its segment.

    Raises BuildError when the segment lacks the file.
    """
    data = segments[merged.layer].data.get(merged.member)
    if data is None or (merged.entry.size > 0 and not data.digest):
        raise damaged(segments[merged.layer], f"it does not hold /{merged.entry.path}")
    return data


def damaged(segment: Segment, problem: str) -> BuildError:
    """Return the error for a segment that does not match its index."""
    return BuildError(
        f"{segment.path}: damaged: {problem}",
        "remove this file: it is a cache of compressed blocks, and envbuild writes it again",
    )


def _fragments(choice: Choice, layer: int, segment: Segment, small: _Small) -> list[int]:
    """Return the fragment blocks of a segment that are copied unchanged.

    The other blocks with needed files are added to `repacks`.
    """
    places: dict[int, set[int]] = defaultdict(set)
    for data in segment.data.values():
        if data.fragment != NO_FRAGMENT:
            places[data.fragment].add(data.offset)
    copied: list[int] = []
    promised = {digest for _, _, needed in choice.repacks for digest, _ in needed.values()}
    for number in sorted(small):
        if number >= len(segment.fragments):
            raise damaged(segment, f"it has no fragment block {number}")
        seen = small[number]
        needed = {
            offset: (digest, size)
            for offset, (digest, size) in sorted(seen.items())
            if digest not in choice.homes and digest not in promised
        }
        if not needed:
            continue
        new, all_of_it = (sum(size for _, size in files.values()) for files in (needed, seen))
        # A block with hidden files is never copied: they must not be in the image. Storing a few bytes twice costs less
        # than recompressing a block.
        if len(seen) == len(places[number]) and 2 * new >= all_of_it:
            copied.append(number)
        else:
            choice.repacks.append((layer, segment.fragments[number], needed))
            promised.update(digest for digest, _ in needed.values())
    return copied


# Upper bounds for the size of the tables: for each entry its inode, its names in a directory and in an index, and its
# row in the export table; for the image its superblock, padding and headers of metadata blocks.
_EACH, _ALL = 160, 1 << 17
# Bytes of a segment that are awaited and copied at once.
_MOST = 16 << 20
# Waits until the data of a segment have come up to an offset in bytes, and returns the file that has them.
Arrived = Callable[[Segment, int], Path]


def write_image(
    entries: Iterable[MergedEntry],
    segments: Sequence[Segment],
    out: BinaryIO,
    base: int,
    codec: Codec,
    mtime: int,
    workers: int,
    on_progress: OnProgress = lambda _count: None,
    choice: Choice | None = None,
    *,
    arrived: Arrived = lambda segment, _end: segment.path,
    framed: Callable[[int], Callable[[int], None]] = lambda _size: lambda _end: None,
) -> int:
    """Write the image of a merged tree at offset `base` of `out`, and return its length in bytes.

    `segments` are those of the tree's layers, all written with `codec`; `choice` is what `choose` selects of them, if
    it is known. `out` is open for reading and writing. `on_progress` is called with the number of written bytes.

    The data are copied last, in their order: `arrived` is called before data of a segment are read; the caller checks
    at the end that the data of a file which was not complete are the segment's. `framed` is called with the image's
    length when all else is written, and returns a function that is called with the offset in `out` up to which the data
    are copied. Raises BuildError when a segment is truncated or damaged, or `out` cannot be written.
    """
    tree = list(entries)
    choice = choice or choose(tree, segments)
    start = data_start(codec)
    try:
        out.seek(base + start + choice.size)
        with closing(Packer(out, codec, workers, start + choice.size)) as packer:
            repacked, added = _repack(choice, segments, packer, decompressor(codec.number), arrived)
        on_progress(packer.position - start - choice.size)
        fragments = [Fragment(start + fragment.start, fragment.word) for fragment in choice.fragments] + added
        homes = {
            digest: replace(data, start=data.start + start) if any(data.words) else data
            for digest, data in choice.homes.items()
        } | repacked
        placed = []
        for merged in tree:
            stored = merged.entry.kind == FILE and merged.entry.size > 0
            placed.append(Placed(merged.entry, homes[data_of(merged, segments).digest] if stored else None))
        length = write_tables(out, base, placed, fragments, codec, mtime)
        copied = framed(length)
        out.flush()
        end = base + start

        def moved(count: int) -> None:
            nonlocal end
            end += count
            on_progress(count)
            copied(end)

        for layer, spans in groupby(choice.spans, key=lambda span: span[0]):
            with ExitStack() as stack:
                stream: BinaryIO | None = None
                for first, size in _pieces(spans):
                    if stream is None:
                        stream = stack.enter_context(_arriving(segments[layer], first + size, arrived))
                    else:
                        arrived(segments[layer], first + size)
                    try:
                        copy_span(stream.fileno(), out.fileno(), first, end, size, moved)
                    except EOFError:
                        raise damaged(segments[layer], "it is cut short") from None
        out.seek(base + length)
        return length
    except OSError as error:
        raise BuildError(
            file_error(error, out.name),
            "free disk space, write elsewhere with --out, or set ENVBUILD_STORE to a folder on another file system",
        ) from error


def write_squashfs(
    tree: Tree, path: Path, *, compression: str = "zstd", mtime: int = 0, workers: int = 1, name: str = "the tree"
) -> int:
    """Write the files of `tree` as a squashfs to `path`, atomically, and return its length in bytes.

    `compression` is NAME or NAME:LEVEL; `mtime` is the image's own time. The number of `workers`, which compress, does
    not change the bytes. Missing parent folders are added. Raises UsageError, OSError, and BuildError, which calls the
    tree `name`.
    """
    codec = codec_of(compression)
    with replacing_beside(path) as image, new_file(path.parent, ".new-") as (_, data):
        with closing_tree(tree):
            segment = write_segment(((of_entry(entry), content) for entry, content in tree), data, codec, workers)
        merged = MergedTree()
        merged.add(name, segment.members)
        with image.open("r+b") as out:
            length = write_image(merged.entries().values(), [segment], out, 0, codec, mtime, workers)
            out.truncate(length)
    return length


def estimate(entries: Iterable[MergedEntry], choice: Choice) -> int:
    """Return an upper bound for the size in bytes of the image whose `entries` need the blocks of `choice`."""
    tails = sum(size for _, _, needed in choice.repacks for _, size in needed.values())
    tables = _ALL + 16 * (len(choice.fragments) + len(choice.repacks))
    for entry in (merged.entry for merged in entries):
        name = entry.path.rpartition("/")[2]
        # A character takes up to four bytes in UTF-8.
        tables += _EACH + 8 * len(name) + 4 * len(entry.target)
        if entry.kind == FILE and entry.size:
            tables += 4 * (-(-entry.size // BLOCK_SIZE))
        if entry.xattrs:
            tables += sum(16 + 4 * len(key) + len(value) for key, value in entry.xattrs)
    # A metadata block has 8 KiB and a header of two bytes.
    return choice.size + tails + tables + tables // 2048


def _repack(
    choice: Choice, segments: Sequence[Segment], packer: Packer, expand: Decompress, arrived: Arrived
) -> tuple[dict[str, Data], list[Fragment]]:
    """Write the needed files of blocks that are not copied to new blocks.

    Return the files' positions by digest, and the new fragment blocks.
    """
    homes: dict[str, Data] = {}
    tails = Tails(packer, len(choice.fragments))
    for layer, repacks in groupby(choice.repacks, key=lambda repack: repack[0]):
        segment = segments[layer]
        with _opened(segment, arrived(segment, segment.size)) as stream:
            for _, fragment, needed in repacks:
                stored = os.pread(stream.fileno(), fragment.word & SIZE_MASK, fragment.start)
                try:
                    data = unpack(stored, fragment.word, expand)
                except ValueError as error:
                    raise damaged(segments[layer], str(error)) from None
                for offset, (digest, size) in needed.items():
                    content = data[offset : offset + size]
                    if len(content) != size:
                        raise damaged(segments[layer], "a fragment block is too short")
                    number, place = tails.add(content)
                    homes[digest] = Data(fragment=number, offset=place, digest=digest)
    tails.flush()
    packer.finish()
    return homes, tails.fragments


def _pieces(spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yield (offset in the segment, bytes) of the spans of a layer, in parts that are copied at once."""
    for _, first, size in spans:
        for begin in range(first, first + size, _MOST):
            yield begin, min(_MOST, first + size - begin)


def _arriving(segment: Segment, end: int, arrived: Arrived) -> BinaryIO:
    """Open the file with the first `end` bytes of a segment's data, which stays open when the file gets its name."""
    path = arrived(segment, end)
    if path != segment.path:
        with suppress(FileNotFoundError):
            return path.open("rb", buffering=0)
        path = arrived(segment, segment.size)
    return _opened(segment, path)


def _opened(segment: Segment, path: Path) -> BinaryIO:
    """Open the complete data of a segment. Raises BuildError when the file is missing or its size has changed."""
    try:
        stream = path.open("rb", buffering=0)
    except OSError as error:
        raise damaged(segment, f"it cannot be read: {error.strerror}") from error
    if os.fstat(stream.fileno()).st_size != segment.size:
        stream.close()
        raise damaged(segment, "it is cut short or longer than it was")
    return stream
