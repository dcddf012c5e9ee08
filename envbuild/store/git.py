"""Source archives of git commits, made by the user's git: the same bytes on every machine.

An archive has the files of one commit, or of one folder of it, with its submodules and without git's own files.
Sources: git-fetch(1), git-submodule(1); git-lfs, `GIT_LFS_SKIP_SMUDGE`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Mapping
from pathlib import Path

from envbuild.base import process
from envbuild.base.errors import HostError
from envbuild.base.git import run_git
from envbuild.base.masking import redact
from envbuild.cache.http import RequestFailed

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
    _write_tar(top, path)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_tar(top: Path, path: Path) -> None:
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
