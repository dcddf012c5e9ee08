"""The check of a store: every file whose sha256 its name or its index states is read and compared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from envbuild.image.squashfs.segment import stored_digest
from envbuild.progress import transfer
from envbuild.store.store import Store
from envbuild.workers import each

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Folders whose files, or whose folders, are named by the sha256 of a file.
_NAMED = ("wheels", "conda/archives", "blobs/sha256")


def stored_files(store: Store) -> Iterator[tuple[Path, str]]:
    """Yield the files of `store` whose sha256 (hexadecimal) is known, with it."""
    for folder in _NAMED:
        for path in sorted((store.root / folder).glob("*")):
            if _SHA256.fullmatch(path.name):
                yield from ((file, path.name) for file in ([path] if path.is_file() else sorted(path.iterdir())))
    for index in sorted((store.root / "segments").glob("*.index")):
        data = index.with_suffix(".data")
        if data.is_file():
            yield data, stored_digest(index)


def check_store(store: Store, workers: int) -> tuple[int, int, list[Path]]:
    """Read the files of `store` in `workers` threads, and remove those that differ from their sha256.

    Returns the number of files, their bytes, and the paths of the removed files. What is missing is fetched or made
    again by the next build. Raises OSError.
    """
    files = list(stored_files(store))
    sizes = {path: path.stat().st_size for path, _ in files}
    with transfer(f"reading {len(files)} files of {store.root}", sum(sizes.values())) as on_progress:

        def keep(one: tuple[Path, str], _: object) -> bool:
            kept = store.digests.keep(*one, again=True)
            on_progress(sizes[one[0]])
            return kept

        kept = each(files, keep, workers)
    return len(files), sum(sizes.values()), [path for (path, _), good in zip(files, kept, strict=True) if not good]
