"""Writer of the tables behind the data of a squashfs image, and of its superblock.

The kernel checks the order of the tables: inodes, directories, fragments, export, ids, extended attributes. Source:
Documentation/filesystems/squashfs.rst, section 3, and fs/squashfs/super.c of the Linux kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import BinaryIO

from envbuild.image.entry import DIR, FILE, HARDLINK
from envbuild.image.squashfs import inodes
from envbuild.image.squashfs.arrange import Arranged, Placed, arrange, check_data
from envbuild.image.squashfs.codec import Codec
from envbuild.image.squashfs.metadata import MetadataWriter, Xattrs, indexed, stored_block
from envbuild.image.squashfs.model import BLOCK_SIZE, FRAGMENT, MAGIC, NO_TABLE, SUPERBLOCK, Data, Fragment

_UNWRITTEN = -1
_PAD = 4096
_LAST_SECOND = 0xFFFFFFFF
# flags of the superblock
_NO_FRAGMENTS, _DUPLICATES, _EXPORT, _NO_XATTRS, _OPTIONS = 0x10, 0x40, 0x80, 0x200, 0x400


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
    tree = arrange(placed)
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
        MAGIC, len(references), _clamped(mtime), BLOCK_SIZE, len(fragments), codec.number,
        BLOCK_SIZE.bit_length() - 1, flags, len(tree.ids), 4, 0, references[-1], used, id_table,
        xattr_table, start, directory_table, fragment_table, export_table,
    )  # fmt: skip
    out.seek(base)
    out.write(head + _options(codec))
    out.seek(base + position)
    return position


def _inodes(tree: Arranged, fragments: int, codec: Codec) -> tuple[bytes, bytes, list[int], Xattrs]:
    """Return the inode and directory tables, the reference of each inode by number less 1, and the attributes.

    The inodes of a directory's entries are adjacent, so that its listing needs few headers.
    """
    table, listings = MetadataWriter(codec.compress), MetadataWriter(codec.compress)
    xattrs = Xattrs(codec.compress)
    references = [_UNWRITTEN] * (len(tree.numbers) + 1)
    ids = {value: number for number, value in enumerate(tree.ids)}
    done: dict[str, tuple[inodes.DirectoryListing, int]] = {}  # with the number of links
    numbers = tree.numbers

    def write(item: Placed, number: int, parent: int) -> None:
        entry = item.entry
        path, kind = entry.path, entry.kind
        head = (entry.mode & 0o7777, ids[entry.uid], ids[entry.gid], _clamped(entry.mtime), number)
        attributes = xattrs.number(entry.xattrs, path)
        links = tree.links.get(path, 1)
        if kind == FILE:
            data = item.data or Data()
            check_data(entry, data, fragments)
            record = inodes.regular(head, data, entry.size, links, attributes)
        elif kind == DIR:
            listing, links = done.pop(path)
            record = inodes.directory(head, listing, links, parent, attributes)
        else:
            record = inodes.special(entry, head, links, attributes)
        references[number] = table.add(record)

    for folder, names in tree.folders:
        parent = numbers[folder]
        rows: list[inodes.Row] = []
        directories = 0
        for name, item in names:
            if item.entry.kind == HARDLINK:
                item = tree.entries[item.entry.target]
            number = numbers[item.entry.path]
            if references[number] == _UNWRITTEN:
                write(item, number, parent)
            rows.append((name, number, inodes.TYPES[item.entry.kind]))
            directories += item.entry.kind == DIR
        done[folder] = inodes.write_listing(listings, rows, references), directories + 2
    # For the kernel, the root's parent is an inode number that does not exist.
    write(tree.entries[""], numbers[""], len(numbers) + 1)
    return table.finish(), listings.finish(), references[1:], xattrs


def _clamped(seconds: int) -> int:
    return min(max(seconds, 0), _LAST_SECOND)


def _options(codec: Codec) -> bytes:
    return stored_block(codec.options) if codec.options else b""
