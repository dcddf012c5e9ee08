"""Locked conda packages on this host: their files and metadata.

Sources: conda's "Package specification" (info/index.json, paths.json, link.json; conda-build writes paths.json since
2017); conda-package-handling, "The .conda format": a zip with the stored members metadata.json,
pkg-NAME.tar.zst and info-NAME.tar.zst. The older .tar.bz2 is a single tar.
"""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from envbuild.base.errors import BuildError
from envbuild.environment import Environment
from envbuild.image.entry import Readable
from envbuild.image.layer import decompressed
from envbuild.image.model import json_object
from envbuild.image.tar import Member, tar_items
from envbuild.layers.contents import Guarded, reading
from envbuild.lock.conda import CondaPackage

# These files are read as a whole; torch's paths.json has 4 MiB.
_MAX_INFO = 16 << 20
_METADATA = ("index.json", "paths.json", "link.json")
_POINT = re.compile(
    r"\s*([^\s./\\=](?:[^/\\=\x00-\x1f]*[^\s/\\=\x00-\x1f])?)\s*=\s*([\w.]+)\s*:\s*([\w.]+)\s*(?:\[.*\]\s*)?"
)


@dataclass(frozen=True, slots=True)
class PackagePath:
    """Path that a package installs, and the placeholder in its file that the prefix replaces.

    `placeholder` is "" if nothing is replaced; `mode` of the replacement is "text" or "binary".
    """

    path: str
    placeholder: str = ""
    mode: str = "text"


@dataclass(frozen=True, slots=True)
class Info:
    """Metadata of a package: its index.json, and the paths that it installs."""

    index: dict[str, Any]
    paths: tuple[PackagePath, ...]


def locate_conda(
    packages: Sequence[CondaPackage], environment: Environment, *, offline: bool
) -> list[tuple[CondaPackage, Path]]:
    """Return the files of `packages`, in order. Raises BuildError for unavailable packages."""
    from envbuild.store.fetch import CondaArchive, fetch_archives

    archives = [CondaArchive(package.url, package.sha256) for package in packages]
    paths = fetch_archives(archives, environment, offline=offline)
    return [(package, paths[archive]) for package, archive in zip(packages, archives, strict=True)]


def read_info(package: Path) -> Info:
    """Return the metadata of `package` without reading its files. Raises BuildError for a damaged package.

    Paths that lead outside of the prefix are refused, because installers do not check all of them.
    """
    documents: dict[str, bytes] = {}
    with contextlib.closing(_members(package)) as items:
        for member, content in items:
            folder, _, rest = member.name.partition("/")
            if folder != "info":
                # In a .tar.bz2, info/ comes first, or (from old builders) last.
                if "index.json" in documents and "paths.json" in documents:
                    break
            elif rest in _METADATA and content is not None:
                if member.size > _MAX_INFO:
                    raise BuildError(f"{package.name}: {member.name} has {member.size} bytes")
                documents[rest] = content.read(member.size)
    return _info(documents, package.name)


def _clean(name: str, package: str) -> str:
    """Return a path in an archive without "./" before and "/" after it. Raises BuildError if it leads outside."""
    path = name.removeprefix("./").rstrip("/")
    if name.startswith("/") or "\0" in name or {"", ".", ".."} & set(path.split("/")):
        if name.rstrip("/") in (".", ""):
            return ""
        raise BuildError(f"{package}: {name!r} is not a path inside of a package")
    return path


def _members(package: Path) -> Generator[tuple[Member, Readable | None], None, None]:
    """Yield the members of a .conda's metadata archive; for a .tar.bz2, yield all members."""
    name, kind = package.name, "conda package"
    with reading(name, kind), contextlib.ExitStack() as stack:
        if name.endswith(".tar.bz2"):
            import bz2

            stream = cast(BinaryIO, Guarded(stack.enter_context(bz2.open(package)), name, kind))
        else:
            archive = stack.enter_context(zipfile.ZipFile(package))
            inner = stack.enter_context(archive.open(_part(archive, name)))
            stream = decompressed(cast(BinaryIO, Guarded(inner, name, kind)), f"{name}: info")
        for member, content in tar_items(stream, name):
            member.name = _clean(member.name, name)
            if member.name:
                yield member, content


def _part(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    version = {}
    if (info := archive.NameToInfo.get("metadata.json")) is not None:
        if info.file_size > _MAX_INFO:
            raise ValueError("metadata.json is too large")
        version = json.loads(archive.read(info))
    number = version.get("conda_pkg_format_version") if isinstance(version, dict) else None
    if number != 2:
        raise BuildError(f"{name}: a conda package of format {number!r}, only 2 is known")
    parts = [info for info in archive.infolist() if re.fullmatch(r"info-[^/]+\.tar\.zst", info.filename)]
    if len(parts) != 1:
        raise BuildError(f"{name}: a conda package has one info-*.tar.zst, this has {len(parts)}")
    return parts[0]


def _info(documents: dict[str, bytes], package: str) -> Info:
    index = _json(documents, "index.json", package)
    rows = _json(documents, "paths.json", package).get("paths")
    if not isinstance(rows, list):
        raise BuildError(f"{package}: info/paths.json has no list of paths")
    link = _json(documents, "link.json", package) if "link.json" in documents else {}
    noarch = link.get("noarch")
    points = (noarch.get("entry_points") if isinstance(noarch, dict) else None) or []
    for point in points if isinstance(points, list) else [points]:
        if not isinstance(point, str) or not _POINT.fullmatch(point):
            raise BuildError(f"{package}: info/link.json: entry point {point!r}")
    return Info(index, tuple(_listed(row, package) for row in rows))


def _json(documents: dict[str, bytes], name: str, package: str) -> dict[str, Any]:
    if name not in documents:
        raise BuildError(
            f"{package}: it has no info/{name}", "take a build of this package that conda-build made in 2017 or later"
        )
    return json_object(documents[name], f"{package}: info/{name}")


def _listed(row: Any, package: str) -> PackagePath:
    path = row.get("_path") if isinstance(row, dict) else None
    if not isinstance(path, str) or not path or _clean(path, package) != path:
        raise BuildError(f"{package}: info/paths.json: {path!r} is not a path inside of a package")
    placeholder, mode = row.get("prefix_placeholder") or "", row.get("file_mode") or "text"
    if not isinstance(placeholder, str) or mode not in ("text", "binary"):
        raise BuildError(f"{package}: info/paths.json: {path}: unknown file_mode {mode!r}")
    return PackagePath(path, placeholder, mode)
