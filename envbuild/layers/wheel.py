"""Conversion of a wheel to a tree: every file at its installed path, streamed from the archive; the trainer's wheel.

Sources: PyPA "Binary distribution format" (spread, .data directories, #!python), "Recording installed projects"
(RECORD, INSTALLER), "Entry points specification". The tests compare with PyPI's `installer`.
"""

from __future__ import annotations

import configparser
import csv
import hashlib
import io
import re
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import IO

from envbuild import __version__
from envbuild.base.errors import BuildError
from envbuild.base.files import shipped
from envbuild.base.packages import described, files_digest, pack
from envbuild.base.packages import record_row as record_row
from envbuild.base.text import normalise
from envbuild.image.entry import FILE, Entry, Readable, Tree
from envbuild.layers.contents import Guarded, HashedContent, Joined, open_member, reading

INSTALLER = b"envbuild\n"
# Files in a .dist-info that each installer writes, or lists (signatures), in its own way, relative to site-packages.
INSTALLER_NOTES = re.compile(r"[^/]*\.dist-info/(INSTALLER|REQUESTED|RECORD(\.jws|\.p7s)?|direct_url\.json)", re.DOTALL)
_VALUE = re.compile(r"([\w.]+)\s*:\s*([\w.]+)\s*(?:\[.*\]\s*)?")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f/\\]")
_SCRIPT = """#!{python}
import sys
from {module} import {first}
if __name__ == "__main__":
    sys.exit({function}())
"""
# The first lines of a script that runs the interpreter beside it, wherever the environment is, as uv writes it: sh
# executes the second line, and Python reads it as a string.
RELOCATABLE = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/'python' "$0" "$@"
' '''
"""
# Metadata is read as a whole; no real file comes near these sizes. A longer RECORD may have a row for each member of
# the archive: its name, quoted and in UTF-8, a hash and a size.
_MAX_METADATA, _MAX_RECORD, _MAX_ROW = 1 << 20, 16 << 20, 160
# The headers of METADATA come first; a description of any length may follow.
_MOST_REQUIRED = 4 << 20
_STEP = 1 << 18
_PYTHON = b"#!python"
_SHA256 = re.compile(r"sha256=[A-Za-z0-9_-]{43}")
# Line ends in a name would break RECORD; the other characters cannot be typed.
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")


@dataclass(frozen=True, slots=True)
class WheelFile:
    """Wheel: its distribution, its file, and the file's sha256 and size in bytes.

    `place` is the file, or a function that fetches it: a wheel with an existing layer is not fetched. `file_name` and
    `torch` are then taken from the recorded facts about the wheel, see layers/wheels.py.
    """

    name: str
    version: str
    place: Path | Callable[[], Path]
    sha256: str
    size: int
    file_name: str = ""
    torch: tuple[dict[str, str], list[str]] | None = None

    @property
    def path(self) -> Path:
        """The file, fetched if it is missing. Raises BuildError if no source has it."""
        return self.place if isinstance(self.place, Path) else self.place()


@dataclass(frozen=True, slots=True)
class Scheme:
    """Installation folders of a wheel's parts. Paths are relative to the root; `python` is "3.11".

    `conda`: the prefix contains its own Python, and headers are installed beside Python's headers, as by pip and uv.
    """

    prefix: str
    python: str
    conda: bool = False

    @property
    def site_packages(self) -> str:
        return f"{self.prefix}/lib/python{self.python}/site-packages"

    @property
    def scripts(self) -> str:
        return f"{self.prefix}/bin"

    @property
    def interpreter(self) -> str:
        """Path in shebang lines."""
        return f"/{self.prefix}/bin/python"

    def folder(self, part: str, name: str) -> str | None:
        """Return the folder for a part of a .data directory, None for an unknown part."""
        return {
            "purelib": self.site_packages,
            "platlib": self.site_packages,
            "scripts": self.scripts,
            "data": self.prefix,
            "headers": f"{self.prefix}/include/{'' if self.conda else 'site/'}python{self.python}/{name}",
        }.get(part)


def wheel_tree(wheel: Path, scheme: Scheme, mtime: int) -> Tree:
    """Yield the files of `wheel` under `scheme`, sorted by path, then scripts, INSTALLER and RECORD.

    Raises BuildError, here or when content is read, for a file that is not a wheel, is damaged, or would write outside
    of its folders.
    """
    with reading(wheel.name, "wheel"), zipfile.ZipFile(wheel) as archive:
        yield from _Wheel(archive, wheel.name, scheme, mtime).tree()


def wheel_paths(wheel: Path, scheme: Scheme) -> list[str]:
    """Return the paths from `wheel_tree` that other wheels may also have; no content is read."""
    with reading(wheel.name, "wheel"), zipfile.ZipFile(wheel) as archive:
        converted = _Wheel(archive, wheel.name, scheme, 0)
        return [*converted.members(), *(path for path, _ in converted.entry_points())]


def wheel_programs(wheel: Path, scheme: Scheme) -> dict[str, bool]:
    """Return path in RECORD → whether every installer writes the same bytes, for the programs of `wheel`.

    Installers write their interpreter's path into scripts of entry points, and into scripts that begin with `#!python`.
    """
    with reading(wheel.name, "wheel"), zipfile.ZipFile(wheel) as archive:
        opened = _Wheel(archive, wheel.name, scheme, 0)
        programs = {}
        for path, (info, script) in opened.members().items():
            if path.startswith(f"{scheme.scripts}/"):
                with open_member(archive, info) as stream:
                    programs[opened.relative(path)] = not script or stream.read(len(_PYTHON)) != _PYTHON
        return programs | {opened.relative(path): False for path, _ in opened.entry_points()}


def wheel_record(wheel: Path, scheme: Scheme) -> bytes:
    """Return the RECORD from `wheel_tree`; only the necessary content is read."""
    content = b""
    for entry, stream in wheel_tree(wheel, scheme, 0):
        if stream is not None and entry.path.endswith(".dist-info/RECORD"):
            content = stream.read(entry.size)
    return content  # it comes last


def required_by(archive: zipfile.ZipFile, info: str) -> list[str]:
    """Return the lines of Requires-Dist in the folder `info` of an open wheel. Raises KeyError without METADATA."""
    with archive.open(f"{info}/METADATA") as stream:
        text = stream.read(_MOST_REQUIRED).decode("utf-8", "replace")
    return [str(line) for line in HeaderParser().parsestr(text).get_all("Requires-Dist", [])]


def recorded_rows(archive: zipfile.ZipFile, name: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """Return the .dist-info folder of the open wheel file `name`, and the complete rows of its RECORD by path."""
    opened = _Wheel(archive, name, Scheme("", ""), 0)
    return opened.info, opened.record()


class _Wheel:
    """Conversion of one open wheel to a tree."""

    def __init__(self, archive: zipfile.ZipFile, name: str, scheme: Scheme, mtime: int) -> None:
        self._archive, self._file, self._scheme, self._mtime = archive, name, scheme, mtime
        folders = {i.partition("/")[0] for i in archive.namelist() if ".dist-info/" in i}
        infos = sorted(f for f in folders if f.endswith(".dist-info"))
        if len(infos) != 1:
            raise BuildError(f"{name}: a wheel has one .dist-info folder, this has {len(infos)}")
        self.info = infos[0]
        self._name = self.info.removesuffix(".dist-info").rpartition("-")[0]
        # installed path → its row of RECORD
        self._rows: dict[str, tuple[str, str]] = {}

    def tree(self) -> Tree:
        self._check_version()
        record = self.record()
        for path, (info, script) in self.members().items():
            with open_member(self._archive, info) as stream:
                yield from self._copied(path, info, stream, script, record.get(info.filename))
        for path, data in self.entry_points():
            if path not in self._rows:
                yield self._whole(path, data, 0o755)
        folder = f"{self._scheme.site_packages}/{self.info}"
        yield self._whole(f"{folder}/INSTALLER", INSTALLER, 0o644)
        rows = [(self.relative(path), *row) for path, row in self._rows.items()]
        yield self._whole(f"{folder}/RECORD", render_record(rows, self.info), 0o644)

    def members(self) -> dict[str, tuple[zipfile.ZipInfo, bool]]:
        """Return path → (member, is a script) of every file that is copied, sorted by path."""
        # Of duplicates, the last member is used, and .data takes precedence: the order in which installers write.
        ours = (f"{self.info}/RECORD", f"{self.info}/INSTALLER")
        members: dict[str, tuple[bool, zipfile.ZipInfo, bool]] = {}
        for info in self._archive.infolist():
            if info.filename.endswith("/") or info.filename in ours:
                continue
            path, part = self._place(info.filename)
            if path not in members or members[path][0] <= bool(part):
                members[path] = bool(part), info, part == "scripts"
        return {path: members[path][1:] for path in sorted(members)}

    def _place(self, name: str) -> tuple[str, str]:
        """Return the installed path of a member, and its part of .data, "" for none."""
        parts = name.split("/")
        if _CONTROL.search(name) or {"", ".", ".."} & set(parts):
            raise BuildError(f"{self._file}: {name!r} is not a path inside of a wheel")
        # The folder may be spelled like the wheel file, unlike .dist-info ("Foo.Bar" and "foo_bar").
        project = parts[0].removesuffix(".data").rpartition("-")[0]
        is_data = parts[0].endswith(".data") and normalise(project) == normalise(self._name)
        if len(parts) == 1 or not is_data:
            return f"{self._scheme.site_packages}/{name}", ""
        folder = self._scheme.folder(parts[1], self._name) if len(parts) > 2 else None
        if folder is None:
            raise BuildError(f"{self._file}: {name!r}: not a part of an installation")
        path = "/".join([folder, *parts[2:]])
        if path == f"{self._scheme.prefix}/pyvenv.cfg":
            raise BuildError(
                f"{self._file}: {name!r} would replace the environment's own pyvenv.cfg",
                "lock another version of this package: a wheel must not choose the environment's interpreter",
            )
        return path, parts[1]

    def _copied(
        self, path: str, info: zipfile.ZipInfo, stream: IO[bytes], script: bool, recorded: tuple[str, str] | None
    ) -> Tree:
        """Yield one member. Its RECORD row is the wheel's own if that is valid, else computed while it is read."""
        start, size = self._script_start(info, stream) if script else (b"", info.file_size)
        content = Joined(start, Guarded(stream, self._file, "wheel"))
        mode = info.external_attr >> 16
        # As in installers: a link, which would be a risk, becomes a plain file with its target as content.
        executable = script or (stat.S_ISREG(mode) and mode & 0o111)
        entry = Entry(path, FILE, 0o755 if executable else 0o644, size, mtime=self._mtime)
        if recorded and recorded[1] == str(size) and not script:
            yield entry, content
            self._rows[path] = recorded
        else:
            hashed = HashedContent(content)
            yield entry, hashed
            self._rows[path] = record_row(hashed.digest(), hashed.size)

    def _script_start(self, info: zipfile.ZipInfo, stream: IO[bytes]) -> tuple[bytes, int]:
        """Return the new first line of a script that begins with `#!python`, and the size of the result."""
        head = stream.read(len(_PYTHON))
        if head != _PYTHON:
            return head, info.file_size
        # The rest of that line, `w` or options, is dropped, as installers do.
        dropped, line = len(head), head
        while not line.endswith(b"\n") and (line := stream.readline(_STEP)):
            dropped += len(line)
        start = f"#!{self._scheme.interpreter}\n".encode()
        return start, len(start) + info.file_size - dropped

    def entry_points(self) -> Iterator[tuple[str, bytes]]:
        """Yield (path, content) of the scripts of entry points."""
        text = self._text("entry_points.txt") or ""
        for name, script in entry_point_scripts(text, self._scheme.interpreter, self._file):
            yield f"{self._scheme.scripts}/{name}", script

    def _check_version(self) -> None:
        """Raise BuildError for a wheel of a later format, as the specification requires."""
        text = self._text("WHEEL")
        version = re.search(r"^Wheel-Version:\s*(\S+)", text or "", re.MULTILINE | re.IGNORECASE)
        if version is None:
            raise BuildError(f"{self._file}: no Wheel-Version in {self.info}/WHEEL")
        if not re.match(r"1(\.|$)", version[1]):
            raise BuildError(f"{self._file}: a wheel of format {version[1]}, only 1 is known")

    def record(self) -> dict[str, tuple[str, str]]:
        """Return the complete rows of the wheel's own RECORD: name in the archive → (hash, size)."""
        members = self._archive.infolist()
        rows_of_all = sum(4 * len(info.filename) + _MAX_ROW for info in members)
        text = self._text("RECORD", max(_MAX_RECORD, rows_of_all))
        if text is None:
            raise BuildError(f"{self._file}: no RECORD in {self.info}")
        try:
            rows = csv.reader(io.StringIO(text, newline=""))
            return {row[0]: (row[1], row[2]) for row in rows if len(row) > 2 and _SHA256.fullmatch(row[1])}
        except csv.Error as error:
            raise BuildError(f"{self._file}: RECORD: {error}") from None

    def relative(self, path: str) -> str:
        """Return an installed `path` in the form of RECORD."""
        base = self._scheme.site_packages + "/"
        return path.removeprefix(base) if path.startswith(base) else f"../../..{path[len(self._scheme.prefix) :]}"

    def _whole(self, path: str, data: bytes, mode: int) -> tuple[Entry, Readable]:
        self._rows[path] = record_row(hashlib.sha256(data).digest(), len(data))
        return Entry(path, FILE, mode, len(data), mtime=self._mtime), io.BytesIO(data)

    def _text(self, name: str, most: int = _MAX_METADATA) -> str | None:
        try:
            info = self._archive.getinfo(f"{self.info}/{name}")
        except KeyError:
            return None
        if info.file_size > most:
            raise BuildError(
                f"{self._file}: {name} has {info.file_size} bytes, at most {most} are possible in this wheel",
                "the wheel is damaged or made to fill memory: take another release or build of it",
            )
        with self._archive.open(info) as stream:
            data = stream.read(info.file_size)  # no more, whatever size it unpacks to
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BuildError(f"{self._file}: {name} is not UTF-8: {error}") from None


def entry_point_scripts(text: str, interpreter: str, where: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the console and GUI scripts of an entry_points.txt.

    `interpreter` is the path after `#!`. Raises BuildError, naming `where`, for a malformed file, and for a script
    whose name leads to another folder or whose entry point names no function.
    """
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise BuildError(f"{where}: entry_points.txt: {error}") from None
    for section in ("console_scripts", "gui_scripts"):
        for name, value in parser.items(section) if parser.has_section(section) else ():
            match = _VALUE.fullmatch(value)
            if not match or name in (".", "..") or _FORBIDDEN.search(name):
                raise BuildError(f"{where}: entry point {name!r} = {value!r}")
            module, function = match.groups()
            first = function.partition(".")[0]
            script = _SCRIPT.format(python=interpreter, module=module, first=first, function=function)
            yield name, script.encode()


def render_record(rows: Iterable[tuple[str, str, str]], dist_info: str) -> bytes:
    """Return the RECORD in the folder `dist_info` with the rows (path relative to site-packages, hash, size)."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(sorted([*rows, (f"{dist_info}/RECORD", "", "")]))
    return text.getvalue().encode()


TRAINER_NAME = "ddp-train"
_DIST_INFO = f"ddp_train-{__version__}.dist-info"
_METADATA = f"""Metadata-Version: 2.1
Name: ddp-train
Version: {__version__}
Summary: A small PyTorch DistributedDataParallel trainer, used to prove environments
License: Apache-2.0
Requires-Python: >=3.9
Requires-Dist: torch
"""


@dataclass(frozen=True, slots=True)
class Trainer:
    """Files of the trainer by their paths in the wheel; `digest` is the sha256 of all files."""

    files: tuple[tuple[str, bytes], ...]

    @property
    def version(self) -> str:
        return __version__

    @property
    def file_name(self) -> str:
        return f"ddp_train-{__version__}-py3-none-any.whl"

    @property
    def digest(self) -> str:
        return files_digest(self.files)

    def entries(self) -> list[tuple[str, bytes]]:
        """Return the files of the wheel by their paths; the last one is its RECORD."""
        return described(self.files, _DIST_INFO, _METADATA)

    def wheel(self) -> bytes:
        """Return the wheel's bytes."""
        return pack(self.entries())


def load_trainer() -> Trainer:
    """Load the trainer that is part of this envbuild. Raises BuildError when its files are missing."""
    folder = shipped("ddp_train")
    if not (folder / "__main__.py").is_file():
        raise BuildError(f"the trainer is missing from {folder}", "reinstall envbuild")
    sources = sorted(path for path in folder.rglob("*.py"))
    return Trainer(tuple((f"ddp_train/{path.relative_to(folder).as_posix()}", path.read_bytes()) for path in sources))
