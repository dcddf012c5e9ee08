"""Writer of the tables behind the data of a squashfs image, and of its superblock, from a tree that it checks.

The kernel checks the order of the tables: inodes, directories, fragments, export, ids, extended attributes. Tables of
metadata consist of blocks of 8 KiB, each compressed separately. Sources: Documentation/filesystems/squashfs.rst,
section 3, and in fs/squashfs the files super.c, squashfs_fs.h, namei.c and xattr_id.c of the Linux kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import BinaryIO

from envbuild.base.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.squashfs import model
from envbuild.image.squashfs.model import (
    BLOCK_SIZE,
    FRAGMENT,
    MAGIC,
    METADATA_SIZE,
    METADATA_STORED,
    NO_FRAGMENT,
    NO_TABLE,
    NO_XATTRS,
    SUPERBLOCK,
    Codec,
    Compress,
    Data,
    Fragment,
)

_HEADER = struct.Struct("<H")
_PREFIXES = ("user", "trusted", "security")  # in the order of their numbers
# Linux's limits for an attribute: XATTR_NAME_MAX and XATTR_SIZE_MAX.
_XATTR_NAME_MOST, _XATTR_VALUE_MOST = 255, 1 << 16

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
            raise BuildError(f"{path}: an extended attribute is given twice: {', '.join(names)}")
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
    if len(f"{prefix}.") + len(short) > _XATTR_NAME_MOST or len(value) > _XATTR_VALUE_MOST:
        raise BuildError(
            f"{path}: its extended attribute {name[:80]!r} is too large",
            f"{_XATTR_NAME_MOST} bytes of name and {_XATTR_VALUE_MOST} of value are the limit",
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


_UNWRITTEN = -1
_PAD = 4096
_LAST_SECOND = 0xFFFFFFFF
_NAME_MOST = 256
_TEXT_MOST = 0xFFFF
_MAJOR_END, _MINOR_END = 1 << 12, 1 << 20  # the device numbers that Linux and squashfs can express
_ID_END = 1 << 32
_IDS_MOST = 0xFFFF
# flags of the superblock
_NO_FRAGMENTS, _DUPLICATES, _EXPORT, _NO_XATTRS, _OPTIONS = 0x10, 0x40, 0x80, 0x200, 0x400


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry and, for a FILE, the position of its content; an empty file has Data() or None.

    `data.start` is relative to the image's first byte.
    """

    entry: Entry
    data: Data | None = None


def data_start(codec: Codec) -> int:
    """Return the first possible offset of data in the image, in bytes: after superblock and compressor options."""
    return SUPERBLOCK.size + len(_options(codec))


def write_tables(
    out: BinaryIO, base: int, placed: Sequence[Placed], fragments: Sequence[Fragment], codec: Codec, mtime: int
) -> int:
    """Write everything but the data of a squashfs image, and return its length in bytes, padded to 4096.

    The image begins at offset `base` of `out`, whose position is the end of the data before and the end of the image
    after the call. `placed` may come in any order; a missing root is added. Positions of `fragments`, like those of
    Data, are relative to the image's first byte. `mtime` is the image's creation time, in seconds since 1970; times
    outside of 0 to 2^32-1 are clamped. Raises BuildError, naming the path, for a tree that squashfs cannot express,
    before anything is written.
    """
    tree = _arrange(placed)
    inode_table, listings, references, attributes = _inodes(tree, len(fragments), codec)
    start = position = out.tell() - base

    def put(data: bytes) -> int:
        nonlocal position
        out.write(data)
        position += len(data)
        return position

    directory_table = put(inode_table)
    put(listings)
    records = b"".join(FRAGMENT.pack(item.start, item.word, 0) for item in fragments)
    exports = struct.pack(f"<{len(references)}Q", *references)
    ids = struct.pack(f"<{len(tree.ids)}I", *tree.ids)
    tables = []
    for content in (records, exports, ids):
        data, place = indexed(content, position, codec.compress)
        tables.append(place)
        put(data)
    fragment_table, export_table, id_table = tables
    xattrs, xattr_table = attributes.table(position) or (b"", NO_TABLE)
    used = put(xattrs)
    put(bytes(-used % _PAD))
    flags = _DUPLICATES | _EXPORT
    flags |= (0 if fragments else _NO_FRAGMENTS) | (0 if xattrs else _NO_XATTRS) | (_OPTIONS if codec.options else 0)
    head = SUPERBLOCK.pack(
        MAGIC,
        len(references),
        _clamped(mtime),
        BLOCK_SIZE,
        len(fragments),
        codec.number,
        BLOCK_SIZE.bit_length() - 1,
        flags,
        len(tree.ids),
        4,
        0,
        references[-1],
        used,
        id_table,
        xattr_table,
        start,
        directory_table,
        fragment_table,
        export_table,
    )
    out.seek(base)
    out.write(head + _options(codec))
    out.seek(base + position)
    return position


def _inodes(tree: _Arranged, fragments: int, codec: Codec) -> tuple[bytes, bytes, list[int], Xattrs]:
    """Return the inode and directory tables, the reference of each inode by number less 1, and the attributes.

    The inodes of a directory's entries are adjacent, so that its listing needs few headers.
    """
    table, listings = MetadataWriter(codec.compress), MetadataWriter(codec.compress)
    xattrs = Xattrs(codec.compress)
    references = [_UNWRITTEN] * (len(tree.numbers) + 1)
    ids = {value: number for number, value in enumerate(tree.ids)}
    done: dict[str, tuple[DirectoryListing, int]] = {}  # with the number of links
    numbers = tree.numbers

    def write(item: Placed, number: int, parent: int) -> None:
        entry = item.entry
        path, kind = entry.path, entry.kind
        head = (entry.mode & 0o7777, ids[entry.uid], ids[entry.gid], _clamped(entry.mtime), number)
        attributes = xattrs.number(entry.xattrs, path)
        links = tree.links.get(path, 1)
        if kind == FILE:
            data = item.data or Data()
            _check_data(entry, data, fragments)
            record = regular(head, data, entry.size, links, attributes)
        elif kind == DIR:
            listing, links = done.pop(path)
            record = directory(head, listing, links, parent, attributes)
        else:
            record = special(entry, head, links, attributes)
        references[number] = table.add(record)

    for folder, names in tree.folders:
        parent = numbers[folder]
        rows: list[Row] = []
        directories = 0
        for name, item in names:
            if item.entry.kind == HARDLINK:
                item = tree.entries[item.entry.target]
            number = numbers[item.entry.path]
            if references[number] == _UNWRITTEN:
                write(item, number, parent)
            rows.append((name, number, TYPES[item.entry.kind]))
            directories += item.entry.kind == DIR
        done[folder] = write_listing(listings, rows, references), directories + 2
    # For the kernel, the root's parent is an inode number that does not exist.
    write(tree.entries[""], numbers[""], len(numbers) + 1)
    return table.finish(), listings.finish(), references[1:], xattrs


def _clamped(seconds: int) -> int:
    return min(max(seconds, 0), _LAST_SECOND)


def _options(codec: Codec) -> bytes:
    return stored_block(codec.options) if codec.options else b""


@dataclass(frozen=True, slots=True)
class _Arranged:
    """A complete tree.

    `folders` lists each directory's path and its names, sorted by their bytes; every directory comes after its
    descendants, the root last. `links` is the number of names of each file with more than one. `numbers` are inode
    numbers, from 1; `ids` are all owners and groups.
    """

    entries: dict[str, Placed]
    folders: list[tuple[str, list[tuple[bytes, Placed]]]]
    links: dict[str, int]
    numbers: dict[str, int]
    ids: list[int]


def _arrange(placed: Sequence[Placed]) -> _Arranged:
    """Check and order a tree; a missing root is added. `placed` may come in any order.

    Raises BuildError, naming the path, for an entry that squashfs cannot express, a missing parent or link target, and
    a duplicate path.
    """
    entries: dict[str, Placed] = {}
    for item in placed:
        if item.entry.path in entries:
            raise BuildError(f"{item.entry.path or '/'}: this path is given twice")
        entries[item.entry.path] = item
    root = entries.setdefault("", Placed(Entry("", DIR, 0o755)))
    if root.entry.kind != DIR:
        raise BuildError(f"the root of the image is a {root.entry.kind}, not a directory")
    listed: dict[str, list[tuple[bytes, Placed]]] = {
        path: [] for path, item in entries.items() if item.entry.kind == DIR
    }
    links: dict[str, int] = {}
    for path, item in entries.items():
        _check(item.entry, entries)
        if item.entry.kind == HARDLINK:
            links[item.entry.target] = links.get(item.entry.target, 1) + 1
        if not path:
            continue
        parent, slash, name = path.rpartition("/")
        siblings = listed.get(parent)
        if siblings is None or (slash and not parent):
            raise BuildError(f"{path}: its directory {parent or '/'!r} is missing")
        siblings.append((_name(name, path), item))
    folders = sorted(listed.items(), reverse=True)
    numbers: dict[str, int] = {}
    for _, names in folders:
        names.sort(key=itemgetter(0))
        previous = None
        for name_bytes, item in names:
            if name_bytes == previous:
                raise BuildError(f"{item.entry.path}: this path is given twice")
            previous = name_bytes
            entry = item.entry
            owner = entry.target if entry.kind == HARDLINK else entry.path
            # The names of a file come in any order; the first one sets the file's inode number.
            numbers.setdefault(owner, len(numbers) + 1)
    numbers[""] = len(numbers) + 1
    return _Arranged(entries, folders, links, numbers, _ids(entries))


def _check_data(entry: Entry, data: Data, fragments: int) -> None:
    """Raise BuildError when the blocks and the fragment of `data` do not fit the size of `entry`."""
    whole, rest = divmod(entry.size, BLOCK_SIZE)
    if data.fragment == NO_FRAGMENT:
        right = len(data.words) == whole + (rest > 0)
    else:
        right = len(data.words) == whole and rest > 0
        right = right and data.fragment < fragments and data.offset + rest <= BLOCK_SIZE
    if entry.size < 0 or not right:
        raise BuildError(
            f"{entry.path}: {len(data.words)} blocks of data, fragment {data.fragment:#x}, do not make its "
            f"{entry.size} bytes"
        )


def _check(entry: Entry, entries: dict[str, Placed]) -> None:
    path, target = entry.path, entry.target
    if entry.kind == HARDLINK:
        placed = entries.get(target)
        if placed is None:
            raise BuildError(f"{path}: it is a hard link to {target!r}, which is missing")
        if placed.entry.kind in (DIR, HARDLINK):
            target_type = "a directory" if placed.entry.kind == DIR else "a hard link itself"
            raise BuildError(f"{path}: it is a hard link to {target!r}, which is {target_type}")
    elif entry.kind == SYMLINK:
        size = len(encoded(target, path))
        if not 0 < size <= _TEXT_MOST:
            raise BuildError(f"{path}: a symbolic link to a name of {size} bytes", f"1 to {_TEXT_MOST} bytes")
    elif entry.kind in (CHAR, BLOCK):
        major, minor = entry.device
        if not (0 <= major < _MAJOR_END and 0 <= minor < _MINOR_END):
            raise BuildError(
                f"{path}: squashfs cannot hold a device with the numbers {major}, {minor}",
                f"they are below {_MAJOR_END} and {_MINOR_END}",
            )
    elif entry.kind not in (FILE, DIR, FIFO):
        raise BuildError(f"{path}: squashfs cannot hold an entry of kind {entry.kind!r}")


def _name(name: str, path: str) -> bytes:
    name_bytes = encoded(name, path)
    if not 0 < len(name_bytes) <= _NAME_MOST:
        raise BuildError(f"{path}: its last part has {len(name_bytes)} bytes", f"1 to {_NAME_MOST}")
    if name in (".", "..") or "\0" in name:
        raise BuildError(f"{path!r}: {name!r} is not a valid file name")
    return name_bytes


def _ids(entries: dict[str, Placed]) -> list[int]:
    owners = [item.entry for item in entries.values() if item.entry.kind != HARDLINK]
    ids = sorted({entry.uid for entry in owners} | {entry.gid for entry in owners})
    if not 0 <= ids[0] <= ids[-1] < _ID_END:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        path = next(entry.path for entry in owners if wrong in (entry.uid, entry.gid))
        raise BuildError(f"{path}: an owner or group of {wrong}")
    if len(ids) > _IDS_MOST:
        raise BuildError(
            f"the tree has {len(ids)} owners and groups; squashfs can hold {_IDS_MOST}",
            "give its files to fewer owners",
        )
    return ids
