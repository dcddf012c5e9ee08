"""Conda packages unpacked in the store, from which environments are linked.

conda/pkgs/NAME-VERSION-BUILD holds a package in the form of conda's own cache. Its files can be changed through a hard
link in an environment, or be lost on a full disk. So conda/stamps records the contents, times and modes of the files
after unpacking; each build compares them, and unpacks a changed package again. conda/info holds the metadata of each
archive.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.base.atomic import file_lock, remove_tree
from envbuild.base.errors import BuildError
from envbuild.base.files import walk_stats
from envbuild.base.progress import log
from envbuild.base.workers import each
from envbuild.cache.hashed import read_note, write_note
from envbuild.contract.installed import file_digest
from envbuild.contract.manifest import Stat, stat_of
from envbuild.layers.conda_package import read_info
from envbuild.lock.conda import CondaPackage
from envbuild.store.store import Store

Located = Sequence[tuple[CondaPackage, Path]]
Locate = Callable[[Sequence[CondaPackage]], Located]
_SCRIPT = re.compile(r"bin/\.[^/]+-(pre-link|post-link|pre-unlink)\.sh")
_OURS = "envbuild"
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of an archive.

    `index` is a file with its index.json, `size` the archive's size in bytes. `longest` is the maximum length in bytes
    of a prefix that replaces the placeholder in `file`, None if any length fits. `scripts` are the package's link
    scripts.
    """

    index: Path
    size: int
    longest: int | None
    file: str
    scripts: tuple[str, ...]


def folder(store: Store, package: CondaPackage) -> Path:
    """Return the folder of the unpacked `package`."""
    return store.root / "conda" / "pkgs" / package.stem


def metadata(store: Store, package: CondaPackage) -> Metadata | None:
    """Return the stored metadata of `package`'s archive, None if the archive was never read."""
    path = store.root / "conda" / "info" / f"{package.sha256}.json"
    try:
        ours = read_note(path)[_OURS]
        return Metadata(path, ours["size"], ours["room"], ours["file"], tuple(ours["scripts"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def stored_index(store: Store, package: CondaPackage) -> tuple[dict[str, Any], int]:
    """Return the index.json of an installed `package`, and the size of its archive in bytes. Raises OSError."""
    index = read_note(store.root / "conda" / "info" / f"{package.sha256}.json")
    return index, index.pop(_OURS)["size"]


def known(store: Store, package: CondaPackage) -> Metadata | None:
    """Return the metadata of `package` if it is unpacked, else None; `damaged` says whether its files are intact."""
    return metadata(store, package) if _stamp(store, package) and folder(store, package).is_dir() else None


def read_metadata(store: Store, package: CondaPackage, archive: Path) -> Metadata:
    """Read the metadata of `archive`, and store it. Raises BuildError when it is not the locked package."""
    info = read_info(archive)
    fields = [str(info.index.get(key)) for key in ("name", "version", "build")]
    if fields != [package.name, package.version, package.build]:
        raise BuildError(
            f"{archive.name}: the archive contains {' '.join(fields)}, but the lock names {package.stem}",
            "lock again: the lock was edited, or its channel has files under wrong names",
        )
    # The shortest placeholder in a binary file: no prefix may be longer.
    binaries = [
        (len(row.placeholder.encode()), row.path) for row in info.paths if row.placeholder and row.mode == "binary"
    ]
    longest, file = min(binaries, default=(None, ""))
    scripts = sorted(row.path for row in info.paths if _SCRIPT.fullmatch(row.path))
    size = archive.stat().st_size
    path = store.folder("conda", "info") / f"{package.sha256}.json"
    ours = {"size": size, "room": longest, "file": file, "scripts": scripts}
    with store.writing():
        write_note(path, {**info.index, _OURS: ours})
    return Metadata(path, size, longest, file, tuple(scripts))


def damaged(store: Store, packages: Sequence[CondaPackage], read: dict[Stat, str]) -> list[CondaPackage]:
    """Return the `packages` whose files changed since they were unpacked; for `read`, see `tree_digest`."""

    def is_intact(package: CondaPackage, _: object) -> bool:
        with contextlib.suppress(OSError):
            return _stamp(store, package) == tree_digest(folder(store, package), read)
        return False

    intact = each(packages, is_intact, _THREADS)
    return [package for package, good in zip(packages, intact, strict=True) if not good]


def stamp(store: Store, packages: Sequence[CondaPackage], read: dict[Stat, str]) -> None:
    """Record the files of the newly unpacked `packages`; for `read`, see `tree_digest`.

    Raises BuildError when the store is not writable.
    """
    with store.writing():
        trees = each(packages, lambda package, _: tree_digest(folder(store, package), read), _THREADS)
        for package, tree in zip(packages, trees, strict=True):
            write_note(_note(store, package), {"archive": package.sha256, "tree": tree})


def forget(store: Store, packages: Sequence[CondaPackage]) -> None:
    """Remove unpacked packages; environments that are linked from them keep their files."""
    for package in packages:
        with store.writing():
            _note(store, package).unlink(missing_ok=True)
        unpacked = folder(store, package)
        remove_tree(unpacked)
        unpacked.with_name(f"{unpacked.name}.lock").unlink(missing_ok=True)


@contextlib.contextmanager
def held(store: Store) -> Iterator[None]:
    """Hold the lock on the unpacked packages, and remove leftovers of killed processes. Raises BuildError."""
    pkgs = store.folder("conda", "pkgs")
    store.folder("conda", "stamps")
    message = f"another envbuild uses the conda packages in {store.root}; waiting for it …"
    with contextlib.ExitStack() as stack:
        with store.writing():  # on a file system without locks, rattler's own locks have to do
            stack.enter_context(file_lock(store.conda_lock, lambda: log(message)))
        for left in pkgs.glob(".*"):
            if left.is_dir():
                remove_tree(left)
        yield


def archives(store: Store, packages: Sequence[CondaPackage], locate: Locate) -> dict[CondaPackage, Path]:
    """Return the archives of `packages`, checked because rattler does not check; damaged ones are located once more."""
    paths = dict(locate(packages))
    bad = _mismatched(store, paths)
    for package in bad:
        path = paths[package]
        if not path.is_relative_to(store.root):
            raise BuildError(
                f"{path}: its content changed after it was hashed",
                "run it again; a mirror's files must not be edited in place",
            )
        log(f"{path.name}: damaged in the store; looking for it again")
        path.unlink(missing_ok=True)
    again = dict(locate(bad)) if bad else {}
    if bad := _mismatched(store, again):
        raise BuildError(
            f"{bad[0].file_name}: damaged again immediately after it was stored",
            f"check the disk that holds {store.root}",
        )
    return paths | again


def tree_digest(root: Path, read: dict[Stat, str]) -> str:
    """Return the sha256 of the names, modes, modification times and contents of all files and links below `root`.

    Adds the sha256 of each file to `read`: the same files, linked into an environment, need not be read again.
    Raises OSError.
    """
    rows: list[tuple[str | int, ...]] = []
    for path, info in walk_stats(root):
        file, stat_row = root / path, stat_of(info)
        if stat.S_ISLNK(info.st_mode):
            content = os.readlink(file)
        else:
            content = read[stat_row] = file_digest(file).hex()
        rows.append((path, *stat_row[:3], content))
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()


def _stamp(store: Store, package: CondaPackage) -> str | None:
    """Return the digest that the unpacked `package` had, None if it was never unpacked completely."""
    try:
        data = read_note(_note(store, package))
        store.note_use(folder(store, package), _note(store, package))
        return str(data["tree"]) if data["archive"] == package.sha256 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note(store: Store, package: CondaPackage) -> Path:
    return store.root / "conda" / "stamps" / f"{package.stem}.json"


def _mismatched(store: Store, paths: dict[CondaPackage, Path]) -> list[CondaPackage]:
    def digest(path: Path, _: object) -> str | None:
        with contextlib.suppress(OSError):
            return store.digests.of(path)
        return None

    digests = each(list(paths.values()), digest, _THREADS)
    return [package for package, now in zip(paths, digests, strict=True) if now != package.sha256]
