"""A wheel as a tree: every file at its installed path, streamed from the archive.

Sources: PyPA "Binary distribution format" (spread, .data directories, #!python) and "Recording installed projects"
(RECORD, INSTALLER). The tests compare with PyPI's `installer`.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from envbuild.errors import BuildError
from envbuild.image.entry import FILE, Entry, Readable, Tree
from envbuild.layers.entry_points import entry_point_scripts
from envbuild.layers.unzip import open_member
from envbuild.names import normalise

try:  # like zipfile itself: a Python may lack it
    from lzma import LZMAError
except ImportError:  # pragma: no cover
    LZMAError = zipfile.BadZipFile  # type: ignore[misc,assignment]

_INSTALLER = b"envbuild\n"
# Metadata is read as a whole; no real file comes near this size.
_MAX_METADATA = 64 << 20
_STEP = 1 << 18
_SHA256 = re.compile(r"sha256=[A-Za-z0-9_-]{43}")
# Line ends in a name would break RECORD; the other characters cannot be typed.
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
# The exceptions of zipfile for archives that are damaged, encrypted or of unknown methods.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, LZMAError, EOFError, RuntimeError, ValueError, struct.error, OSError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """The installation folders of a wheel's parts. Paths are relative to the root; `python` is "3.11"."""

    prefix: str
    python: str

    @property
    def site_packages(self) -> str:
        return f"{self.prefix}/lib/python{self.python}/site-packages"

    @property
    def scripts(self) -> str:
        return f"{self.prefix}/bin"

    @property
    def interpreter(self) -> str:
        """The path in shebang lines."""
        return f"/{self.prefix}/bin/python"

    def folder(self, part: str, name: str) -> str | None:
        """Return the folder for a part of a .data directory; None for an unknown part."""
        return {
            "purelib": self.site_packages,
            "platlib": self.site_packages,
            "scripts": self.scripts,
            "data": self.prefix,
            "headers": f"{self.prefix}/include/site/python{self.python}/{name}",
        }.get(part)


def wheel_tree(wheel: Path, scheme: Scheme, mtime: int) -> Tree:
    """Yield the files of `wheel` under `scheme`, sorted by path, then scripts, INSTALLER and RECORD.

    Raises BuildError, here or when content is read, for a file that is not a wheel, is damaged, or would write outside
    of its folders.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield from _Wheel(archive, wheel.name, scheme, mtime).tree()
    except _DAMAGE as error:
        raise _damaged(wheel.name, error) from error


def wheel_paths(wheel: Path, scheme: Scheme) -> list[str]:
    """Return the paths from `wheel_tree` that other wheels may also have; no content is read."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return _Wheel(archive, wheel.name, scheme, 0).paths()
    except _DAMAGE as error:
        raise _damaged(wheel.name, error) from error


def wheel_record(wheel: Path, scheme: Scheme) -> bytes:
    """Return the RECORD from `wheel_tree`; only the necessary content is read."""
    content = b""
    for entry, stream in wheel_tree(wheel, scheme, 0):
        if stream is not None and entry.path.endswith(".dist-info/RECORD"):
            content = stream.read(entry.size)
    return content  # it comes last


def _damaged(name: str, error: Exception) -> BuildError:
    if isinstance(error, OSError) and error.strerror:
        return BuildError(f"{name}: cannot be read: {error.strerror}")
    return BuildError(f"{name}: not a wheel, or damaged: {error or type(error).__name__}")


class _TreeContent:
    """The content of a file: `start`, then `stream`. Hashes it for a row of RECORD if `hashed`."""

    def __init__(self, stream: IO[bytes], wheel: str, start: bytes, hashed: bool) -> None:
        self._stream, self._wheel, self._start = stream, wheel, start
        self._size = 0
        self._hash = hashlib.sha256() if hashed else None

    def read(self, size: int = -1, /) -> bytes:
        count = len(self._start) if size < 0 else size
        data, self._start = self._start[:count], self._start[count:]
        if size < 0 or len(data) < size:
            try:
                data += self._stream.read(size if size < 0 else size - len(data))
            except _DAMAGE as error:
                raise _damaged(self._wheel, error) from error
        if self._hash is not None:
            self._hash.update(data)
            self._size += len(data)
        return data

    def row(self) -> tuple[str, str] | None:
        """Read the rest, and return (hash, size) of the whole content; None when it is not hashed."""
        if self._hash is None:
            return None
        while self.read(_STEP):
            pass
        return _row(self._hash.digest(), self._size)


class _Wheel:
    """The conversion of one open wheel to a tree."""

    def __init__(self, archive: zipfile.ZipFile, name: str, scheme: Scheme, mtime: int) -> None:
        self._archive, self._file, self._scheme, self._mtime = archive, name, scheme, mtime
        folders = {i.partition("/")[0] for i in archive.namelist() if ".dist-info/" in i}
        infos = sorted(f for f in folders if f.endswith(".dist-info"))
        if len(infos) != 1:
            raise BuildError(f"{name}: a wheel has one .dist-info folder, this has {len(infos)}")
        self._info = infos[0]
        self._name = self._info.removesuffix(".dist-info").rpartition("-")[0]
        self._folder = f"{scheme.site_packages}/{self._info}"
        # installed path → its row of RECORD
        self._rows: dict[str, tuple[str, str]] = {}

    def tree(self) -> Tree:
        self._check_version()
        record = self._record()
        members = self._members()
        for path, (info, script) in members.items():
            with open_member(self._archive, info) as stream:
                yield from self._copied(path, info, stream, script, record.get(info.filename))
        for path, data in self._entry_points():
            if path not in self._rows:
                yield self._whole(path, data, 0o755)
        yield self._whole(f"{self._folder}/INSTALLER", _INSTALLER, 0o644)
        yield self._whole(f"{self._folder}/RECORD", self._installed_record(), 0o644)

    def paths(self) -> list[str]:
        """Return the paths of `tree` that other wheels may have: all but INSTALLER and RECORD."""
        return [*self._members(), *(path for path, _ in self._entry_points())]

    def _members(self) -> dict[str, tuple[zipfile.ZipInfo, bool]]:
        """Return path → (member, is a script) of every file that is copied, sorted by path.

        For a duplicate path the last member is used, and .data takes precedence: the order in which installers write.
        """
        ours = (f"{self._info}/RECORD", f"{self._info}/INSTALLER")
        found: dict[str, tuple[bool, zipfile.ZipInfo, bool]] = {}
        for info in self._archive.infolist():
            if info.is_dir() or info.filename in ours:
                continue
            path, part = self._place(info.filename)
            if path not in found or found[path][0] <= bool(part):
                found[path] = bool(part), info, part == "scripts"
        return {path: found[path][1:] for path in sorted(found)}

    def _place(self, name: str) -> tuple[str, str]:
        """Return the installed path of a member, and its part of .data, "" for none."""
        parts = name.split("/")
        if _CONTROL.search(name) or {"", ".", ".."} & set(parts):
            raise BuildError(f"{self._file}: {name!r} is not a path inside of a wheel")
        if len(parts) == 1 or not self._is_data(parts[0]):
            return f"{self._scheme.site_packages}/{name}", ""
        folder = self._scheme.folder(parts[1], self._name) if len(parts) > 2 else None
        if folder is None:
            raise BuildError(f"{self._file}: {name!r}: no such part of an installation")
        return "/".join([folder, *parts[2:]]), parts[1]

    def _is_data(self, folder: str) -> bool:
        # Its name may be spelled like that of the wheel file, unlike that of .dist-info ("Foo.Bar" and "foo_bar").
        name = folder.removesuffix(".data").rpartition("-")[0]
        return folder.endswith(".data") and normalise(name) == normalise(self._name)

    def _copied(
        self, path: str, info: zipfile.ZipInfo, stream: IO[bytes], script: bool,
        recorded: tuple[str, str] | None,
    ) -> Tree:  # fmt: skip
        """Yield one member. Its row is that of the wheel's RECORD if valid, else computed while it is read."""
        start, size = self._script_start(info, stream) if script else (b"", info.file_size)
        if script or (recorded and recorded[1] != str(size)):
            recorded = None
        content = _TreeContent(stream, self._file, start, hashed=recorded is None)
        mode = info.external_attr >> 16
        # As in installers: a link, which would be a risk, becomes a plain file with its target as content.
        executable = script or (stat.S_ISREG(mode) and mode & 0o111)
        yield Entry(path, FILE, 0o755 if executable else 0o644, size, mtime=self._mtime), content
        self._rows[path] = content.row() or recorded or ("", "")

    def _script_start(self, info: zipfile.ZipInfo, stream: IO[bytes]) -> tuple[bytes, int]:
        """Return the replacement of a script's first line, if that is `#!python`, and the size of the result.

        The rest of that line, `w` or options, is dropped, as installers do.
        """
        head = stream.read(8)
        if head != b"#!python":
            return head, info.file_size
        dropped, line = len(head), head
        while not line.endswith(b"\n") and (line := stream.readline(_STEP)):
            dropped += len(line)
        start = f"#!{self._scheme.interpreter}\n".encode()
        return start, len(start) + info.file_size - dropped

    def _entry_points(self) -> Iterator[tuple[str, bytes]]:
        """Yield (path, content) of the scripts of entry points."""
        text = self._text("entry_points.txt") or ""
        for name, script in entry_point_scripts(text, self._scheme.interpreter, self._file):
            yield f"{self._scheme.scripts}/{name}", script

    def _check_version(self) -> None:
        """Raise BuildError for a wheel of a later format, as the specification requires."""
        text = self._text("WHEEL")
        version = re.search(r"^Wheel-Version:\s*(\S+)", text or "", re.MULTILINE | re.IGNORECASE)
        if version is None:
            raise BuildError(f"{self._file}: no Wheel-Version in {self._info}/WHEEL")
        if not re.match(r"1(\.|$)", version[1]):
            raise BuildError(f"{self._file}: a wheel of format {version[1]}, only 1 is known")

    def _record(self) -> dict[str, tuple[str, str]]:
        """Return the complete rows of the wheel's own RECORD: name in the archive → (hash, size)."""
        text = self._text("RECORD")
        if text is None:
            raise BuildError(f"{self._file}: no RECORD in {self._info}")
        try:
            rows = [row for row in csv.reader(io.StringIO(text, newline="")) if len(row) > 2]
        except csv.Error as error:
            raise BuildError(f"{self._file}: RECORD: {error}") from None
        return {row[0]: (row[1], row[2]) for row in rows if _SHA256.fullmatch(row[1])}

    def _installed_record(self) -> bytes:
        """Return the RECORD of the installed files: paths relative to site-packages, sorted."""
        rows = [(self._relative(path), *row) for path, row in self._rows.items()]
        rows.append((f"{self._info}/RECORD", "", ""))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(sorted(rows))
        return text.getvalue().encode()

    def _relative(self, path: str) -> str:
        base = self._scheme.site_packages + "/"
        if path.startswith(base):
            return path[len(base) :]
        return "../../../" + path[len(self._scheme.prefix) + 1 :]

    def _whole(self, path: str, data: bytes, mode: int) -> tuple[Entry, Readable]:
        self._rows[path] = _row(hashlib.sha256(data).digest(), len(data))
        return Entry(path, FILE, mode, len(data), mtime=self._mtime), io.BytesIO(data)

    def _text(self, name: str) -> str | None:
        try:
            info = self._archive.getinfo(f"{self._info}/{name}")
        except KeyError:
            return None
        if info.file_size > _MAX_METADATA:
            raise BuildError(f"{self._file}: {name} has {info.file_size} bytes")
        with self._archive.open(info) as stream:
            data = stream.read(info.file_size)  # no more, whatever size it unpacks to
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BuildError(f"{self._file}: {name} is not UTF-8: {error}") from None


def _row(digest: bytes, size: int) -> tuple[str, str]:
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}", str(size)
