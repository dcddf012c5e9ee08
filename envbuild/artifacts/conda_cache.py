"""Conda packages unpacked in the store, from which environments are linked.

conda/pkgs/NAME-VERSION-BUILD holds a package as conda's own cache does. Its files may be edited through a hard
link in an environment, or be lost with a full disk: therefore the sizes, times and modes that they had when they
were unpacked are noted in conda/stamps, compared for each environment, and a package that differs is unpacked again.
conda/info holds what each archive says of itself.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.errors import BuildError
from envbuild.file_lock import file_lock
from envbuild.layers.conda_package import Info, read_info
from envbuild.lock.conda import CondaPackage
from envbuild.progress import say
from envbuild.store.store import Store, remove_tree
from envbuild.workers import each

Located = Sequence[tuple[CondaPackage, Path]]
Locate = Callable[[Sequence[CondaPackage]], Located]
_SCRIPT = re.compile(r"bin/\.[^/]+-(pre-link|post-link|pre-unlink)\.sh")
_OURS = "envbuild"


@dataclass(frozen=True, slots=True)
class Facts:
    """What an archive says of itself.

    `index` is a file with its index.json, `size` the archive's in bytes. `room` is how many bytes a prefix may
    have that replaces the placeholder in `file`, None where it may have any number. `scripts` are the package's
    link scripts.
    """

    index: Path
    size: int
    room: int | None
    file: str
    scripts: tuple[str, ...]


def folder(store: Store, package: CondaPackage) -> Path:
    """Where `package` lies unpacked."""
    return store.root / "conda" / "pkgs" / package.stem


def facts(store: Store, package: CondaPackage) -> Facts | None:
    """What is known of `package`'s archive, None when it has not been read."""
    path = store.root / "conda" / "info" / f"{package.sha256}.json"
    try:
        ours = json.loads(path.read_bytes())[_OURS]
        return Facts(path, ours["size"], ours["room"], ours["file"], tuple(ours["scripts"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def known(store: Store, package: CondaPackage) -> Facts | None:
    """What is known of `package` when it lies unpacked, None when it does not. Whether it is whole, `damaged` tells."""
    there = _stamp(store, package) and folder(store, package).is_dir()
    return facts(store, package) if there else None


def read_facts(store: Store, package: CondaPackage, archive: Path) -> Facts:
    """Read what `archive` says of itself, and keep it. Raises BuildError when it is another package than locked."""
    info = read_info(archive)
    found = [str(info.index.get(key)) for key in ("name", "version", "build")]
    if found != [package.name, package.version, package.build]:
        raise BuildError(
            f"{archive.name}: it is {' '.join(found)}, locked is {package.stem}",
            "lock again: the lock was edited, or its channel has files under wrong names",
        )
    room, file = _room(info)
    scripts = sorted(path for path in info.paths if _SCRIPT.fullmatch(path))
    size = archive.stat().st_size
    ours = {"size": size, "room": room, "file": file, "scripts": scripts}
    path = store.folder("conda", "info") / f"{package.sha256}.json"
    _write(store, path, {**info.index, _OURS: ours})
    return Facts(path, size, room, file, tuple(scripts))


def damaged(store: Store, packages: Iterable[CondaPackage]) -> list[CondaPackage]:
    """Those of `packages` that are not as they were unpacked."""
    found = []
    for package in packages:
        try:
            if _stamp(store, package) != tree_digest(folder(store, package)):
                found.append(package)
        except OSError:
            found.append(package)
    return found


def stamp(store: Store, packages: Iterable[CondaPackage]) -> None:
    """Note how `packages`, just unpacked, are. Raises BuildError for a store that may not be written."""
    for package in packages:
        try:
            tree = tree_digest(folder(store, package))
        except OSError as error:
            raise store.unwritable(error) from error
        _write(store, _note(store, package), {"sha256": package.sha256, "tree": tree})


def forget(store: Store, packages: Iterable[CondaPackage]) -> None:
    """Remove unpacked packages; environments that are linked from them keep their files."""
    for package in packages:
        place = folder(store, package)
        try:
            _note(store, package).unlink(missing_ok=True)
        except OSError as error:
            raise store.unwritable(error) from error
        remove_tree(place)
        place.with_name(f"{place.name}.lock").unlink(missing_ok=True)


@contextlib.contextmanager
def held(store: Store) -> Iterator[None]:
    """Hold the unpacked packages; another process waits. What a killed one left half-done is removed.

    Raises BuildError for a store that may not be written.
    """
    pkgs = store.folder("conda", "pkgs")
    store.folder("conda", "stamps")
    told = f"another envbuild uses the conda packages in {store.root}; waiting for it …"
    with contextlib.ExitStack() as stack:
        try:  # where there are no locks, rattler's own is all there is
            stack.enter_context(file_lock(store.root / "conda" / "lock", lambda: say(told)))
        except OSError as error:
            raise store.unwritable(error) from error
        for left in pkgs.glob(".*"):
            if left.is_dir():
                remove_tree(left)
        yield


def archives(
    store: Store, packages: Sequence[CondaPackage], locate: Locate
) -> dict[CondaPackage, Path]:
    """The archives of `packages`, their digests looked at: they are about to be unpacked, and rattler does not.

    One that was damaged in the store is removed and looked for once more. Raises BuildError.
    """
    found = dict(locate(packages))
    bad = _mismatched(store, found)
    for package in bad:
        if not found[package].is_relative_to(store.root):
            raise BuildError(
                f"{found[package]}: its content changed after it was hashed",
                "run it again; a mirror's files must not be edited in place",
            )
        say(f"{found[package].name}: damaged in the store; looking for it again")
        found[package].unlink(missing_ok=True)
    if bad:
        again = dict(locate(bad))
        if bad := _mismatched(store, again):
            raise BuildError(
                f"{bad[0].file_name}: damaged again as soon as it was stored",
                f"check the disk that holds {store.root}",
            )
        found |= again
    return found


def tree_digest(root: Path) -> str:
    """sha256 of the names, modes, sizes and modification times of all files and links below `root`."""
    start = len(os.fspath(root)) + 1
    rows: list[tuple[str, int, int, int]] = []
    folders = [os.fspath(root)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    stat = entry.stat(follow_symlinks=False)
                    rows.append((entry.path[start:], stat.st_mode, stat.st_size, stat.st_mtime_ns))
    rows.sort()
    digest = hashlib.sha256(os.fsencode("\0".join([row[0] for row in rows])))
    digest.update(array.array("q", [number for row in rows for number in row[1:]]).tobytes())
    return digest.hexdigest()


def _stamp(store: Store, package: CondaPackage) -> str | None:
    """The digest that the unpacked `package` had, None when this package was never unpacked to its end."""
    try:
        data = json.loads(_note(store, package).read_bytes())
        return str(data["tree"]) if data["sha256"] == package.sha256 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note(store: Store, package: CondaPackage) -> Path:
    return store.root / "conda" / "stamps" / f"{package.stem}.json"


def _write(store: Store, path: Path, data: object) -> None:
    """Half of it, after a crash, is no JSON and counts as nothing."""
    try:
        path.write_text(json.dumps(data), encoding="utf-8")
    except OSError as error:
        raise store.unwritable(error) from error


def _room(info: Info) -> tuple[int | None, str]:
    """The length of the shortest placeholder in a binary file, which a prefix may not exceed, and that file."""
    found = [
        (len(row.placeholder.encode()), path)
        for path, row in info.paths.items()
        if row.placeholder and row.mode == "binary"
    ]
    return min(found, default=(None, ""))


def _mismatched(store: Store, found: dict[CondaPackage, Path]) -> list[CondaPackage]:
    def digest(path: Path, _: object) -> str | None:
        with contextlib.suppress(OSError):
            return store.file_digest(path)
        return None

    digests = each(list(found.values()), digest, 2)
    return [package for package, now in zip(found, digests, strict=True) if now != package.sha256]
