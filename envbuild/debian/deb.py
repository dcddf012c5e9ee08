"""Reader of one Debian package as a stream: its control files, and its files as tree entries.

Source: deb(5) format 2.0: an ar archive of debian-binary, control.tar and data.tar, in this order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from envbuild.base.errors import BuildError, LockError
from envbuild.debian.control import parse_control
from envbuild.image.entry import HARDLINK, Entry, Tree
from envbuild.image.layer import decompressed
from envbuild.image.tar import Member, PositionedStream, Slice, tar_items

_MAGIC = b"!<arch>\n"
_HEADER = 60
# Control files are read into memory; none of a real package is larger.
_MAX_CONTROL = 16 << 20
_COMPRESSIONS = ("", ".gz", ".xz", ".zst")
_HINT = "lock the base again"


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
    where = _where(name)
    try:
        with path.open("rb") as file:
            stream = cast(BinaryIO, _find(file, name, part))
            for member, content in tar_items(decompressed(stream, where), where):
                yield _entry(member, name), content
    except BuildError as error:
        raise BuildError(error.message, error.hint or _HINT) from None
    except OSError as error:
        raise _faulty(name, f"it cannot be read: {error.strerror or error}") from None


def _entry(member: Member, name: str) -> Entry:
    target = relative(member.link, name) if member.kind == HARDLINK else member.link
    return Entry(
        relative(member.name, name),
        member.kind,
        member.mode,
        member.size,
        target,
        member.uid,
        member.gid,
        member.mtime,
        member.device,
    )


def _find(file: BinaryIO, name: str, part: str) -> Slice:
    """Return the ar member whose name begins with `part`, as a stream."""
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
            if member.removeprefix(part) not in _COMPRESSIONS:
                raise _faulty(name, f"{member} is compressed in a way that is not known here")
            source = PositionedStream(file, name)
            source.go(place + _HEADER)
            return Slice(source, size)
        place += _HEADER + size + size % 2
        number += 1
    raise _faulty(name, f"it has no {part}")


def _where(name: str) -> str:
    return f"the package {name} cannot be unpacked"


def _faulty(name: str, what: str) -> BuildError:
    return BuildError(f"{_where(name)}: {what}", _HINT)
