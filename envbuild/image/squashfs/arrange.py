"""Checked file trees in the order of an image's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from envbuild.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.squashfs.model import BLOCK_SIZE, NO_FRAGMENT, Data

_NAME_MOST = 256
_TEXT_MOST = 0xFFFF
_MAJOR_END, _MINOR_END = 1 << 12, 1 << 20  # the device numbers that Linux and squashfs can express
_ID_END = 1 << 32
_IDS_MOST = 0xFFFF


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry and, for a FILE, the position of its content; an empty file has Data() or None.

    `data.start` is relative to the image's first byte.
    """

    entry: Entry
    data: Data | None = None


@dataclass(frozen=True, slots=True)
class Arranged:
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


def arrange(placed: Sequence[Placed]) -> Arranged:
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
    return Arranged(entries, folders, links, numbers, _ids(entries))


def check_data(entry: Entry, data: Data, fragments: int) -> None:
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


def encoded(text: str, path: str) -> bytes:
    """Return the bytes of a name or a link's text at `path`, the same in every locale.

    Raises BuildError when the text is not valid Unicode.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise BuildError(f"{path!a}: {text[:80]!a} is not valid Unicode") from None


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
