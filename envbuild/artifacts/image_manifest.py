"""The manifest of an image: every path of its root file system with type, mode, owner, content and attributes.

It is made from the image's layers when these are assembled, and lies in the image as `opt/env/envbuild-image.manifest`.
The first line is a JSON object with `format` and `form`: OCI for layers that a container runtime merges, SQUASHFS for
the tree of a .sqsh or .sif file. Each further line is a JSON array, sorted by path: path, type, mode, owner, group,
size in bytes, and the sha256 of a file, the target of a link, or the numbers of a device as MAJOR,MINOR; then an object
with the extended attributes in hexadecimal, if there are any. A hard link is listed as the file that it leads to.
Neither the root itself nor the manifest is listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO

from envbuild.artifacts.enroot import normalised
from envbuild.artifacts.installed import FileReport
from envbuild.base.errors import BuildError
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.model import digest_of
from envbuild.image.tar_stream import Member
from envbuild.image.tree import MergedTree
from envbuild.layers.compose import PREFIX

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


def row_of(entry: Entry | Member, sha256: str) -> PathRow:
    """Return the row of a path that is no hard link; `sha256` is that of a file."""
    mode, size, value = entry.mode, 0, ""
    if entry.kind == FILE:
        size, value = entry.size, sha256
    elif entry.kind == SYMLINK:
        mode, value = 0o777, entry.target if isinstance(entry, Entry) else entry.link
    elif entry.device != (0, 0):
        value = "{},{}".format(*entry.device)
    return PathRow(entry.kind, mode, entry.uid, entry.gid, size, value, tuple(sorted(entry.xattrs)))


def rows_of(entries: Iterable[tuple[Entry, str]]) -> dict[str, PathRow]:
    """Return the rows of a tree, whose hard links come after their files; the sha256 of each file is given."""
    rows: dict[str, PathRow] = {}
    for entry, sha256 in entries:
        if entry.kind == HARDLINK and (first := rows.get(entry.target)):
            rows[entry.path] = first
        elif entry.path:
            rows[entry.path] = row_of(entry, sha256)
    return rows


def of_layers(layers: Sequence[Sequence[Member]], limits: ImageLimits | None) -> dict[str, PathRow]:
    """Return the rows of merged layers, lowest first. Raises BuildError when they cannot be merged."""
    tree = MergedTree(Quota(limits))
    for number, members in enumerate(layers, 1):
        tree.add(f"layer {number}", members)
    nodes = ((path, node.member) for path, node in tree.walk() if path)
    return {path: row_of(member, member.sha256) if member else PathRow(DIR) for path, member in nodes}


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
        raise BuildError(f"{where}: cannot be understood: {error}", "build the image again") from error
    return FileManifest(head["form"], rows, digest_of(text))


def _parsed(line: bytes) -> tuple[str, PathRow]:
    path, kind, mode, uid, gid, size, value, *xattrs = json.loads(line)
    if not all(isinstance(text, str) for text in (path, kind, value)):
        raise ValueError(f"a row of another form: {line[:80]!r}")
    if not all(type(number) is int for number in (mode, uid, gid, size)):
        raise ValueError(f"a row of another form: {line[:80]!r}")
    found = tuple((name, bytes.fromhex(data)) for name, data in xattrs[0].items()) if xattrs else ()
    return path, PathRow(kind, mode, uid, gid, size, value, found)


def compare(manifest: FileManifest, found: Mapping[str, PathRow], form: str) -> FileReport:
    """Compare the paths of an image in `form` with its manifest; paths in the report begin with a slash.

    Left out is what a docker daemon adds to each container. An image that another tool converted from layers into a
    squashfs is compared without owners and modes, except setuid, setgid and the permission to execute, and without the
    files that runtimes add.
    """
    converted = form != manifest.form
    ignored = _RUNTIMES if converted else _DOCKERS if form == OCI else frozenset()
    judged = _converted if converted else _exported if form == OCI else _exact
    wanted = dict(_judged(manifest.rows, ignored, judged))
    now = dict(_judged(found, ignored, judged))
    report = FileReport()
    files = [row for row in found.values() if row.kind == FILE]
    report.files, report.bytes = len(files), sum(row.size for row in files)
    report.missing = [f"/{path}" for path in sorted(wanted.keys() - now.keys())]
    report.unowned = [f"/{path}" for path in sorted(now.keys() - wanted.keys())]
    report.altered = [f"/{path}" for path in sorted(now.keys() & wanted.keys()) if now[path] != wanted[path]]
    return report


def _judged(
    rows: Mapping[str, PathRow], ignored: frozenset[str], judged: Callable[[str, PathRow], PathRow | None]
) -> Iterator[tuple[str, PathRow]]:
    for path, row in rows.items():
        left_out = path == FILE_NAME or path in ignored or path.partition("/")[0] in ignored
        if not left_out and (kept := judged(path, row)) is not None:
            yield path, kept


def _exact(_: str, row: PathRow) -> PathRow:
    return row


def _exported(_: str, row: PathRow) -> PathRow:
    # The only attribute that docker exports.
    kept = tuple(one for one in row.xattrs if one[0] == "security.capability")
    return replace(row, xattrs=kept) if kept != row.xattrs else row


def _converted(path: str, row: PathRow) -> PathRow | None:
    entry = normalised(Entry(path, row.kind, row.mode))
    if entry is None:
        return None
    execute = 0o111 if row.kind == FILE and row.mode & 0o111 else 0
    return PathRow(row.kind, row.mode & _SPECIAL | execute, 0, 0, row.size, row.value)
