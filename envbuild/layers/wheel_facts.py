"""What the layers of a wheel depend on besides its digest: its size, which decides the order of layers, and its name.

With these facts, a wheel whose layer is in the store or in the team's cache need not be fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from envbuild.cache.hashed import read_note, write_note
from envbuild.layers.compose import WheelFile
from envbuild.store.entry import CacheEntry, fetched
from envbuild.store.store import Store

# sha256, size in bytes, file name, and for torch its accelerators and their libraries, as WheelFile has them.
Facts = tuple[str, int, str, tuple[dict[str, str], list[str]] | None]


def wheel_facts(hashes: Sequence[Sequence[str]], store: Store) -> list[Facts | None]:
    """Return the facts of the wheels with one of these sha256 each, from `store` or its remote cache, else None."""
    entries = [_entry(those) for those in hashes]
    found = [_read(entry, those, store) for entry, those in zip(entries, hashes, strict=True)]
    if store.remote is not None:
        store.remote.expect([entry for entry, facts in zip(entries, found, strict=True) if facts is None])
        for number, entry in enumerate(entries):
            if found[number] is None:
                found[number] = fetched(entry, store.remote, partial(_read, entry, hashes[number], store))
    return found


def note_facts(hashes: Sequence[str], wheel: WheelFile, store: Store) -> None:
    """Keep the facts of `wheel`, which has one of `hashes`, and offer them to the remote cache."""
    entry = _entry(hashes)
    fields = {"sha256": wheel.sha256, "size": wheel.size, "file": wheel.file_name, "torch": wheel.torch}
    with suppress(OSError):  # a read-only store only costs time
        write_note(_place(entry, store), fields)
        _used(entry, store)
        if store.remote is not None:
            store.remote.offer(entry, 0.0)


def _used(entry: CacheEntry, store: Store) -> None:
    place = store.root / entry.files[0]
    store.note_use(place, place)


def _entry(hashes: Sequence[str]) -> CacheEntry:
    return CacheEntry("wheel", hashlib.sha256(" ".join(sorted(hashes)).encode()).hexdigest())


def _place(entry: CacheEntry, store: Store) -> Path:
    store.folder("facts")
    return store.root / entry.files[0]


def _read(entry: CacheEntry, hashes: Sequence[str], store: Store) -> Facts | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = read_note(store.root / entry.files[0])
        torch = None
        if note["torch"] is not None:
            builds, libraries = note["torch"]
            torch = {str(name): str(build) for name, build in builds.items()}, [str(name) for name in libraries]
        size, file, sha256 = note["size"], note["file"], note["sha256"]
        if type(size) is int and size > 0 and type(file) is str and "/" not in file and sha256 in hashes:
            _used(entry, store)
            return str(sha256), size, file, torch
    return None
