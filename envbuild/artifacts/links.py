"""How files get from the store into an environment: hardlink, reflink or copy."""

from __future__ import annotations

import os
from pathlib import Path

# Hardlinks into a shared cache on NFS break under root_squash and delayed attributes, and uv's own
# fallback is a warning for each run; copying is what its maintainers advise there.
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"})
_REFLINK = frozenset({"btrfs"})


def link_mode(store: Path, place: Path, mounts: str | None = None) -> str:
    """uv's `--link-mode` for installing from `store` to `place`, both existing.

    "clone" on a file system whose files can share blocks, "hardlink" within one local file system,
    "copy" across devices and on network file systems. `mounts` is the text of
    /proc/self/mountinfo (proc_pid_mountinfo(5)).
    """
    if os.stat(store).st_dev != os.stat(place).st_dev:
        return "copy"
    kind = file_system(place, mounts)
    if kind in _NETWORK:
        return "copy"
    return "clone" if kind in _REFLINK else "hardlink"


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds `path`, "" when it cannot be told."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    wanted = os.path.realpath(path)
    best, kind = "", ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) < 5 or not rest:
            continue
        point = words[4].replace("\\040", " ")
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        # A later line of the same mount point covers the earlier one.
        if inside and len(point) >= len(best):
            best, kind = point, rest.split()[0]
    return kind
