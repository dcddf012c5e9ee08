"""Conda packages written file by file, in both formats, the same bytes each time.

Sources: conda-build's documentation "Package metadata" (info/index.json, paths.json, link.json), conda enhancement
proposal 17 (python_site_packages_path), conda-package-handling's description of `.conda`: a zip of stored members,
metadata.json, pkg-*.tar.zst and info-*.tar.zst.
"""

from __future__ import annotations

import bz2
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import zstandard

# What stands for the prefix in files until they are installed: 255 characters, as conda-build makes it, so that a
# prefix of any length in use fits where the place is fixed, in a program's strings.
PLACEHOLDER = ("/opt/lab_h_env" + "_placehold" * 25)[:255]
PLATFORMS = {"linux-64": "x86_64", "linux-aarch64": "aarch64"}
# subdir → its part of build strings: a cache is keyed by name, version and build, and must hold both
MARK = {"linux-64": "lab64", "linux-aarch64": "labarm"}
# 2025-06-15T15:06:40Z
TIMESTAMP_MS = 1_750_000_000_000
_LEVEL = 1
# As many as write the same bytes whatever this machine has; not fewer, since none differs from one.
_THREADS = 2
_CHUNK = 1 << 20
_ZIP_DATE = (2025, 6, 15, 15, 6, 40)


@dataclass(frozen=True)
class Metadata:
    """What info/index.json and about.json say. `noarch` is "python" or "generic", with subdir noarch."""

    name: str
    version: str
    build: str
    subdir: str
    depends: Sequence[str] = ()
    constrains: Sequence[str] = ()
    number: int = 0
    noarch: str | None = None
    license: str = "LicenseRef-Lab"
    summary: str = "a package of the lab"
    timestamp_ms: int = TIMESTAMP_MS
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """NAME-VERSION-BUILD."""
        return f"{self.name}-{self.version}-{self.build}"

    def files(self, entry_points: Sequence[str]) -> dict[str, Any]:
        """The JSON files of info/, by name; paths.json is not among them."""
        index: dict[str, Any] = {
            "arch": PLATFORMS.get(self.subdir),
            "build": self.build,
            "build_number": self.number,
            "constrains": list(self.constrains),
            "depends": list(self.depends),
            "license": self.license,
            "name": self.name,
            "platform": "linux" if self.subdir in PLATFORMS else None,
            "subdir": self.subdir,
            "timestamp": self.timestamp_ms,
            "version": self.version,
            **self.more,
        }
        about = {"license": self.license, "summary": self.summary, "channels": []}
        if self.noarch is None:
            return {"index": index, "about": about}
        link: dict[str, Any] = {"package_metadata_version": 1, "noarch": {"type": self.noarch}}
        if self.noarch == "python":
            link["noarch"]["entry_points"] = list(entry_points)
        return {"index": {**index, "noarch": self.noarch}, "about": about, "link": link}


class Package:
    """A package that is being written. Paths are relative to the prefix.

    `entry_points` of a noarch Python package are lines "name = module:function"; an installer makes scripts of them.
    """

    def __init__(self, metadata: Metadata, content: tarfile.TarFile) -> None:
        self.metadata = metadata
        self.entry_points: list[str] = []
        self._content = content
        self._paths: dict[str, dict[str, Any]] = {}

    def file(
        self,
        path: str,
        content: bytes | IO[bytes],
        *,
        size: int = -1,
        executable: bool = False,
        prefix: Literal["text", "binary"] | None = None,
    ) -> str:
        """Add a file; a stream needs its `size` in bytes. `prefix`: how the placeholder in it is replaced.

        Returns its sha256, hexadecimal.
        """
        if isinstance(content, bytes):
            size, content = len(content), io.BytesIO(content)
        reader = _Hashed(content)
        item = self._item(path, 0o775 if executable else 0o664)
        item.size = size
        self._content.addfile(item, reader)
        row: dict[str, Any] = {
            "_path": path,
            "path_type": "hardlink",
            "sha256": reader.sha256.hexdigest(),
            "size_in_bytes": size,
        }
        if prefix:
            row |= {"file_mode": prefix, "prefix_placeholder": PLACEHOLDER}
        self._paths[path] = row
        return str(row["sha256"])

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link to a file that was added before; `target` is relative to the link's folder."""
        item = self._item(path, 0o777)
        item.type, item.linkname = tarfile.SYMTYPE, target
        self._content.addfile(item)
        parts: list[str] = path.split("/")[:-1]
        for part in target.split("/"):
            parts = parts[:-1] if part == ".." else [*parts, part]
        # As conda-build writes it, a link has its target's digest and size.
        self._paths[path] = {**self._paths["/".join(parts)], "_path": path, "path_type": "softlink"}
        for key in ("file_mode", "prefix_placeholder"):
            self._paths[path].pop(key, None)

    def write_info(self, info: tarfile.TarFile) -> None:
        """Write what describes the package into `info`."""
        paths = [self._paths[path] for path in sorted(self._paths)]
        named = {**self.metadata.files(self.entry_points), "paths": {"paths": paths, "paths_version": 1}}
        files = {f"info/{name}.json": json.dumps(data, indent=2, sort_keys=True) for name, data in named.items()}
        files["info/files"] = "".join(f"{row['_path']}\n" for row in paths)
        replaced = [row for row in paths if "file_mode" in row]
        if replaced:  # what conda read before there was paths.json
            files["info/has_prefix"] = "".join(
                f"{row['prefix_placeholder']} {row['file_mode']} {row['_path']}\n" for row in replaced
            )
        for name, text in files.items():
            data = text.encode()
            item = self._item(name, 0o664)
            item.size = len(data)
            info.addfile(item, io.BytesIO(data))

    def _item(self, path: str, mode: int) -> tarfile.TarInfo:
        assert path not in self._paths, f"{self.metadata.stem}: {path} twice"
        item = tarfile.TarInfo(path)
        item.mode, item.mtime = mode, self.metadata.timestamp_ms // 1000
        return item


@contextmanager
def conda_package(channel: Path, metadata: Metadata) -> Iterator[Package]:
    """Write the package `channel`/SUBDIR/NAME-VERSION-BUILD.conda; its files are added in the context."""
    stem = metadata.stem
    place = channel / metadata.subdir / f"{stem}.conda"
    place.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place, "w") as archive:
        version = zipfile.ZipInfo("metadata.json", _ZIP_DATE)
        archive.writestr(version, '{"conda_pkg_format_version": 2}')
        with _zstd_tar(archive, f"pkg-{stem}.tar.zst") as content:
            package = Package(metadata, content)
            yield package
        with _zstd_tar(archive, f"info-{stem}.tar.zst") as info:
            package.write_info(info)


@contextmanager
def bz2_package(channel: Path, metadata: Metadata) -> Iterator[Package]:
    """The same in the older format, one .tar.bz2."""
    place = channel / metadata.subdir / f"{metadata.stem}.tar.bz2"
    place.parent.mkdir(parents=True, exist_ok=True)
    with bz2.open(place, "wb") as out, tarfile.open(fileobj=out, mode="w|") as content:
        package = Package(metadata, content)
        yield package
        package.write_info(content)


@contextmanager
def _zstd_tar(archive: zipfile.ZipFile, name: str) -> Iterator[tarfile.TarFile]:
    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=_THREADS)
    with ExitStack() as stack:
        member = stack.enter_context(archive.open(zipfile.ZipInfo(name, _ZIP_DATE), "w", force_zip64=True))
        stream = stack.enter_context(compressor.stream_writer(member, closefd=False))
        yield stack.enter_context(tarfile.open(fileobj=stream, mode="w|", bufsize=_CHUNK))


class _Hashed:
    """What a tar reads a file from; hashes it meanwhile."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.sha256.update(data)
        return data
