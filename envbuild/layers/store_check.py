"""Check of a store: compare every file with its known sha256, and read every note of the store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from envbuild.base.progress import log, transfer
from envbuild.base.text import normalise
from envbuild.base.workers import each
from envbuild.cache.hashed import read_note
from envbuild.image.squashfs.segment import stored_digest
from envbuild.image.tar import read_table
from envbuild.layers.source_files import stored_manifest
from envbuild.store.sources import matches
from envbuild.store.store import Store
from envbuild.store.vault import wheel_title

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Folders whose files, or whose folders, are named by the sha256 of a file.
_NAMED = ("wheels", "conda/archives", "blobs/sha256", "sources")
# Notes and tables that prove themselves. The builder's note has the sha256 of the file beside it.
_NOTES = ("layers/*.json", "segments/*.json", "conda/images/*.json", "conda/info/*.json", "conda/stamps/*.json")
_TABLES = ("layers/*.members", "listings/*.members", "segments/*.index")


def stored_files(store: Store) -> Iterator[tuple[Path, str]]:
    """Yield (file, sha256) for the files of `store` with a known digest (hexadecimal), "" if its note is damaged."""
    for folder in _NAMED:
        for path in sorted((store.root / folder).glob("*")):
            if _SHA256.fullmatch(path.name):
                yield from ((file, path.name) for file in ([path] if path.is_file() else sorted(path.iterdir())))
    for index in sorted((store.root / "segments").glob("*.index")):
        data = index.with_suffix(".data")
        if data.is_file():
            yield data, stored_digest(index)
    for builder in sorted((store.root / "builders").glob("*.sqsh")):
        digest = ""
        with suppress(OSError, ValueError):
            digest = str(read_note(builder.with_suffix(".json")).get("sha256"))
        yield builder, digest
    for tree in sorted((store.root / "built").glob("*/tree")):
        manifest = stored_manifest(tree)
        known = {path: sha256 for path, sha256, _ in manifest.files} if manifest else {}
        for path in sorted(tree.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield path, known.get(path.relative_to(tree).as_posix(), "")


def check_store(store: Store, workers: int) -> tuple[int, int, list[Path]]:
    """Read the files of `store` in `workers` threads; remove those that differ from their sha256, or have a wrong name.

    Returns the number of files, their bytes, and the paths of the removed files. The next build fetches or rebuilds the
    removed files. Raises OSError.
    """
    files: list[tuple[Path, Callable[[], bool]]] = [
        (path, partial(_keep_file, path, sha256, store)) for path, sha256 in stored_files(store)
    ]
    for patterns, keep in ((_NOTES, _keep_note), (_TABLES, _keep_table)):
        files += [(path, partial(keep, path)) for pattern in patterns for path in sorted(store.root.glob(pattern))]
    sizes = {path: path.stat().st_size for path, _ in files}
    with transfer(f"reading {len(files)} files of {store.root}", sum(sizes.values())) as on_progress:

        def kept(item: tuple[Path, Callable[[], bool]], _: object) -> bool:
            path, keep = item
            good = keep()
            on_progress(sizes[path])
            return good

        good_files = each(files, kept, workers)
    return (
        len(files),
        sum(sizes.values()),
        [path for (path, _), good in zip(files, good_files, strict=True) if not good],
    )


def _keep_file(path: Path, sha256: str, store: Store) -> bool:
    """Return whether a file matches its sha256 and a wheel's name matches its metadata; otherwise remove the file."""
    if not store.digests.keep(path, sha256, again=True):
        return False
    if path.parent.parent != store.root / "wheels":
        return True
    try:
        name, version, _ = wheel_title(path)
    except ValueError:  # whoever needs it is told
        return True
    if matches(path.name, normalise(name), version):
        return True
    log(f"{path}: the file contains {name} {version}; removed, and fetched again")
    path.unlink(missing_ok=True)
    return False


def _keep_note(path: Path) -> bool:
    with suppress(ValueError):  # it is removed if it is damaged; one of an older version stays
        read_note(path)
    return path.exists()


def _keep_table(path: Path) -> bool:
    try:
        read_table(path)
    except ValueError:
        path.unlink(missing_ok=True)
        return False
    return True
