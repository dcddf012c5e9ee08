"""Image layers of conda packages: rattler links them in a folder of the store, from which the layers are read.

Differences from a conda environment: modes are 0644 and 0755, times are fixed, and bytecode in `__pycache__` is left
out, because it contains the times of the sources; so are files that another package replaces. The records in conda-meta
list the files in the image. Layers are ordered and grouped like layers of wheels; see docs/reference/layering.md.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from envbuild.base.atomic import writing
from envbuild.base.errors import BuildError
from envbuild.base.progress import log
from envbuild.build import conda_cache
from envbuild.build.conda_cache import Locate
from envbuild.build.conda_install import Prefix, install_packages
from envbuild.cache.hashed import read_note, write_note
from envbuild.contract.conda_meta import META
from envbuild.image.entry import DIR, FILE, SYMLINK, Entry, Readable, Tree
from envbuild.image.layer import with_parents
from envbuild.layers.bytecode import Compiler, with_bytecode
from envbuild.layers.compose import groups, title_of
from envbuild.layers.contents import HashedContent
from envbuild.layers.layer_cache import LayerRequest
from envbuild.layers.wheel import Scheme
from envbuild.lock.conda import CondaPackage
from envbuild.store.entry import CacheEntry, key_of, shared
from envbuild.store.store import Store

_ACTIVATION = re.compile(r"etc/conda/activate\.d/.*", re.DOTALL)
# The bytecode of a module, which the compiler of the image provides instead, and what rattler keeps of replaced files.
_LEFT_OUT = re.compile(r"__clobbers__/.*|(?:.*/)?__pycache__/[^/]+\.pyc", re.DOTALL)
_ROW = (
    "_path",
    "path_type",
    "sha256",
    "sha256_in_prefix",
    "size_in_bytes",
    "file_mode",
    "prefix_placeholder",
    "no_link",
)


@dataclass(frozen=True, slots=True)
class LinkedPackage:
    """A conda package in an image: the size of its archive in bytes, its record in conda-meta, and its paths."""

    package: CondaPackage
    size: int
    record: str
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.package.name


@dataclass(frozen=True, slots=True)
class LinkedPackages:
    """The conda packages of an image; `root` links them if needed, and returns their folder."""

    packages: tuple[LinkedPackage, ...]
    root: Callable[[], Path]
    store: Store


def link_packages(
    packages: Sequence[CondaPackage], scheme: Scheme, store: Store, locate: Locate, stack: ExitStack
) -> LinkedPackages:
    """Return `packages` for an image; `locate` finds their archives. Their folder exists until `stack` is closed.

    The store keeps the records and paths, so that packages with cached layers are not linked again. Raises BuildError
    for packages that are damaged or cannot be installed at the prefix of `scheme`.
    """

    @cache
    def root() -> Path:
        folder = stack.enter_context(store.working("conda", "linked"))
        install_packages(packages, Prefix(folder, f"/{scheme.prefix}"), store, locate, lambda: None)
        return folder

    inputs = [[p.stem, p.sha256, p.subdir, p.url, p.md5, p.depends] for p in packages]
    entry = CacheEntry("conda", key_of("conda-image", [scheme.prefix, inputs]))
    note = store.folder("conda", "images") / f"{entry.key}.json"

    def known() -> list[LinkedPackage] | None:
        try:
            rows = read_note(note)
            return [
                LinkedPackage(p, size, record, tuple(paths)) for p in packages for size, record, paths in [rows[p.stem]]
            ]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def link() -> list[LinkedPackage]:
        with writing(store.root):
            made = [_read(root(), package, scheme, store) for package in packages]
            write_note(note, {p.package.stem: [p.size, p.record, p.paths] for p in made})
        return made

    linked = shared(entry, store.remote, known, link)
    store.note_use(note, note)
    activated = [package.name for package in linked if any(map(_ACTIVATION.fullmatch, package.paths))]
    if activated:
        names = ", ".join(activated)
        log(f"  not activated in the image: variables that conda's scripts of {names} set; see [image] env")
    return LinkedPackages(tuple(linked), root, store)


def conda_parts(
    linked: LinkedPackages, scheme: Scheme, compiler: Compiler | None, mtime: int, alone: int
) -> list[LayerRequest]:
    """Return the layers of `linked`: each of the `alone` largest packages in its own, the others in the last one."""
    return [_part(group, linked, scheme, compiler, mtime) for group in groups(linked.packages, alone)]


def _part(
    group: Sequence[LinkedPackage], linked: LinkedPackages, scheme: Scheme, compiler: Compiler | None, mtime: int
) -> LayerRequest:
    # A record names the package's archive and the digest of each file.
    key: list[object] = [scheme.prefix, scheme.python, compiler and compiler.identity, mtime]
    key += [[package.name, package.record] for package in group]

    def tree() -> Tree:
        def files() -> Tree:
            for package in group:
                yield from _package_tree(linked.root(), package, scheme, mtime, linked.store)

        # The standard library and site-packages.
        modules = [f"{scheme.prefix}/lib/python{scheme.python}"]
        return with_parents(with_bytecode(files(), compiler, modules, mtime), mtime)

    return LayerRequest(
        title_of([(package.name, package.package.version) for package in group]), key_of("conda", key), tree
    )


def _package_tree(root: Path, linked: LinkedPackage, scheme: Scheme, mtime: int, store: Store) -> Tree:
    """Yield the files of a package and its record. Raises BuildError for a file that its record does not describe."""
    record = _record(root, linked.package, store)
    for row in record["paths_data"]["paths"]:
        path, place = root / row["_path"], f"{scheme.prefix}/{row['_path']}"
        info = path.lstat()
        if stat.S_ISDIR(info.st_mode):
            yield Entry(place, DIR, 0o755, mtime=mtime), None
        elif stat.S_ISLNK(info.st_mode):
            yield Entry(place, SYMLINK, 0o777, 0, os.readlink(path), mtime=mtime), None
        else:
            mode = 0o755 if info.st_mode & 0o111 else 0o644
            expected = row.get("sha256_in_prefix") or row.get("sha256", "")
            with path.open("rb") as stream:
                content = _Checked(stream, info.st_size, expected, f"{linked.package.stem}: {row['_path']}")
                yield Entry(place, FILE, mode, info.st_size, mtime=mtime), content
    data = _render(record)
    if hashlib.sha256(data).hexdigest() != linked.record:
        raise BuildError(
            f"{linked.package.stem}: rattler linked different files than in an earlier build",
            f"remove {store.root / 'conda' / 'images'}, and run it again",
        )
    place = f"{scheme.prefix}/{META}/{linked.package.stem}.json"
    yield Entry(place, FILE, 0o644, len(data), mtime=mtime), io.BytesIO(data)


class _Checked(HashedContent):
    """A stream of `whole` bytes that is hashed; at its end, the digest must be `expected` (hexadecimal, "" for any)."""

    def __init__(self, content: Readable, whole: int, expected: str, where: str) -> None:
        super().__init__(content)
        self._whole, self._wanted, self._where = whole, expected, where

    def read(self, size: int = -1, /) -> bytes:
        data = super().read(size)
        if self._wanted and self.size >= self._whole and self._sha256.hexdigest() != self._wanted:
            raise BuildError(f"{self._where}: not the file that info/paths.json lists")
        return data


def _read(root: Path, package: CondaPackage, scheme: Scheme, store: Store) -> LinkedPackage:
    record = _record(root, package, store)
    place = record.get("python_site_packages_path")
    if package.name == "python" and place not in (None, f"lib/python{scheme.python}/site-packages"):
        raise BuildError(
            f"{package.file_name}: this Python keeps its packages in {place}: images do not support "
            "free-threaded Pythons",
            "ask for another build of python in [conda] dependencies",
        )
    digest = hashlib.sha256(_render(record)).hexdigest()
    return LinkedPackage(package, record["size"], digest, tuple(record["files"]))


def _record(root: Path, package: CondaPackage, store: Store) -> dict[str, Any]:
    """Return the package's record in conda-meta for an image; it contains no information about this host.

    The fields come from the package's own metadata, so that they do not change with rattler's version.
    """
    linked = json.loads((root / META / f"{package.stem}.json").read_bytes())
    rows = [
        {key: row[key] for key in _ROW if row.get(key) is not None}
        for row in linked["paths_data"]["paths"]
        if not _LEFT_OUT.fullmatch(row["_path"])
    ]
    rows.sort(key=lambda row: row["_path"].split("/"))
    index, size = conda_cache.stored_index(store, package)
    depends = {"depends": list(package.depends)} if package.depends else {}
    return (
        index
        | depends
        | {
            "name": package.name,
            "version": package.version,
            "build": package.build,
            "subdir": package.subdir,
            "channel": package.channel,
            "url": package.url,
            "fn": package.file_name,
            "md5": package.md5,
            "sha256": package.sha256,
            "size": size,
            "requested_specs": [],
            "files": [row["_path"] for row in rows],
            "paths_data": {"paths_version": 1, "paths": rows},
            "link": {"source": "", "type": 1},
        }
    )


def _render(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=2, sort_keys=True).encode() + b"\n"
