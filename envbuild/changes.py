"""Files of a git checkout that changed since a revision."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from envbuild import process
from envbuild.errors import UsageError

_ALL_HISTORY = "fetch it: git fetch --unshallow; with actions/checkout, set fetch-depth: 0"


@dataclass(frozen=True, slots=True)
class Changes:
    """Files that differ, as POSIX paths relative to the checkout's top."""

    top: Path
    files: tuple[str, ...]


def changes_since(revision: str, folder: Path) -> Changes:
    """Return the files that the branch checked out at `folder` changed since it left `revision`.

    As for `git diff REVISION...`, only commits count. Raises UsageError when `folder` is not in a git checkout or git
    does not know the revision, HostError when git is not installed.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top.returncode != 0:
        raise UsageError(
            f"--changed-since needs a git checkout, and {folder.absolute()} is not in one that git will read:"
            f"\n{process.tail(top)}",
            hint="run it in a clone, or leave --changed-since out to get every job",
        )
    found = _git(folder, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if found.returncode != 0 or revision.startswith("-"):
        _fail(folder, f"git knows no revision {revision!r}", "name a commit, branch or tag")
    commit = found.stdout.strip()
    # With renames, git would list only a file's new path; the folder that it left has changed too.
    differing = _git(folder, "diff", "--name-only", "--no-renames", "-z", f"{commit}...HEAD", "--")
    if differing.returncode != 0:
        _fail(
            folder,
            f"git finds nothing that {revision!r} and HEAD have in common:\n{process.tail(differing)}",
            "name a revision that this branch came from",
        )
    files = tuple(path for path in differing.stdout.split("\0") if path)
    return Changes(Path(top.stdout.removesuffix("\n")), files)


def _fail(folder: Path, message: str, hint: str) -> NoReturn:
    shallow = _git(folder, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    if shallow:
        raise UsageError(f"{message}; this clone is shallow and may lack it", _ALL_HISTORY)
    raise UsageError(message, f"{hint}, or leave --changed-since out to get every job")


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return process.run(["git", *arguments], cwd=folder, check=False)
