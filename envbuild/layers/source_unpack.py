"""Safe extraction of source archives and wheels: no member is written outside of the target folder."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from envbuild.errors import BuildError

# The exceptions of tarfile and zipfile for damaged archives: KeyError for a hard link to a missing member,
# RecursionError for a folder that is a link to itself.
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, ValueError, KeyError, RecursionError)
_DATA = {"purelib": "", "platlib": "", "scripts": "bin", "data": ".", "headers": "include"}


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar (plain, gz, bz2, xz) or zip file into the new `folder`, without its single top-level folder.

    Raises BuildError for a file that is neither, is damaged, or has a member that leads outside.
    """
    raw = folder.with_name(folder.name + ".raw")
    raw.mkdir()
    try:
        if zipfile.is_zipfile(archive) and not tarfile.is_tarfile(archive):
            unzip(archive, raw)
        else:
            with tarfile.open(archive, "r:*") as tar:
                _extract(tar, archive.name, raw)
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


def _extract(tar: tarfile.TarFile, title: str, folder: Path) -> None:
    """Unpack `tar` into `folder` as this user. Raises BuildError for a member that leads outside."""
    # tarfile's filter "data" (PEP 706) is missing in Debian 12: Python 3.11 has it since 3.11.4.
    links: set[str] = set()
    members = []
    for member in tar:
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


def unpack_wheel(wheel: Path, prefix: Path, python: str) -> None:
    """Unpack a wheel below an environment's root for Python `python` ("3.11"), without scripts of entry points."""
    site = prefix / "lib" / f"python{python}" / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    unzip(wheel, site)
    for data in site.glob("*.data"):
        for part in data.iterdir():
            into = site if not _DATA.get(part.name) else prefix / _DATA[part.name]
            shutil.copytree(part, into, dirs_exist_ok=True)
        shutil.rmtree(data)


def unpack_cuda(wheels: list[Path], folder: Path) -> None:
    """Unpack NVIDIA's wheels as one CUDA toolkit: bin, include, lib (also as lib64), libraries by linkers' names."""
    raw = folder.with_name(folder.name + ".raw")
    folder.mkdir()
    for wheel in wheels:
        raw.mkdir()
        unzip(wheel, raw)
        # cu12: nvidia/<part>/include; cu13: nvidia/cu13/include.
        for part in sorted(raw.glob("nvidia/*/")):
            shutil.copytree(part, folder, dirs_exist_ok=True)
        shutil.rmtree(raw)
    (folder / "lib").mkdir(exist_ok=True)
    for library in sorted((folder / "lib").glob("lib*.so.*")):
        plain = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)
    (folder / "lib64").symlink_to("lib")
