"""Items of the store: their sizes, last uses and recipes, and the removal of unused ones.

The time of use is the later of an item's own time and that of its note in `digests`, which every use of a file sets
(cache/hashed.py). A removal is safe beside running builds: each is registered in `running`, and items used since the
first one began stay. An item is tested and renamed away under a lock that excludes every use (Digests.using).
Environments keep their files: they have links or copies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from envbuild.base.atomic import file_lock, folder_lock
from envbuild.base.errors import BuildError
from envbuild.base.files import walk_stats
from envbuild.base.progress import log
from envbuild.base.text import human_size
from envbuild.cache.hashed import read_note, write_note
from envbuild.store.store import Store, clean_folders

_BLOCK = 512  # the unit of st_blocks
# Seconds between two looks at the limit of the store.
_EVERY_S = 3600
# Items that are tested and renamed while no use may begin: a few milliseconds.
_BATCH = 32


@dataclass(frozen=True, slots=True)
class _Kind:
    """Items of one kind, by the pattern of their paths; `beside` are patterns of files that belong to an item.

    `{}` is the part of the item's name that the pattern's * stands for. `noted` items have their files' notes in
    `digests`. `users` is the folder with the paths of the environments that link to an item, which is kept for them.
    """

    title: str
    pattern: str
    beside: tuple[str, ...] = ()
    noted: bool = True
    users: str = ""


_KINDS = (
    _Kind("wheels", "wheels/*"),
    _Kind("unpacked wheels (uv)", "uv", noted=False),
    _Kind("conda packages", "conda/archives/*"),
    _Kind("unpacked conda packages", "conda/pkgs/*", ("conda/stamps/{}.json",), noted=False),
    _Kind("blobs of images", "blobs/sha256/*"),
    _Kind("tables of layers", "layers/*.members", ("layers/{}.json",)),
    _Kind("segments", "segments/*.data", ("segments/{}.index", "segments/{}.json")),
    _Kind("sources", "sources/*"),
    _Kind("built layers", "built/*"),
    _Kind("builder images", "builders/*.sqsh", ("builders/{}.json",)),
    _Kind("Pythons", "interpreters/cpython-*", noted=False, users="interpreters/.users/cpython-{}"),
    _Kind("Pythons of images", "interpreters/debian-*", noted=False),
    _Kind("lists of conda packages", "conda/images/*.json", noted=False),
    _Kind("maps of image files", "maps/*.json", noted=False),
    _Kind("attestations of images", "attested/*", noted=False),
    _Kind("facts of wheels", "facts/*.json", noted=False),
    _Kind("symbols of wheels", "symbols/*", noted=False),
    _Kind("contents of layers", "listings/*.members", noted=False),
    _Kind("seals of environments", "seals/*.json", noted=False),
)
_CONDA = "conda/pkgs/"


@dataclass(frozen=True, slots=True)
class StoreItem:
    """A file or folder of the store, with the files that belong to it; all are removed together.

    `name` is its path in the store, `size` the bytes on the disk, `used` the time of its last use (time.time()).
    An item that is `needed` by an environment is not removed.
    """

    kind: str
    name: str
    paths: tuple[Path, ...]
    size: int
    used: float
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Removal:
    """The items of a removal: the `removed` ones, and the ones that a running build `held`."""

    removed: tuple[StoreItem, ...]
    held: tuple[StoreItem, ...]


def items(store: Store) -> list[StoreItem]:
    """Return all items of `store`, the least recently used first. Raises OSError."""
    store_items = [
        item for kind in _KINDS for path in store.root.glob(kind.pattern) if (item := _item(store, kind, path))
    ]
    return sorted(store_items, key=lambda item: (item.used, item.name))


def _item(store: Store, kind: _Kind, path: Path) -> StoreItem | None:
    """Return the item at `path`; None for a file that is being written, and if there is none."""
    if path.name.startswith(".") or path.suffix == ".lock" or (kind.users and path.is_symlink()):
        return None
    start, _, end = Path(kind.pattern).name.partition("*")
    stem = path.name[len(start) : len(path.name) - len(end)]
    beside = [store.root / pattern.format(stem) for pattern in kind.beside]
    with suppress(FileNotFoundError):
        times, files = [path.lstat().st_mtime], dict(_files(path))
        size = sum(info.st_blocks for info in files.values()) * _BLOCK
        for path_beside in beside:
            with suppress(FileNotFoundError):
                info = path_beside.lstat()
                times.append(info.st_mtime)
                size += info.st_blocks * _BLOCK
        if kind.noted:
            times += map(store.digests.used, files)
        users = store.root / kind.users.format(stem) if kind.users else None
        needed = users is not None and any(_links(place, path) for place in _places(users))
        name = path.relative_to(store.root).as_posix()
        return StoreItem(kind.title, name, (path, *beside, *([users] if users else ())), size, max(times), needed)
    return None


def _places(users: Path) -> Iterator[Path]:
    for note in users.glob("*"):
        with suppress(OSError):
            yield Path(os.fsdecode(note.read_bytes()))


def _links(environment: Path, path: Path) -> bool:
    """Return whether the environment links to a program below `path`, or cannot be looked at."""
    try:
        program = os.readlink(environment / "bin" / "python")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return os.path.realpath(program).startswith(f"{os.path.realpath(path)}{os.sep}")


def _files(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    if path.is_dir():
        yield from ((path / name, info) for name, info in walk_stats(path))
    else:
        yield path, path.lstat()


def remember(store: Store, recipe: str) -> None:
    """Record the items that this process used for `recipe`. Does nothing if the store cannot be written."""
    root = os.path.realpath(store.root)
    used = {name for path in store.seen if (name := _name(os.path.relpath(path, root)))}
    if not used:
        return
    with suppress(OSError, BuildError):
        known = {name for name in recipes(store).get(recipe, ()) if (store.root / name).exists()}
        write_note(store.folder("recipes") / f"{recipe}.json", {"items": sorted(used | known)})


def _name(path: str) -> str:
    """Return the name of the item that has the file `path` of the store, "" if no item has it."""
    parts = path.split("/")
    for kind in _KINDS:
        depth = kind.pattern.count("/") + 1
        name = "/".join(parts[:depth])
        if len(parts) >= depth and fnmatchcase(name, kind.pattern):
            return name
    return ""


def recipes(store: Store) -> dict[str, frozenset[str]]:
    """Return the names of the items that builds and locks of each recipe have used."""
    items_of = {}
    for path in sorted((store.root / "recipes").glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            items_of[path.stem] = frozenset(map(str, read_note(path)["items"]))
    return items_of


def choose(
    store_items: Sequence[StoreItem],
    now: float,
    *,
    older_s: float | None = None,
    keep: int | None = None,
    only: Callable[[StoreItem], bool] = lambda _: True,
) -> list[StoreItem]:
    """Return the items to remove, among those for which `only` is true: items not used for `older_s` seconds.

    Then, while more than `keep` bytes remain, the least recently used items. Without both, all items.
    """

    def free(item: StoreItem) -> bool:
        return only(item) and not item.needed

    if older_s is None and keep is None:
        return list(filter(free, store_items))
    old = [item for item in store_items if free(item) and older_s is not None and item.used < now - older_s]
    chosen, left = {item.name for item in old}, sum(item.size for item in store_items) - sum(item.size for item in old)
    for item in store_items:
        if keep is None or left <= keep:
            break
        if item.name not in chosen and free(item):
            chosen.add(item.name)
            left -= item.size
    return [item for item in store_items if item.name in chosen]


def own_items(store: Store, recipe: str) -> Callable[[StoreItem], bool]:
    """Return a function that returns whether only `recipe` uses an item."""
    known: Mapping[str, frozenset[str]] = recipes(store)
    others: frozenset[str] = frozenset().union(*(names for name, names in known.items() if name != recipe))
    own = known.get(recipe, frozenset()) - others
    return lambda item: item.name in own


def remove(store: Store, chosen: Iterable[StoreItem]) -> Removal:
    """Remove the `chosen` items, except items used since the first of the running builds began.

    Raises BuildError when the store is not writable.
    """
    removed: list[StoreItem] = []
    held: list[StoreItem] = []
    todo = list(chosen)
    with store.writing(), store.working("pruned") as trash, ExitStack() as stack:
        clean_folders(store.root / "running")
        # When the first of the running builds began, by the clock of the store's file system.
        since = min(_times([trash, *(store.root / "running").glob("*")]))
        if any(item.name.startswith(_CONDA) for item in todo):
            stack.enter_context(file_lock(store.conda_lock))
        for start in range(0, len(todo), _BATCH):
            with folder_lock(store.folder("digests")):
                for item in todo[start : start + _BATCH]:
                    (removed if _put_away(store, item, since, trash) else held).append(item)
    return Removal(tuple(removed), tuple(held))


def _times(paths: Iterable[Path]) -> Iterator[float]:
    for path in paths:
        with suppress(FileNotFoundError):
            yield path.stat().st_mtime


def _put_away(store: Store, item: StoreItem, since: float, trash: Path) -> bool:
    kind = next(kind for kind in _KINDS if kind.title == item.kind)
    now = _item(store, kind, item.paths[0])
    if now is not None and (now.used >= since or now.needed):
        return False
    for path in item.paths:
        with suppress(FileNotFoundError):
            for file in [file_path for file_path, _ in _files(path)] if kind.noted else []:
                store.digests.forget(file)
            path.rename(trash / path.relative_to(store.root).as_posix().replace("/", "+"))
    return True


def limit(store: Store, most: int) -> None:
    """Remove the least recently used items if `store` has more than `most` bytes; checked once an hour."""
    with suppress(OSError, BuildError):
        place = store.folder("pruned")  # a removal changes its time
        if time.time() - place.stat().st_mtime < _EVERY_S:
            return
        os.utime(place)
        removal = remove(store, choose(items(store), time.time(), keep=most))
        if removal.removed:
            log(
                f"the store had more than the site's limit of {human_size(most)}: {len(removal.removed)} items, "
                f"{human_size(sum(item.size for item in removal.removed))}, removed, the least recently used ones"
            )
