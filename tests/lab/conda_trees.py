"""Conda packages in image layers and as rattler installs them, in one form, so that they can be compared."""

from __future__ import annotations

import asyncio
import bz2
import hashlib
import io
import json
import os
import re
import stat
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard
from conda_package_streaming.package_streaming import stream_conda_info
from lab.conda_package import PLACEHOLDER

from envbuild.build.conda_layers import LinkedPackages, link_packages
from envbuild.image.entry import DIR, FILE, SYMLINK, Tree
from envbuild.layers.wheel import Scheme
from envbuild.lock.conda import CondaPackage
from envbuild.store.store import Store

CHANNEL = "https://conda.anaconda.org/conda-forge"
SCHEME = Scheme("opt/env", "3.11")
MTIME = 1577836800
Located = tuple[CondaPackage, Path]


@dataclass(frozen=True)
class Node:
    """A path: "file" with the sha256 of its content, "symlink" with its text, or "dir"."""

    kind: str
    mode: int = 0
    what: str = ""


def index_of(package: Path) -> dict[str, Any]:
    """info/index.json, as conda's own library reads it."""
    for tar, member in stream_conda_info(str(package)):
        if member.name == "info/index.json":
            source = tar.extractfile(member)
            assert source is not None
            found: dict[str, Any] = json.load(source)
            return found
    raise AssertionError(f"{package} has no index.json")


def located(package: Path) -> Located:
    """A package as a lock of conda-forge would name it."""
    index = index_of(package)
    return named(package, index["subdir"], index["depends"])


def named(package: Path, subdir: str = "linux-64", depends: Sequence[str] = ()) -> Located:
    """The same by its file's name alone, for a package that may be damaged."""
    stem = package.name.removesuffix(".conda").removesuffix(".tar.bz2")
    name, version, build = stem.rsplit("-", 2)
    data = package.read_bytes()
    locked = CondaPackage(
        name,
        version,
        build,
        subdir,
        f"{CHANNEL}/{subdir}/{package.name}",
        hashlib.md5(data).hexdigest(),
        hashlib.sha256(data).hexdigest(),
        tuple(depends),
    )
    return locked, package


@contextmanager
def linked(files: Sequence[Located], store: Store, scheme: Scheme = SCHEME) -> Iterator[LinkedPackages]:
    """The packages `files` as an image has them."""
    found = dict(files)
    with ExitStack() as stack:
        packages = [package for package, _ in files]
        yield link_packages(packages, scheme, store, lambda wanted: [(one, found[one]) for one in wanted], stack)


def nodes_of(tree: Tree) -> tuple[dict[str, Node], dict[str, bytes]]:
    """What `tree` holds below opt/env, and the contents of its records in conda-meta."""
    nodes: dict[str, Node] = {}
    records: dict[str, bytes] = {}
    for entry, content in tree:
        path = entry.path.removeprefix("opt/env/")
        assert path != entry.path or entry.kind == DIR, f"{path} is not below the prefix"
        assert path not in nodes, f"{path} twice"
        assert (entry.uid, entry.gid, entry.mtime) == (0, 0, MTIME)
        if entry.kind == FILE:
            assert content is not None
            data = b"".join(iter(lambda: content.read(65521), b""))  # noqa: B023
            assert len(data) == entry.size
            nodes[path] = Node("file", entry.mode, hashlib.sha256(data).hexdigest())
            if path.startswith("conda-meta/"):
                records[path] = data
        elif entry.kind == SYMLINK:
            nodes[path] = Node("symlink", 0, entry.target)
    return nodes, records


def install(files: Sequence[Located], prefix: Path, cache: Path, platform: str) -> None:
    """Have rattler install the packages into `prefix` for /opt/env."""
    import rattler

    async def run() -> None:
        records = []
        for _, path in files:
            record = await rattler.RepoDataRecord.from_package_archive(str(path))
            records.append(record)
        await rattler.install(
            records,
            str(prefix),
            cache_dir=cache,
            platform=rattler.Platform(platform),
            alternative_target_prefix="/opt/env",
        )

    asyncio.run(run())


def nodes_below(prefix: Path) -> dict[str, Node]:
    """The files and links of an installed environment, modes as envbuild normalises them.

    Left out is what the docs say images have otherwise: bytecode, records, files that lost their place.
    """
    nodes: dict[str, Node] = {}
    for folder, _, names in os.walk(prefix):
        for name in [*names, *(n for n in os.listdir(folder) if Path(folder, n).is_symlink())]:
            path = Path(folder, name)
            relative = path.relative_to(prefix).as_posix()
            if re.match(r"conda-meta/|__clobbers__/|CACHEDIR\.TAG$", relative) or re.search(
                r"(^|/)__pycache__/[^/]+\.pyc$", relative
            ):
                continue
            info = path.lstat()
            if stat.S_ISLNK(info.st_mode):
                nodes[relative] = Node("symlink", 0, os.readlink(path))
            else:
                mode = 0o755 if info.st_mode & 0o111 else 0o644
                nodes[relative] = Node("file", mode, hashlib.sha256(path.read_bytes()).hexdigest())
    return nodes


def record_rows(records: Iterable[bytes]) -> Mapping[str, Mapping[str, Any]]:
    """path → row of all records."""
    return {row["_path"]: row for data in records for row in json.loads(data)["paths_data"]["paths"]}


@dataclass(frozen=True)
class Item:
    """A member of a package that is made by hand: a file, or with `link` a symbolic or hard link."""

    path: str
    data: bytes = b""
    mode: int = 0o664
    link: str = ""
    kind: bytes = tarfile.REGTYPE
    prefix: str = ""  # text or binary

    def row(self) -> dict[str, Any]:
        """As paths.json lists it."""
        soft = self.kind == tarfile.SYMTYPE
        row: dict[str, Any] = {"_path": self.path, "path_type": "softlink" if soft else "hardlink"}
        if self.kind == tarfile.REGTYPE:
            row |= {"sha256": hashlib.sha256(self.data).hexdigest(), "size_in_bytes": len(self.data)}
        if self.prefix:
            row |= {"prefix_placeholder": PLACEHOLDER, "file_mode": self.prefix}
        return row


def package(
    folder: Path,
    items: Sequence[Item],
    *,
    name: str = "lab",
    suffix: str = ".conda",
    noarch: str = "",
    depends: Sequence[str] = (),
    entry_points: Sequence[str] = (),
    rows: Sequence[Mapping[str, Any]] | None = None,
    info: Mapping[str, bytes | None] | None = None,
    info_first: bool = True,
) -> Path:
    """Write NAME-1.0-0 with `items`. `rows` are those of paths.json, `info` goes over the files in info/ (None: left
    out), so that what they say can be wrong."""
    index = {
        "name": name,
        "version": "1.0" if name != "python" else "3.11.2",
        "build": "0",
        "build_number": 0,
        "depends": list(depends),
        "subdir": "noarch" if noarch else "linux-64",
        **({"noarch": noarch} if noarch else {}),
    }
    listed = [item.row() for item in items] if rows is None else list(rows)
    texts: dict[str, bytes | None] = {
        "index.json": json.dumps(index).encode(),
        "paths.json": json.dumps({"paths": listed, "paths_version": 1}).encode(),
    }
    if noarch:
        link = {"noarch": {"type": noarch, "entry_points": list(entry_points)}}
        texts["link.json"] = json.dumps({**link, "package_metadata_version": 1}).encode()
    texts |= info or {}
    about = [Item(f"info/{name}", data) for name, data in texts.items() if data is not None]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{index['version']}-0{suffix}"
    if suffix == ".tar.bz2":
        path.write_bytes(bz2.compress(_tar([*about, *items] if info_first else [*items, *about])))
        return path
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", '{"conda_pkg_format_version": 2}')
        for part, content in (("pkg", items), ("info", about)):
            data = zstandard.compress(_tar(content))
            archive.writestr(f"{part}-{path.name.removesuffix('.conda')}.tar.zst", data)
    return path


def _tar(items: Sequence[Item]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for item in items:
            info = tarfile.TarInfo(item.path)
            info.mode, info.type, info.linkname = item.mode, item.kind, item.link
            info.size = len(item.data)
            archive.addfile(info, io.BytesIO(item.data))
    return buffer.getvalue()
