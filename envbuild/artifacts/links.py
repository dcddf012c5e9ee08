"""The link mode for files from the store in an environment: hard link, reflink or copy."""

from __future__ import annotations

import os
from pathlib import Path

from envbuild.mounts import mount_of, parse_mounts, read_mounts

# Hard links into a shared cache on NFS break under root_squash and delayed attributes, and uv's own fallback
# prints a warning in each run; uv's maintainers advise copying there.
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"})
_REFLINK = frozenset({"btrfs"})


def link_mode(store: Path, place: Path, mounts: str | None = None) -> str:
    """Return uv's `--link-mode` for installing from `store` to `place`, which both exist.

    It is "clone" on a file system whose files can share blocks, "hardlink" within one local file system, "copy"
    across devices and on network file systems. `mounts` is the text of /proc/self/mountinfo
    (proc_pid_mountinfo(5)).
    """
    if os.stat(store).st_dev != os.stat(place).st_dev:
        return "copy"
    kind = file_system(place, mounts)
    if kind in _NETWORK:
        return "copy"
    return "clone" if kind in _REFLINK else "hardlink"


def file_system(path: Path, mounts: str | None = None) -> str:
    """Return the type of the file system that contains `path`, "" if it is unknown."""
    try:
        found = mount_of(path, read_mounts() if mounts is None else parse_mounts(mounts))
    except OSError:
        return ""
    return found.kind if found else ""
