"""Reader of squashfs 4.0 images of any writer, without mounting them.

Source: Documentation/filesystems/squashfs.rst of the Linux kernel. Images may be hostile: memory use is bounded by the
content of one block, each directory is visited once, and any invalid value raises BuildError.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, TypeVar

from envbuild.base.workers import each
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.squashfs.model import FRAGMENT, MAGIC, NO_FRAGMENT, NO_TABLE, SIZE_MASK, UNCOMPRESSED
from envbuild.image.squashfs.read_tables import (
    Attributes,
    ImageBytes,
    Inode,
    Lookup,
    MetadataReader,
    listed,
    read_inode,
)

# In bytes. Linux cannot open longer paths.
_MAX_PATH = 4095
# The cache of fragment blocks, in bytes: consecutive files share fragment blocks.
_KEPT = 8 << 20
# Threads get files in lots of this many bytes or this many files.
_LOT_BYTES, _LOT_FILES = 4 << 20, 64
_MOST_THREADS = 8

R = TypeVar("R")


def is_squashfs(head: bytes) -> bool:
    """Return whether a file that begins with `head`, at least four bytes, is a squashfs image."""
    return head[:4] == MAGIC.to_bytes(4, "little")


class SquashfsImage:
    """The squashfs image with its superblock at offset `base` of `stream`, a file that stays open.

    `where` is for messages; `limits` are those of the site, for `entries`. Several threads may call the methods at
    once. Raises BuildError when there is no image, or its compressor is not supported.
    """

    def __init__(self, stream: BinaryIO, base: int, where: str, limits: ImageLimits | None = None) -> None:
        self._limits = limits
        self._source = source = ImageBytes(stream, base, where)
        self.superblock = block = source.superblock
        self._inodes = source.metadata_at(block.inode_table)
        self._lists = source.metadata_at(block.directory_table)
        blocks = MetadataReader(source, 0, block.bytes_used)
        owners = Lookup(blocks, block.id_table, block.ids, 4)
        self._owners = tuple(int.from_bytes(owners.row(number), "little") for number in range(block.ids))
        fragments = block.fragments if block.fragment_table != NO_TABLE else 0
        self._fragments = Lookup(blocks, block.fragment_table, fragments, FRAGMENT.size)
        self._attributes = Attributes(blocks)
        self._kept: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def entries(self) -> Iterator[tuple[Entry, int]]:
        """Yield every path once, with a handle for `content`: parents first, names in the order of their bytes.

        When a file has several names, each after the first is a HARDLINK to the first. A socket has the kind "socket",
        which `Entry` does not define. Raises BuildError when the image is damaged.
        """
        root = self._inode(self.superblock.root)
        if root.kind != DIR:
            raise self._source.damaged("its root is not a directory")
        yield self._entry("", root, ""), self.superblock.root
        quota, where = Quota(self._limits), self._source.where
        found = 1
        names: dict[int, str] = {}
        seen = {self.superblock.root}
        room = self._lists.capacity() - root.size
        stack = [("", listed(self._lists, root))]
        while stack:
            folder, listing = stack[-1]
            item = next(listing, None)
            if item is None:
                stack.pop()
                continue
            name, place = item
            path = folder + os.fsdecode(name)
            if len(path) > _MAX_PATH or (len(path) * 3 > _MAX_PATH < len(os.fsencode(path))):
                raise self._source.damaged(f"{path[:80]!a}…: a path longer than Linux allows")
            inode = self._inode(place)
            first = names.get(place)
            quota.entry(where)
            quota.text(where, path, inode.target)
            if first is None:
                quota.content(where, inode.size if inode.kind == FILE else 0)
                found += 1
                if found > self.superblock.inodes:
                    raise self._source.damaged(f"it has more than {found - 1} files, which it announces")
            if inode.kind == DIR:
                room -= inode.size
                if place in seen or room < 0:
                    raise self._source.damaged(f"{path!a}: a directory in two places")
                seen.add(place)
                stack.append((f"{path}/", listed(self._lists, inode)))
            elif inode.links > 1:
                names.setdefault(place, path)
            yield self._entry(path, inode, first), place

    def content(self, handle: int, most: int) -> bytes:
        """Return the first `most` bytes of a regular file by its handle, also for a hard link."""
        found = bytearray()
        for data, length in self.blocks(handle):
            found += bytes(length) if data is None else data
            if len(found) >= most:
                break
        return bytes(found[:most])

    def blocks(self, handle: int) -> Iterator[tuple[bytes | None, int]]:
        """Yield the content of a regular file in pieces of at most one block, with the length of each.

        The data of a piece is None for zeros that are not stored. Raises BuildError when the file is damaged.
        """
        inode = self._inode(handle)
        if inode.kind != FILE:
            raise self._source.damaged("what is no regular file is read as one")
        most = self.superblock.block_size
        in_fragment = inode.size % most if inode.fragment != NO_FRAGMENT else 0
        left = inode.size - in_fragment
        place = inode.start
        while left:
            length = min(left, most)
            word = inode.rest.number()
            if word == 0:
                yield None, length
            else:
                data = self._block(place, word)
                if len(data) != length:
                    raise self._source.damaged(f"the block at {place} is of {len(data)} bytes, not {length}")
                yield data, length
            place += word & SIZE_MASK
            left -= length
        if in_fragment:
            data = self._fragment(inode.fragment)[inode.offset : inode.offset + in_fragment]
            if len(data) != in_fragment:
                raise self._source.damaged(f"fragment {inode.fragment} ends before a file does")
            yield data, in_fragment

    def each_file(self, files: Sequence[tuple[Entry, int]], work: Callable[[Entry, int], R]) -> list[R]:
        """Return the results of `work(entry, handle)` for each of `files`, in order; several threads call `work`.

        Files in the order of `entries` are fastest, because consecutive files share fragment blocks.
        """

        def run(lot: Sequence[tuple[Entry, int]], stop: threading.Event) -> list[R]:
            return [work(*item) for item in lot if not stop.is_set()]

        workers = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        done = each(list(_lots(files)), run, workers)
        return [result for lot in done for result in lot]

    def find(self, path: str) -> int | None:
        """Return the handle of the regular file at `path`, or None; no symbolic link is followed."""
        place = self.superblock.root
        inode = self._inode(place)
        for name in map(os.fsencode, path.split("/")):
            if inode.kind != DIR:
                return None
            # Names are sorted, so the search for a missing name ends early.
            following = (item for item in listed(self._lists, inode) if item[0] >= name)
            known, place = next(following, (b"", 0))
            if known != name:
                return None
            inode = self._inode(place)
        return place if inode.kind == FILE else None

    def _entry(self, path: str, inode: Inode, first: str | None) -> Entry:
        return Entry(
            path,
            HARDLINK if first else inode.kind,
            0o777 if inode.kind == SYMLINK else inode.mode,
            inode.size if inode.kind == FILE else 0,
            first or inode.target,
            inode.uid,
            inode.gid,
            inode.mtime,
            inode.device,
            self._attributes.of(inode.xattrs),
        )

    def _inode(self, place: int) -> Inode:
        return read_inode(self._source, self._inodes.cursor(place), self._owners)

    def _block(self, place: int, word: int) -> bytes:
        stored = word & SIZE_MASK
        # The kernel's buffers hold no more, compressed or not.
        if word > UNCOMPRESSED | SIZE_MASK or not 0 < stored <= self.superblock.block_size:
            raise self._source.damaged(f"the block at {place} is of {stored} bytes")
        return self._source.block(place, stored, not word & UNCOMPRESSED, self.superblock.block_size)

    def _fragment(self, number: int) -> bytes:
        known = self._kept.get(number)
        if known is not None:
            return known
        start, word, _ = FRAGMENT.unpack(self._fragments.row(number))
        data = self._block(start, word)
        with self._lock:
            while len(self._kept) >= max(_KEPT // self.superblock.block_size, 2):
                del self._kept[next(iter(self._kept))]
            self._kept[number] = data
        return data


def _lots(files: Sequence[tuple[Entry, int]]) -> Iterator[Sequence[tuple[Entry, int]]]:
    start = size = 0
    for number, (entry, _) in enumerate(files, 1):
        size += entry.size
        if size >= _LOT_BYTES or number - start >= _LOT_FILES:
            yield files[start:number]
            start, size = number, 0
    if start < len(files):
        yield files[start:]
