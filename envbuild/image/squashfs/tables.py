"""Writer of the tables behind the data of a squashfs image, and of its superblock, from a tree that it checks.

The kernel checks the order of the tables: inodes, directories, fragments, export, ids, extended attributes. Source:
Documentation/filesystems/squashfs.rst, section 3, and fs/squashfs/super.c of the Linux kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import BinaryIO

from envbuild.base.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.squashfs import metadata
from envbuild.image.squashfs.codec import Codec
from envbuild.image.squashfs.metadata import MetadataWriter, Xattrs, encoded, indexed, stored_block
from envbuild.image.squashfs.model import BLOCK_SIZE, FRAGMENT, MAGIC, NO_FRAGMENT, NO_TABLE, SUPERBLOCK, Data, Fragment

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
    done: dict[str, tuple[metadata.DirectoryListing, int]] = {}  # with the number of links
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
            record = metadata.regular(head, data, entry.size, links, attributes)
        elif kind == DIR:
            listing, links = done.pop(path)
            record = metadata.directory(head, listing, links, parent, attributes)
        else:
            record = metadata.special(entry, head, links, attributes)
        references[number] = table.add(record)

    for folder, names in tree.folders:
        parent = numbers[folder]
        rows: list[metadata.Row] = []
        directories = 0
        for name, item in names:
            if item.entry.kind == HARDLINK:
                item = tree.entries[item.entry.target]
            number = numbers[item.entry.path]
            if references[number] == _UNWRITTEN:
                write(item, number, parent)
            rows.append((name, number, metadata.TYPES[item.entry.kind]))
            directories += item.entry.kind == DIR
        done[folder] = metadata.write_listing(listings, rows, references), directories + 2
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
            raise BuildError(f"{item.entry.path or '/'}: this path is there twice")
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
            raise BuildError(f"{path}: there is no directory {parent or '/'!r} for it")
        siblings.append((_name(name, path), item))
    folders = sorted(listed.items(), reverse=True)
    numbers: dict[str, int] = {}
    for _, names in folders:
        names.sort(key=itemgetter(0))
        previous = None
        for name_bytes, item in names:
            if name_bytes == previous:
                raise BuildError(f"{item.entry.path}: this path is there twice")
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
        found = entries.get(target)
        if found is None:
            raise BuildError(f"{path}: it is a hard link to {target!r}, which is not there")
        if found.entry.kind in (DIR, HARDLINK):
            what = "a directory" if found.entry.kind == DIR else "a hard link itself"
            raise BuildError(f"{path}: it is a hard link to {target!r}, which is {what}")
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
        raise BuildError(f"{path}: squashfs has nothing of kind {entry.kind!r}")


def _name(name: str, path: str) -> bytes:
    found = encoded(name, path)
    if not 0 < len(found) <= _NAME_MOST:
        raise BuildError(f"{path}: its last part has {len(found)} bytes", f"1 to {_NAME_MOST}")
    if name in (".", "..") or "\0" in name:
        raise BuildError(f"{path!r}: nothing can be called {name!r}")
    return found


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
