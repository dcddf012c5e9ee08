"""Reader of one Debian package as a stream: its control files, and its files as tree entries.

Source: deb(5) format 2.0: an ar archive of debian-binary, control.tar and data.tar, in this order.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from envbuild.debian.control import parse_control
from envbuild.errors import BuildError, LockError
from envbuild.image import entry as kinds
from envbuild.image.entry import Entry, Tree
from envbuild.image.tar_stream import PositionedStream
from envbuild.image.untar import Slice

_MAGIC = b"!<arch>\n"
_HEADER = 60
# Control files are read into memory; none of a real package is larger.
_MAX_CONTROL = 16 << 20
_KINDS = {
    tarfile.REGTYPE: kinds.FILE,
    tarfile.AREGTYPE: kinds.FILE,
    tarfile.DIRTYPE: kinds.DIR,
    tarfile.SYMTYPE: kinds.SYMLINK,
    tarfile.LNKTYPE: kinds.HARDLINK,
    tarfile.CHRTYPE: kinds.CHAR,
    tarfile.BLKTYPE: kinds.BLOCK,
    tarfile.FIFOTYPE: kinds.FIFO,
}


@dataclass(frozen=True, slots=True)
class Control:
    """The control data of a package.

    `text` is its control file, `fields` are the fields of that file by lower-case name, `conffiles` are paths relative
    to the root, `md5sums` is the text of that file in the package.
    """

    text: str
    fields: dict[str, str]
    conffiles: tuple[str, ...]
    md5sums: str


def read_control(path: Path, name: str) -> Control:
    """Return the control data of the package `name` at `path`. Raises BuildError for a faulty package."""
    found: dict[str, str] = {}
    for entry, content in _members(path, name, "control.tar"):
        if entry.path in ("control", "conffiles", "md5sums") and content is not None:
            if entry.size > _MAX_CONTROL:
                raise _faulty(name, f"its {entry.path} has {entry.size} bytes")
            found[entry.path] = content.read().decode("utf-8", "replace")
    text = found.get("control", "").strip("\n")
    try:
        fields = parse_control(text, f"the package {name}")
    except LockError as error:
        raise _faulty(name, error.message) from None
    if fields.get("package") != name:
        raise _faulty(name, f"its control file is of {fields.get('package')!r}")
    # "remove-on-upgrade PATH" names a file that the package no longer has.
    lines = [line for line in found.get("conffiles", "").splitlines() if line.startswith("/")]
    conffiles = tuple(relative(line.strip().lstrip("/"), name) for line in lines)
    return Control(text, fields, conffiles, found.get("md5sums", ""))


def read_data(path: Path, name: str) -> Tree:
    """Return the files of the package `name`, in its own order; the root is "". Raises BuildError for a faulty one."""
    return _members(path, name, "data.tar")


def relative(path: str, name: str) -> str:
    """Return `path` of a package in the form of tree entries. Raises BuildError for one that could leave the root."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise _faulty(name, f"it holds the path {path!r}")
    return "/".join(part for part in parts if part not in ("", "."))


def _members(path: Path, name: str, part: str) -> Tree:
    with _reporting(name), path.open("rb") as file:
        member, stream = _find(file, name, part)
        source = _decompressed(member, stream, name)
        # An explicit encoding: the locale of the builder must not matter.
        with tarfile.open(fileobj=source, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:
            for item in archive:
                content = archive.extractfile(item) if item.isreg() else None
                yield _entry(item, name), _CheckedContent(content, name) if content else None


@contextmanager
def _reporting(name: str) -> Iterator[None]:
    """Turn any error in the data into a BuildError that names the package."""
    import lzma

    import zstandard

    try:
        yield
    except (lzma.LZMAError, zlib.error, zstandard.ZstdError, EOFError, tarfile.TarError, UnicodeError) as error:
        raise _faulty(name, f"it is damaged: {error}") from None
    except OSError as error:  # includes gzip.BadGzipFile
        raise _faulty(name, f"it cannot be read: {error.strerror or error}") from None


def _entry(item: tarfile.TarInfo, name: str) -> Entry:
    kind = _KINDS.get(item.type)
    if kind is None:
        raise _faulty(name, f"{item.name!r} is of the unknown type {item.type!r}")
    target = relative(item.linkname, name) if kind == kinds.HARDLINK else item.linkname
    size = item.size if kind == kinds.FILE else 0
    device = (item.devmajor, item.devminor) if kind in (kinds.CHAR, kinds.BLOCK) else (0, 0)
    mode, path = item.mode & 0o7777, relative(item.name, name)
    return Entry(path, kind, mode, size, target, item.uid, item.gid, int(item.mtime), device)


def _find(file: BinaryIO, name: str, part: str) -> tuple[str, Slice]:
    """Return the name of the ar member that begins with `part`, and the member as a stream."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise _faulty(name, "it is no ar archive")
    size_of_file = file.seek(0, 2)
    place, number = len(_MAGIC), 0
    while place < size_of_file:
        file.seek(place)
        header = file.read(_HEADER)
        if len(header) < _HEADER or header[58:] != b"`\n":
            raise _faulty(name, "it is truncated or no ar archive")
        member = header[:16].decode("ascii", "replace").strip().removesuffix("/")
        digits = header[48:58].strip()
        if not digits.isdigit() or place + _HEADER + int(digits) > size_of_file:
            raise _faulty(name, f"it is truncated: {member!r} is not whole")
        size = int(digits)
        if number == 0 and (member != "debian-binary" or not file.read(size).startswith(b"2.")):
            raise _faulty(name, "it is no Debian package of format 2")
        if member.startswith(part):
            source = PositionedStream(file, name)
            source.go(place + _HEADER)
            return member, Slice(source, size)
        place += _HEADER + size + size % 2
        number += 1
    raise _faulty(name, f"it has no {part}")


def _decompressed(member: str, stream: Slice, name: str) -> IO[bytes]:
    import gzip
    import lzma

    import zstandard

    file = cast("IO[bytes]", stream)
    match member.rpartition(".tar")[2]:
        case "":
            return file
        case ".gz":
            return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
        case ".xz":
            return cast("IO[bytes]", lzma.LZMAFile(file))
        case ".zst":
            return cast("IO[bytes]", zstandard.ZstdDecompressor().stream_reader(file))
    raise _faulty(name, f"{member} is compressed in a way that is not known here")


class _CheckedContent:
    """The content of one file; errors in it are reported like errors in the archive."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream, self._name = stream, name

    def read(self, size: int = -1, /) -> bytes:
        with _reporting(self._name):
            return self._stream.read(size)


def _faulty(name: str, what: str) -> BuildError:
    return BuildError(f"the package {name} cannot be unpacked: {what}", "lock the base again")
