"""What a team's cache has of a recipe: everything that builds of it used, uploaded or fetched at once.

The list of it is an entry of its own, whose key is the recipe's name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from envbuild.base.errors import BuildError
from envbuild.base.files import is_file_name
from envbuild.base.workers import each
from envbuild.cache.hashed import read_note, write_note
from envbuild.store.entry import KINDS, CacheEntry
from envbuild.store.remote import RemoteCache
from envbuild.store.store import Store
from envbuild.store.usage import recipes

_PARALLEL = 4


def entries_of(store: Store, recipe: str) -> list[CacheEntry]:
    """Return the entries for what builds of `recipe` used and `store` still has."""
    names = sorted(recipes(store).get(recipe, ()))
    return [entry for name in names if (store.root / name).exists() and (entry := _entry(name)) is not None]


def _entry(item: str) -> CacheEntry | None:
    """Return the entry of an item of the store (store/usage.py), None for what is no result of a build."""
    if item.startswith("built/"):
        return CacheEntry("built", item.removeprefix("built/"))
    for kind, files in KINDS.items():
        before, _, after = files[0].partition("{}")
        if item.startswith(before) and item.endswith(after):
            return CacheEntry(kind, item[len(before) : len(item) - len(after)])
    return None


def push_recipe(
    remote: RemoteCache, recipe: str, pack: Callable[[Store, Path], CacheEntry], done: Callable[[CacheEntry], None]
) -> tuple[int, int]:
    """Upload what builds of `recipe` used and the cache lacks, and its list; return the entries, and the bytes sent.

    `pack` writes the file of a source-built layer's entry; `done` is called for each entry, from several threads.
    Raises BuildError when a request fails.
    """
    store = remote.store
    entries = entries_of(store, recipe)

    def send(entry: CacheEntry, _: threading.Event) -> int:
        if remote.has(entry):
            return 0
        if entry.kind == "built":
            pack(store, store.root / "built" / entry.key)
        sent = remote.upload(entry, 0.0, _blobs(entry, store))
        done(entry)
        return sent

    sizes = each(entries, send, _PARALLEL)
    named = CacheEntry("recipe", recipe)
    store.folder("partial")
    write_note(store.root / named.files[0], {"entries": [[one.kind, one.key] for one in entries]})
    remote.upload(named, 0.0, [])
    return len(entries), sum(sizes)


def pull_recipe(remote: RemoteCache, recipe: str) -> tuple[int, int]:
    """Fetch what the cache has of `recipe`; return the number of its entries, and of those that could not be fetched.

    Raises BuildError if the cache has no list of it.
    """
    named = CacheEntry("recipe", recipe)
    entries = list(_listed(remote.store, named)) if remote.bring(named) else []
    if not entries:
        raise BuildError(
            f"the cache {remote.registry.reference.name} has nothing of {recipe}",
            f"where builds have used it: envbuild cache push {recipe}",
        )
    wanted = [one for one in entries if one.kind == "built" or not (remote.store.root / one.files[-1]).exists()]
    remote.expect(wanted)
    return len(entries), sum(not remote.bring(one) for one in wanted)


def _listed(store: Store, named: CacheEntry) -> Iterable[CacheEntry]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        for kind, key in read_note(store.root / named.files[0])["entries"]:
            if kind in KINDS and is_file_name(key):
                yield CacheEntry(kind, key)


def _blobs(entry: CacheEntry, store: Store) -> Sequence[str]:
    if entry.kind != "layer":
        return ()
    return [str(read_note(store.root / entry.files[-1])["digest"])]


def counted(tags: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the number of entries of each kind, by their tags."""
    kinds = [tag.partition("-")[0] for tag in tags]
    yield from ((kind, kinds.count(kind)) for kind in KINDS if kind in kinds)
