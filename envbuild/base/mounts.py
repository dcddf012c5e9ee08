"""Mounted file systems, from /proc/self/mountinfo (proc_pid_mountinfo(5)). Needs only Python's standard library."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_OCTAL = re.compile(rb"\\([0-7]{3})")
# File systems that other hosts can also see, or that another host serves.
_NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "cifs",
        "smb3",
        "9p",
        "afs",
        "fuse.ceph",
        "fuse.sshfs",
        "fuse.glusterfs",
        "glusterfs",
        "orangefs",
        "pvfs2",
        "panfs",
        "wekafs",
        "fuse.juicefs",
        "efs",
        "fhgfs",
        "daos",
    }
)

# Hard links into a shared cache on NFS break under root_squash and delayed attributes, and uv's own fallback prints a
# warning in each run; uv's maintainers advise copying there.
_COPIED = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"})
_REFLINK = frozenset({"btrfs"})


class Mount(NamedTuple):
    """A mounted file system.

    `kind` is its type, `at` the mount point, `top` the folder of the file system that is mounted there, `options` are
    the options of the mount, `own_options` those of the file system.
    """

    kind: str
    at: str
    top: str
    options: frozenset[str]
    own_options: frozenset[str]

    @property
    def shared(self) -> bool:
        """Whether other hosts may see the file system."""
        return self.kind in _NETWORK


def read_mounts(root: Path = Path("/")) -> list[Mount]:
    """Return all mounts of this mount namespace, in the kernel's order. Raises OSError.

    `root` is the folder with proc.
    """
    return list(parse_mounts(os.fsdecode((root / "proc/self/mountinfo").read_bytes())))


def parse_mounts(text: str) -> Iterator[Mount]:
    """Yield the mounts in the text of a mountinfo file; damaged lines are skipped."""
    for line in text.split("\n"):
        before, _, after = line.partition(" - ")
        fields, own = before.split(" "), after.split(" ")
        if len(fields) > 5 and len(own) > 2:
            options = (frozenset(part.split(",")) for part in (fields[5], own[2]))
            yield Mount(own[0], _unescaped(fields[4]), _unescaped(fields[3]), *options)


def mount_of(path: Path, mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount that contains `path`, which need not exist; None when no mount does."""
    real = os.path.realpath(path)
    holding = [one for one in mounts if real == one.at or real.startswith(one.at.rstrip("/") + "/")]
    # Of several mounts at one mount point, the last one hides the others.
    return max(reversed(holding), key=lambda mount: len(mount.at), default=None)


def _unescaped(text: str) -> str:
    """Decode a path of mountinfo, where the kernel writes blanks and backslashes as octal numbers."""
    raw = _OCTAL.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), os.fsencode(text))
    return os.fsdecode(raw)


def link_mode(store: Path, folder: Path) -> str:
    """Return uv's `--link-mode` from `store` to `folder`: shared blocks, local hard links, or copies elsewhere."""
    if os.stat(store).st_dev != os.stat(folder).st_dev:
        return "copy"
    try:
        found = mount_of(folder, read_mounts())
    except OSError:
        found = None
    if found and found.kind in _COPIED:
        return "copy"
    return "clone" if found and found.kind in _REFLINK else "hardlink"
