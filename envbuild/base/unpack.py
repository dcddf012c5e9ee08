"""Unpacking of source archives and zip files as this user; members that lead outside are refused."""

from __future__ import annotations

import itertools
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from envbuild.base.errors import BuildError

try:  # like zipfile itself: a Python may lack it
    from lzma import LZMAError
except ImportError:  # pragma: no cover
    LZMAError = zipfile.BadZipFile  # type: ignore[misc,assignment]

# The exceptions of tarfile and zipfile for damaged archives: KeyError for a hard link to a missing member,
# RuntimeError for a folder that is a link to itself, an encrypted member, and an unknown method such as Deflate64.
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, LZMAError, ValueError, KeyError, RuntimeError)


def unpack(archive: Path, folder: Path, count: Callable[[str, int], None] = lambda _name, _size: None) -> None:
    """Unpack a tar (plain, gz, bz2, xz) or zip file into the new `folder`, without its single top-level folder.

    `count` is called with the name and the size of each member of a tar before anything is written, and may raise.
    Raises BuildError for a file of another format, a damaged file, or a member that leads outside.
    """
    raw = folder.with_name(folder.name + ".raw")
    raw.mkdir()
    try:
        if zipfile.is_zipfile(archive) and not tarfile.is_tarfile(archive):
            unzip(archive, raw)
        else:
            with tarfile.open(archive, "r:*") as tar:
                _extract(tar, archive.name, raw, count)
    except _DAMAGE as error:
        raise BuildError(
            f"{archive.name} cannot be unpacked: {error}", "a source is a .tar, .tar.gz, .tar.bz2, .tar.xz or .zip file"
        ) from error
    inner = list(raw.iterdir())
    if len(inner) == 1 and inner[0].is_dir() and not inner[0].is_symlink():
        os.rename(inner[0], folder)
        raw.rmdir()
    else:
        os.rename(raw, folder)


def _extract(tar: tarfile.TarFile, title: str, folder: Path, count: Callable[[str, int], None]) -> None:
    """Unpack `tar` into `folder` as this user. Raises BuildError for a member that leads outside."""
    # tarfile's filter "data" (PEP 706) is missing in Debian 12: Python 3.11 has it since 3.11.4.
    links: set[str] = set()
    members = []
    for member in tar:
        count(title, member.size)
        if fault := _fault(member, links):
            raise BuildError(
                f"{title} is not unpacked: {member.name!r} {fault}", "get the archive that its project releases"
            )
        if member.issym():
            links.add(str(PurePosixPath(member.name)))
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        members.append(member)
    trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
    tar.extractall(folder, members, **trusted)  # type: ignore[arg-type]


def _fault(member: tarfile.TarInfo, links: set[str]) -> str | None:
    """Return the reason why `member` is refused, or None."""
    # No member may be below a path in `links`, so checking names is sufficient.
    path, target = PurePosixPath(member.name), PurePosixPath(member.linkname)
    if path.is_absolute() or ".." in path.parts:
        return "would lie outside"
    if not links.isdisjoint(map(str, (path, *path.parents))):
        return "lies below a link, or in its place"
    if member.issym():
        down = itertools.dropwhile(lambda part: part == "..", target.parts)
        outside = ".." in down or os.path.normpath(path.parent / target).partition("/")[0] == ".."
    elif member.islnk():
        outside = ".." in target.parts or not links.isdisjoint(map(str, (target, *target.parents)))
    else:
        return None if member.isfile() or member.isdir() else "is a device"
    outside = outside or target.is_absolute()
    return f"is a link to {member.linkname!r}, which may be outside" if outside else None


def unzip(archive: Path, folder: Path) -> None:
    """Unpack a zip file. Raises BuildError for a member that leads outside, zipfile's exceptions for a damaged file."""
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            path = PurePosixPath(member.filename)
            mode = member.external_attr >> 16
            if path.is_absolute() or ".." in path.parts or stat.S_ISLNK(mode):
                raise BuildError(f"{archive.name} is not unpacked: {member.filename!r} may lead outside")
            place = Path(file.extract(member, folder))
            if not member.is_dir() and mode & 0o100:
                place.chmod(0o755)
