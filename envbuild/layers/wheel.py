"""A wheel as a tree: every file where an installer puts it, streamed from the archive.

Sources: PyPA "Binary distribution format" (spread, .data directories, #!python) and "Recording installed
projects" (RECORD, INSTALLER). PyPI's `installer` is the oracle in the tests.
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.errors import BuildError
from envbuild.image.entry import FILE, Entry, Readable, Tree

_ENTRY_POINT = re.compile(r"([\w.]+)\s*(?::\s*([\w.]+))?\s*(?:\[.*\])?$")
_SCRIPT = """#!{python}
import sys
from {module} import {first}
if __name__ == "__main__":
    sys.exit({function}())
"""
_INSTALLER = b"envbuild\n"
# Metadata is read whole; no real one comes near.
_MAX_METADATA = 64 << 20


@dataclass(frozen=True, slots=True)
class Scheme:
    """Where a wheel's parts go. Paths are relative to the root; `python` is "3.11"."""

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
        """The shebang's path."""
        return f"/{self.prefix}/bin/python"

    def folder(self, part: str, name: str) -> str | None:
        """The folder for a part of a .data directory; None for a part that does not exist."""
        return {
            "purelib": self.site_packages,
            "platlib": self.site_packages,
            "scripts": self.scripts,
            "data": self.prefix,
            "headers": f"{self.prefix}/include/site/python{self.python}/{name}",
        }.get(part)


def wheel_tree(wheel: Path, scheme: Scheme, mtime: int) -> Tree:
    """The files of `wheel` under `scheme`, in the order of their paths, then its RECORD.

    Raises BuildError for a file that is no wheel, or that would write outside of its folders.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield from _Wheel(archive, wheel.name, scheme, mtime).tree()
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise BuildError(f"{wheel.name}: not a wheel, or damaged: {error}") from error


def wheel_paths(wheel: Path, scheme: Scheme) -> list[str]:
    """The paths of the files that `wheel_tree` gives, from the archive's directory alone."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return [path for path, _, _ in _Wheel(archive, wheel.name, scheme, 0).members()]
    except zipfile.BadZipFile as error:
        raise BuildError(f"{wheel.name}: not a wheel, or damaged: {error}") from error


def wheel_record(wheel: Path, scheme: Scheme) -> bytes:
    """The RECORD that `wheel_tree` gives, for a wheel that is small."""
    content = b""
    for entry, stream in wheel_tree(wheel, scheme, 0):
        if stream is not None:
            content = stream.read(entry.size)
    return content  # RECORD comes last


class _Wheel:
    """One open wheel on its way into a tree."""

    def __init__(self, archive: zipfile.ZipFile, name: str, scheme: Scheme, mtime: int) -> None:
        self._archive, self._file, self._scheme, self._mtime = archive, name, scheme, mtime
        folders = {i.partition("/")[0] for i in archive.namelist() if ".dist-info/" in i}
        infos = sorted(f for f in folders if f.endswith(".dist-info"))
        if len(infos) != 1:
            raise BuildError(f"{name}: a wheel has one .dist-info folder, this has {len(infos)}")
        self._info = infos[0]
        self._stem = self._info.removesuffix(".dist-info")
        self._name = self._stem.partition("-")[0]
        # path installed → RECORD row of a file whose content is ours
        self._rows: dict[str, tuple[str, str]] = {}

    def members(self) -> list[tuple[str, zipfile.ZipInfo, bool]]:
        """(path, member, is a script) of every file that is copied, in the order of paths."""
        found: dict[str, tuple[str, zipfile.ZipInfo, bool]] = {}
        for info in self._archive.infolist():
            if info.is_dir() or info.filename == f"{self._info}/RECORD":
                continue
            if info.filename in (f"{self._info}/RECORD.jws", f"{self._info}/RECORD.p7s"):
                continue  # signatures of a RECORD that is not installed (PyPA, "Signed wheel files")
            path, script = self._place(info.filename)
            found[path] = (path, info, script)
        return [found[path] for path in sorted(found)]

    def tree(self) -> Tree:
        record = self._record()
        members = self.members()
        names = {path for path, _, _ in members}
        for path, info, script in members:
            if script and (start := self._script_start(info)) is not None:
                yield self._whole(path, start, 0o755)
                continue
            mode = 0o755 if script or (info.external_attr >> 16) & 0o111 else 0o644
            with self._archive.open(info) as stream:
                yield Entry(path, FILE, mode, info.file_size, mtime=self._mtime), stream
        for path, data in self._entry_points():
            if path not in names:
                names.add(path)
                yield self._whole(path, data, 0o755)
        info_folder = f"{self._scheme.site_packages}/{self._info}"
        yield self._whole(f"{info_folder}/INSTALLER", _INSTALLER, 0o644)
        rows = self._installed_rows(record, names | {f"{info_folder}/INSTALLER"})
        yield self._whole(f"{info_folder}/RECORD", rows, 0o644)

    def _place(self, name: str) -> tuple[str, bool]:
        parts = name.split("/")
        if name.startswith("/") or "\\" in name or "\0" in name or {"", ".", ".."} & set(parts):
            raise BuildError(f"{self._file}: {name!r} is not a path inside of a wheel")
        if parts[0] != f"{self._stem}.data":
            if parts[0].endswith(".data") and len(parts) > 2 and self._is_data(parts[0]):
                raise BuildError(f"{self._file}: {parts[0]} is another distribution's data")
            return f"{self._scheme.site_packages}/{name}", False
        folder = self._scheme.folder(parts[1], self._name) if len(parts) > 2 else None
        if folder is None:
            raise BuildError(f"{self._file}: {name!r}: no such part of an installation")
        return "/".join([folder, *parts[2:]]), parts[1] == "scripts"

    def _is_data(self, folder: str) -> bool:
        return folder.partition("-")[0] == self._name

    def _script_start(self, info: zipfile.ZipInfo) -> bytes | None:
        """The script with `#!python` replaced, None when it has none (binaries can be large: streamed)."""
        with self._archive.open(info) as stream:
            if stream.read(8) != b"#!python":
                return None
            # The rest of the line, `w` or options, goes: installers do so.
            _, _, rest = stream.read(_MAX_METADATA).partition(b"\n")
        return f"#!{self._scheme.interpreter}\n".encode() + rest

    def _entry_points(self) -> Iterator[tuple[str, bytes]]:
        """Console and GUI scripts (PyPA, "Entry points specification")."""
        text = self._text("entry_points.txt")
        if text is None:
            return
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        try:
            parser.read_string(text)
        except configparser.Error as error:
            raise BuildError(f"{self._file}: entry_points.txt: {error}") from None
        for section in ("console_scripts", "gui_scripts"):
            for name, value in parser.items(section) if parser.has_section(section) else ():
                match = _ENTRY_POINT.match(value.strip())
                if not match or not match[2] or not re.fullmatch(r"[^/\\\0\s]+", name):
                    raise BuildError(f"{self._file}: entry point {name!r} = {value!r}")
                script = _SCRIPT.format(
                    python=self._scheme.interpreter,
                    module=match[1],
                    first=match[2].partition(".")[0],
                    function=match[2],
                )
                yield f"{self._scheme.scripts}/{name}", script.encode()

    def _record(self) -> dict[str, tuple[str, str]]:
        """The wheel's own RECORD: name in the archive → (hash, size)."""
        text = self._text("RECORD")
        if text is None:
            raise BuildError(f"{self._file}: no RECORD in {self._info}")
        rows = csv.reader(io.StringIO(text, newline=""))
        return {row[0]: (row[1], row[2] if len(row) > 2 else "") for row in rows if len(row) > 1}

    def _installed_rows(self, record: dict[str, tuple[str, str]], names: set[str]) -> bytes:
        """The RECORD of what is installed: paths relative to site-packages, sorted."""
        where = {}
        for info in self._archive.infolist():
            if not info.is_dir() and not info.filename.startswith(f"{self._info}/RECORD"):
                where[self._place(info.filename)[0]] = info.filename
        rows = []
        for path in names:
            row = self._rows.get(path) or record.get(where.get(path, ""), ("", ""))
            rows.append((self._relative(path), *row))
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
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self._rows[path] = (f"sha256={digest}", str(len(data)))
        return Entry(path, FILE, mode, len(data), mtime=self._mtime), io.BytesIO(data)

    def _text(self, name: str) -> str | None:
        try:
            info = self._archive.getinfo(f"{self._info}/{name}")
        except KeyError:
            return None
        if info.file_size > _MAX_METADATA:
            raise BuildError(f"{self._file}: {name} has {info.file_size} bytes")
        try:
            return self._archive.read(info).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BuildError(f"{self._file}: {name} is not UTF-8: {error}") from None
