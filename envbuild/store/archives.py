"""Locked source archives: fetched by hash from the store, mirrors, a URL, an index or a git repository, and unpacked.

An archive of a git commit has the same bytes on every machine. It contains the files of the commit, or of one folder,
with submodules and without git's own files. Sources: git-fetch(1), git-submodule(1); git-lfs, `GIT_LFS_SKIP_SMUDGE`.
"""

from __future__ import annotations

import itertools
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

from envbuild.base import process
from envbuild.base.errors import BuildError, HostError
from envbuild.base.files import is_file_name, sha256_of
from envbuild.base.git import run_git
from envbuild.base.masking import redact
from envbuild.base.progress import transfer
from envbuild.cache.http import Mismatch, RequestFailed
from envbuild.store.client import Client, SourceAnswer, download, from_urls, from_vault
from envbuild.store.sources import FetchSettings, local_files, remote_sources
from envbuild.store.store import Store

try:  # like zipfile itself: a Python may lack it
    from lzma import LZMAError
except ImportError:  # pragma: no cover
    LZMAError = zipfile.BadZipFile  # type: ignore[misc,assignment]

# 1980-01-01, the earliest time in zip files, which builds make of the archive's files.
_TIME = 315532800
# Settings that would make the files depend on the user.
_PLAIN = ("core.autocrlf=false", "core.eol=lf", "advice.detachedHead=false")


def git_archive(url: str, commit: str, subdirectory: str, path: Path, work: Path, variables: Mapping[str, str]) -> str:
    """Write the files of `commit` in `subdirectory` of the repository at `url` to `path`; return its sha256.

    `path` is an uncompressed tar; `work` is an empty folder. Raises RequestFailed when git cannot fetch the commit.
    """
    env = {**variables, "GIT_LFS_SKIP_SMUDGE": "1"}
    tree = work / "tree"

    def git(folder: Path, *words: str | Path, must: bool = True) -> bool:
        try:
            done = run_git(folder, *words, variables=env, settings=_PLAIN, fetches=True)
        except HostError as error:
            raise RequestFailed(f"{error.message}; install git", answered=True) from None
        if done.returncode and must:
            raise RequestFailed(f"git {words[0]} failed:\n{process.tail(done)}", answered=True)
        return done.returncode == 0

    git(work, "init", "--quiet", "tree")
    # Some servers send only branches and tags, with their history.
    if not git(tree, "fetch", "--quiet", "--depth=1", "--no-tags", "--", url, commit, must=False):
        refs = "+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*"
        git(tree, "fetch", "--quiet", "--", url, *refs)
    git(tree, "checkout", "--quiet", "--detach", commit)
    git(tree, "remote", "add", "--", "origin", url)  # relative URLs of submodules
    git(tree, "submodule", "--quiet", "update", "--init", "--recursive")
    top = tree / subdirectory
    if not top.is_dir() or not top.resolve().is_relative_to(tree.resolve()):  # a link of the repository may lead out
        raise RequestFailed(f"{redact(url)} at {commit} has no folder {subdirectory}", answered=True)
    write_tar(top, path)
    return sha256_of(path)


def write_tar(top: Path, path: Path) -> None:
    """Write the files of `top` as an uncompressed tar, with the same bytes on every machine."""
    files = []
    for here, folders, names in os.walk(top):
        links = [name for name in folders if os.path.islink(os.path.join(here, name))]
        folders[:] = [name for name in folders if name != ".git" and name not in links]
        files += [Path(here, name) for name in (*names, *links) if name != ".git"]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for file in sorted(files):
            entry = tarfile.TarInfo(f"source/{file.relative_to(top)}")
            entry.mtime, about = _TIME, file.lstat()
            if stat.S_ISLNK(about.st_mode):
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(file)
                tar.addfile(entry)
                continue
            entry.mode = 0o755 if about.st_mode & 0o100 else 0o644
            entry.size = about.st_size
            with file.open("rb") as stream:
                tar.addfile(entry, stream)


KIND = "sources"
_INDEX = "index:"
_GIT = "git+"


@dataclass(frozen=True, slots=True)
class WantedArchive:
    """A locked source archive, and its sha256 (hex).

    `url` is its URL; "index:NAME" stands for pip's indexes and the recipe's `indexes`, and
    "git+URL@COMMIT#subdirectory=DIR" for a commit, whose archive is made on this host. `table` is the table of the
    recipe with its sha256, "" for an archive of a lock.
    """

    name: str
    version: str
    url: str
    sha256: str
    table: str = ""
    indexes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def locate_archive(archive: WantedArchive, host: FetchSettings, *, offline: bool) -> Path:
    """Return the archive. Raises BuildError with each source that was tried and its answer."""
    store, client, answers = host.store, Client(host.pip, host.variables), list[SourceAnswer]()
    known, hashes = partial(store.find, KIND, archive.sha256), frozenset({archive.sha256})  # no name says what it is
    if path := known() or from_vault(hashes, store, answers, kind=KIND, named=lambda _: archive.name):
        return path
    is_git = archive.url.startswith(_GIT)

    def fetch(url: str) -> Path:
        if offline and not url.startswith("file:"):
            raise RequestFailed("not asked, --offline", answered=True)
        with transfer(f"fetching {archive}", None) as on_progress:
            if is_git:
                return _from_git(archive, url, store, host.variables)
            name = unquote(urlsplit(url).path).rpartition("/")[2]
            name = name if is_file_name(name) else archive.name
            return download(url, name, hashes, archive.sha256, known, client, store, on_progress, KIND)

    git = host.site.mirrored(archive.url.removeprefix(_GIT))
    urls = git if is_git else _urls(archive, host, client, answers, offline)
    if path := from_urls((("", url) for url in urls), answers, fetch):
        return path
    raise _not_found(archive, answers, offline)


def adopt_commit(name: str, url: str, commit: str, subdirectory: str, store: Store, env: Mapping[str, str]) -> str:
    """Add the archive of a commit (see git_archive) to the store; return its sha256. Raises RequestFailed."""
    with store.writing(), store.working("building") as work:
        sha256 = git_archive(url, commit, subdirectory, work / "archive.tar", work, env)
        store.adopt(work / "archive.tar", sha256, f"{name}-{commit[:12]}.tar", KIND)
    return sha256


def _from_git(archive: WantedArchive, url: str, store: Store, env: Mapping[str, str]) -> Path:
    parts = urlsplit(url)
    repository, _, commit = parts._replace(fragment="").geturl().rpartition("@")
    folder = parse_qs(parts.fragment).get("subdirectory", [""])[0]
    sha256 = adopt_commit(archive.name, repository, commit, folder, store, env)
    if (path := store.find(KIND, archive.sha256)) is None:
        raise Mismatch(sha256)
    return path


def _urls(
    archive: WantedArchive, host: FetchSettings, client: Client, answers: list[SourceAnswer], offline: bool
) -> Iterator[str]:
    """Yield the possible URLs of the archive, in the order in which to try them."""
    if not archive.url.startswith(_INDEX):
        yield from host.site.mirrored(archive.url)
        return
    project = archive.url.removeprefix(_INDEX)
    for folder, names in local_files(host.pip, ("",)):
        own = sorted(name for name in names if _is_sdist(name, project, archive.version))
        yield from ((folder / name).absolute().as_uri() for name in own)
    # Indexes of the site come last: a recipe may have bound the package to one of them.
    for page in remote_sources(host, archive.indexes, offline, last=tuple(host.site.indexes.values())):
        try:
            links = [link for link in page.links(project, client) if link.sha256 == archive.sha256]
        except RequestFailed as error:
            answers.append(SourceAnswer(page.name, f"cannot be used: {error}"))
            continue
        if not links:
            answers.append(SourceAnswer(page.name, f"has no {project} with this hash"))
        yield from (link.url for link in links)


def _is_sdist(file: str, project: str, version: str) -> bool:
    from packaging.utils import parse_sdist_filename
    from packaging.version import Version

    with suppress(ValueError):
        return parse_sdist_filename(file) == (project, Version(version))
    return False


def _not_found(archive: WantedArchive, answers: list[SourceAnswer], offline: bool) -> BuildError:
    lines = [f"{archive}: no source has its archive", f"wanted sha256:{archive.sha256}"]
    digests = [answer.sha256 for answer in answers if answer.sha256]
    lines += list(map(str, answers)) or [f"{redact(archive.url)}: not asked"]
    if offline:
        hint = (
            "run it once without --offline, or give the URL a mirror in a folder (file:///...) under [mirrors] in "
            "site.toml"
        )
    elif digests and archive.table:
        hint = (
            "the archive is another one than the recipe means. If you trust it (compare with its project's release), "
            f'set sha256 = "{digests[0]}" in [{archive.table}]'
        )
    elif digests:
        hint = "the archive is another one than the lock means. If you trust it, lock again: `envbuild lock RECIPE`"
    else:
        hint = "check the network and pip's proxy and cert; or give the URL a mirror under [mirrors] in site.toml"
        hint += f", or `url` in [{archive.table}]" if archive.table else ""
    return BuildError("\n    ".join(lines), hint)


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
