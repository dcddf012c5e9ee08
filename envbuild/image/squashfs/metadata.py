"""Writer of squashfs metadata: blocks of 8 KiB, each compressed separately; extended attributes, listings, inodes.

Sources: Documentation/filesystems/squashfs.rst of the Linux kernel, section 3, and in fs/squashfs the files
squashfs_fs.h, namei.c and xattr_id.c.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.base.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FILE, SYMLINK, Entry
from envbuild.image.squashfs import model
from envbuild.image.squashfs.codec import Compress
from envbuild.image.squashfs.model import BLOCK_SIZE, METADATA_SIZE, METADATA_STORED, NO_XATTRS, Data

_HEADER = struct.Struct("<H")
_PREFIXES = ("user", "trusted", "security")  # in the order of their numbers
# Linux's limits for an attribute: XATTR_NAME_MAX and XATTR_SIZE_MAX.
_NAME_MOST, _VALUE_MOST = 255, 1 << 16

XattrSet = tuple[tuple[str, bytes], ...]
# A name, its inode's number, and its type.
Row = tuple[bytes, int, int]
# mode, index of the owner and of the group in the id table, mtime, inode number
Head = tuple[int, int, int, int, int]

# The type of a basic inode and of a directory entry.
TYPES = {kind: number for number, kind in enumerate(model.KINDS, 1)}
_END32 = 1 << 32
_WORD = struct.Struct("<I")
_INDEX = struct.Struct("<III")
_RUN_MOST = 256  # maximum entries per header
_FAR = 1 << 15  # entries store their inode number as a difference from the header's
_INDEX_MOST = 0xFFFF


def stored_block(data: bytes) -> bytes:
    """Return `data`, at most 8 KiB, as an uncompressed metadata block."""
    return _HEADER.pack(METADATA_STORED | len(data)) + data


class MetadataWriter:
    """A writer of consecutive records in metadata blocks. A record may span several blocks.

    A reference to a record, in inodes and in the superblock, is the offset of its block from the table's start, shifted
    left by 16, plus the record's offset in the uncompressed block.
    """

    def __init__(self, compress: Compress) -> None:
        self._compress = compress
        self._blocks, self._pending = bytearray(), bytearray()

    @property
    def next(self) -> int:
        """The reference of the next record."""
        return len(self._blocks) << 16 | len(self._pending)

    def add(self, record: bytes | bytearray) -> int:
        """Add a record and return its reference."""
        reference = self.next
        self._pending += record
        while len(self._pending) >= METADATA_SIZE:
            self._pack()
        return reference

    def finish(self) -> bytes:
        """Return the complete table. No record can be added afterwards."""
        if self._pending:
            self._pack()
        return bytes(self._blocks)

    def _pack(self) -> None:
        data = bytes(self._pending[:METADATA_SIZE])
        del self._pending[:METADATA_SIZE]
        packed = self._compress(data)
        self._blocks += _HEADER.pack(len(packed)) + packed if len(packed) < len(data) else stored_block(data)


def indexed(records: bytes | bytearray, at: int, compress: Compress) -> tuple[bytes, int]:
    """Return a table with lookup by number: its blocks, followed by the list of their positions.

    `at` is the table's offset in the image. No record in `records` may cross a multiple of 8 KiB. Returns the table's
    bytes, and the offset in the image of the list of positions, which the superblock refers to.
    """
    blocks = MetadataWriter(compress)
    places = []
    for start in range(0, len(records), METADATA_SIZE):
        places.append(at + (blocks.next >> 16))
        blocks.add(records[start : start + METADATA_SIZE])
    data = blocks.finish()
    return data + struct.pack(f"<{len(places)}Q", *places), at + len(data)


class Xattrs:
    """The distinct sets of attributes, numbered in the order of their first use, which determines the tables' bytes."""

    def __init__(self, compress: Compress) -> None:
        self._compress = compress
        self._numbers: dict[XattrSet, int] = {}
        self._values, self._sets = MetadataWriter(compress), bytearray()

    def number(self, xattrs: XattrSet, path: str) -> int:
        """Return the number of a set in the table; NO_XATTRS for an empty set.

        Raises BuildError, naming `path`, for an attribute that squashfs cannot express.
        """
        if not xattrs:
            return NO_XATTRS
        ordered = tuple(sorted(xattrs))
        known = self._numbers.get(ordered)
        if known is not None:
            return known
        names = dict(ordered)
        if len(names) < len(ordered):
            raise BuildError(f"{path}: an extended attribute is there twice: {', '.join(names)}")
        record = b"".join(_record(name, value, path) for name, value in ordered)
        # As in mksquashfs, the size counts the names as listxattr(2) returns them, plus the values.
        size = sum(len(encoded(name, path)) + 1 + len(value) for name, value in ordered)
        self._sets += model.XATTR_SET.pack(self._values.add(record), len(ordered), size)
        return self._numbers.setdefault(ordered, len(self._numbers))

    def table(self, at: int) -> tuple[bytes, int] | None:
        """Return the tables for offset `at` of the image, and the offset of their header in the image.

        Returns None when there is no set.
        """
        if not self._numbers:
            return None
        values = self._values.finish()
        sets, places = indexed(self._sets, at + len(values), self._compress)
        blocks = places - at - len(values)
        head = model.XATTR_TABLE.pack(at, len(self._numbers), 0)
        return values + sets[:blocks] + head + sets[blocks:], places


def encoded(text: str, path: str) -> bytes:
    """Return the bytes of a name or a link's text at `path`, the same in every locale.

    Raises BuildError when the text is not valid Unicode.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise BuildError(f"{path!a}: {text[:80]!a} is not valid Unicode") from None


def _record(name: str, value: bytes, path: str) -> bytes:
    prefix, _, rest = name.partition(".")
    if prefix not in _PREFIXES or not rest:
        raise BuildError(
            f"{path}: squashfs cannot hold its extended attribute {name!r}",
            f"only those that begin with {', '.join(f'{known}.' for known in _PREFIXES)}",
        )
    short = encoded(rest, path)
    if len(f"{prefix}.") + len(short) > _NAME_MOST or len(value) > _VALUE_MOST:
        raise BuildError(
            f"{path}: its extended attribute {name[:80]!r} is too large",
            f"{_NAME_MOST} bytes of name and {_VALUE_MOST} of value are the most",
        )
    return struct.pack("<HH", _PREFIXES.index(prefix), len(short)) + short + _WORD.pack(len(value)) + value


@dataclass(frozen=True, slots=True)
class DirectoryListing:
    """The position of a directory's entries in the directory table, their size in bytes, and the index.

    The kernel uses the index to find names in long listings.
    """

    reference: int
    size: int
    index: tuple[bytes, ...]


def write_listing(table: MetadataWriter, rows: Sequence[Row], inodes: Sequence[int]) -> DirectoryListing:
    """Add the entries of one directory, `rows` in order of their names, to the directory table.

    `inodes` maps inode numbers to references. Entries form runs, each after a header; the inodes of a run are in one
    metadata block. Each block of the table begins a new run, and the index points to it. The kernel reads whole blocks,
    so more index entries would not help.
    """
    beginning = table.next
    size = 0
    index: list[bytes] = []
    indexed_block = beginning >> 16
    run = bytearray()
    count, run_block, run_number, room = 0, -1, 0, 0

    def end_run() -> int:
        if not count:
            return 0
        table.add(model.DIR_HEADER.pack(count - 1, run_block, run_number) + run)
        return model.DIR_HEADER.size + len(run)

    for name, number, kind in rows:
        reference = inodes[number]
        block = reference >> 16
        if block != run_block or count == _RUN_MOST or len(run) >= room or not -_FAR <= number - run_number < _FAR:
            size += end_run()
            run.clear()
            at = table.next
            if at >> 16 != indexed_block and len(index) < _INDEX_MOST:
                index.append(_INDEX.pack(size, at >> 16, len(name) - 1) + name)
                indexed_block = at >> 16
            room = METADATA_SIZE - (at & 0xFFFF) - model.DIR_HEADER.size
            count, run_block, run_number = 0, block, number
        run += model.DIR_ENTRY.pack(reference & 0xFFFF, number - run_number, kind, len(name) - 1) + name
        count += 1
    return DirectoryListing(beginning, size + end_run(), tuple(index))


def regular(head: Head, data: Data, size: int, links: int, xattrs: int) -> bytes:
    """Return the inode of a regular file of `size` bytes with `links` names."""
    words = data.words
    sparse = _sparse(words, size) if 0 in words else 0
    long = links > 1 or xattrs != NO_XATTRS or sparse > 0 or size >= _END32 or data.start >= _END32
    if long:
        rest = model.REST[FILE][1].pack(data.start, size, sparse, links, data.fragment, data.offset, xattrs)
    else:
        rest = model.REST[FILE][0].pack(data.start, data.fragment, data.offset, size)
    return _head(FILE, head, long) + rest + struct.pack(f"<{len(words)}I", *words)


def directory(head: Head, listing: DirectoryListing, links: int, parent: int, xattrs: int) -> bytes:
    """Return the inode of a directory.

    `links` is 2 plus the number of subdirectories; `parent` is the inode number of the parent directory.
    """
    block, offset = listing.reference >> 16, listing.reference & 0xFFFF
    size = listing.size + 3  # the format counts "." and ".." as 3 bytes
    if size < 1 << 16 and xattrs == NO_XATTRS and not listing.index:
        return _head(DIR, head, False) + model.REST[DIR][0].pack(block, links, size, offset, parent)
    rest = model.REST[DIR][1].pack(links, size, block, parent, len(listing.index), offset, xattrs)
    return _head(DIR, head, True) + rest + b"".join(listing.index)


def special(entry: Entry, head: Head, links: int, xattrs: int) -> bytes:
    """Return the inode of a symbolic link, a device or a named pipe."""
    long = xattrs != NO_XATTRS
    content = b""
    if entry.kind == SYMLINK:
        text = encoded(entry.target, entry.path)
        content = _WORD.pack(len(text)) + text
    elif entry.kind in (CHAR, BLOCK):
        major, minor = entry.device
        content = _WORD.pack(minor & 0xFF | major << 8 | (minor & ~0xFF) << 12)
    return _head(entry.kind, head, long) + _WORD.pack(links) + content + (_WORD.pack(xattrs) if long else b"")


def _head(kind: str, head: Head, long: bool) -> bytes:
    return model.INODE.pack(TYPES[kind] + long * len(model.KINDS), *head)


def _sparse(words: tuple[int, ...], size: int) -> int:
    """Return the number of a file's bytes in blocks of zeros, which are not stored."""
    sparse = words.count(0) * BLOCK_SIZE
    # The last block may be shorter than the others.
    return sparse - max(len(words) * BLOCK_SIZE - size, 0) if words[-1] == 0 else sparse
