"""The manifest of an image: every path of its root file system with type, mode, owner, content and attributes.

It is made from the image's layers when they are assembled, and stored in the image as
`opt/env/envbuild-image.manifest`. The first line is a JSON object with `format` and `form`: OCI for layers that a
container runtime merges, SQUASHFS for the tree of a .sqsh or .sif file. Each further line is a JSON array, sorted by
path: path, type, mode, owner, group, size in bytes, and the sha256 of a file, the target of a link, or the numbers of a
device as MAJOR,MINOR; then an object with the extended attributes in hexadecimal, if there are any. A hard link is
listed as its file. The root itself and the manifest are not listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from typing import TYPE_CHECKING

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.contract.installed import FileReport
from envbuild.contract.state import PREFIX

if TYPE_CHECKING:
    from envbuild.image.entry import Entry
    from envbuild.image.tar import Member

FILE_NAME = f"{PREFIX}/envbuild-image.manifest"
OCI, SQUASHFS = "oci", "squashfs"
FORMAT = 1
# Docker replaces these in every container (moby, daemon/initlayer/setup_unix.go).
_DOCKERS = frozenset({".dockerenv", "dev", "proc", "sys", "etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf"})
# enroot and Apptainer write these into an image that they convert, with another mode and owner for all others.
_RUNTIMES = frozenset(
    {
        ".dockerenv",
        ".exec",
        ".run",
        ".shell",
        ".singularity.d",
        ".test",
        "environment",
        "singularity",
        "dev",
        "proc",
        "sys",
        "etc/environment",
        "etc/fstab",
        "etc/hosts",
        "etc/mtab",
        "etc/rc",
        "etc/rc.local",
        "etc/resolv.conf",
    }
)
# Types of paths, as image/entry.py names them.
_FILE, _DIR, _LINK, _CHAR, _BLOCK = "file", "dir", "symlink", "char", "block"
_SPECIAL = 0o6000  # setuid and setgid
_string = json.encoder.encode_basestring_ascii


@dataclass(frozen=True, slots=True)
class PathRow:
    """A path of an image; `value` is a file's sha256, a link's target or a device's numbers."""

    kind: str
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    size: int = 0
    value: str = ""
    xattrs: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class FileManifest:
    """The rows by path, their form, and the sha256 of the manifest's text."""

    form: str
    rows: Mapping[str, PathRow]
    digest: str


def row_of(path: Entry | Member, sha256: str, target: str) -> PathRow:
    """Return the row of a path that is no hard link; `sha256` is a file's digest, `target` the text of a link."""
    mode, size, value = path.mode, 0, ""
    if path.kind == _FILE:
        size, value = path.size, sha256
    elif path.kind == _LINK:
        mode, value = 0o777, target
    elif path.device != (0, 0):
        value = "{},{}".format(*path.device)
    return PathRow(path.kind, mode, path.uid, path.gid, size, value, tuple(sorted(path.xattrs)))


def render(form: str, rows: Mapping[str, PathRow]) -> bytes:
    """Return the text of the manifest."""
    text = BytesIO()
    text.write(_line({"format": FORMAT, "form": form}))
    for path, row in sorted(rows.items()):
        if path != FILE_NAME:
            # As json.dumps of the row, in a third of its time; there is a row for each file.
            numbers = f"{row.mode}, {row.uid}, {row.gid}, {row.size}"
            xattrs = f", {json.dumps({name: data.hex() for name, data in row.xattrs})}" if row.xattrs else ""
            line = f"[{_string(path)}, {_string(row.kind)}, {numbers}, {_string(row.value)}{xattrs}]\n"
            text.write(line.encode("ascii"))
    return text.getvalue()


def _line(value: object) -> bytes:
    return json.dumps(value).encode("ascii") + b"\n"


def parse(text: bytes, where: str) -> FileManifest:
    """Return the manifest in `text`. Raises BuildError, naming `where`, for a damaged one."""
    try:
        first, *lines = text.splitlines()
        head = json.loads(first)
        if head["format"] != FORMAT or head["form"] not in (OCI, SQUASHFS):
            raise ValueError("another format")
        rows = dict(map(_parsed, lines))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BuildError(f"{where}: invalid: {error}", "build the image again") from error
    return FileManifest(head["form"], rows, digest_of(text))


def _parsed(line: bytes) -> tuple[str, PathRow]:
    path, kind, mode, uid, gid, size, value, *xattrs = json.loads(line)
    if not all(isinstance(text, str) for text in (path, kind, value)):
        raise ValueError(f"unexpected row: {line[:80]!r}")
    if not all(type(number) is int for number in (mode, uid, gid, size)):
        raise ValueError(f"unexpected row: {line[:80]!r}")
    attributes = tuple((name, bytes.fromhex(data)) for name, data in xattrs[0].items()) if xattrs else ()
    return path, PathRow(kind, mode, uid, gid, size, value, attributes)


def compare(manifest: FileManifest, path_rows: Mapping[str, PathRow], form: str) -> FileReport:
    """Compare the paths of an image in `form` with its manifest; paths in the report begin with a slash.

    Files that a docker daemon adds to each container are left out. An image that another tool converted from layers
    into a squashfs is compared without owners and modes, except setuid, setgid and the permission to execute, and
    without the files that runtimes add.
    """
    converted = form != manifest.form
    ignored = _RUNTIMES if converted else _DOCKERS if form == OCI else frozenset()
    judged = _converted if converted else _exported if form == OCI else lambda _, row: row
    rows = dict(_judged(manifest.rows, ignored, judged))
    now = dict(_judged(path_rows, ignored, judged))
    report = FileReport()
    files = [row for row in path_rows.values() if row.kind == _FILE]
    report.files, report.bytes = len(files), sum(row.size for row in files)
    report.missing = [f"/{path}" for path in sorted(rows.keys() - now.keys())]
    report.unowned = [f"/{path}" for path in sorted(now.keys() - rows.keys())]
    report.altered = [f"/{path}" for path in sorted(now.keys() & rows.keys()) if now[path] != rows[path]]
    return report


def _judged(
    rows: Mapping[str, PathRow], ignored: frozenset[str], judged: Callable[[str, PathRow], PathRow | None]
) -> Iterator[tuple[str, PathRow]]:
    for path, row in rows.items():
        left_out = path == FILE_NAME or path in ignored or path.partition("/")[0] in ignored
        if not left_out and (kept := judged(path, row)) is not None:
            yield path, kept


def _exported(_: str, row: PathRow) -> PathRow:
    # The only attribute that docker exports.
    kept = tuple(xattr for xattr in row.xattrs if xattr[0] == "security.capability")
    return replace(row, xattrs=kept) if kept != row.xattrs else row


def converted_mode(path: str, kind: str, mode: int) -> int | None:
    """Return the mode of a path in a squashfs made by `enroot import` from layers, None if it leaves the path out.

    Files in dev, device nodes anywhere and .dockerenv are left out: creating a node needs root, and the runtimes mount
    the host's dev. The owner may read everything, and enter and write folders; setuid, setgid and sticky bits stay.
    """
    if path.startswith("dev/") or path == ".dockerenv" or kind in (_CHAR, _BLOCK):
        return None
    if path == "":
        return 0o755
    if kind == _DIR:
        return mode | 0o700
    return mode if kind == _LINK else mode | 0o400 | (0o100 if mode & 0o111 else 0)


def _converted(path: str, row: PathRow) -> PathRow | None:
    mode = converted_mode(path, row.kind, row.mode)
    if mode is None:
        return None
    execute = 0o111 if row.kind == _FILE and mode & 0o111 else 0
    return PathRow(row.kind, mode & _SPECIAL | execute, 0, 0, row.size, row.value)
