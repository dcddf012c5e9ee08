"""What is mounted where: /proc/self/mountinfo (proc_pid_mountinfo(5)). Needs nothing but Python's own library."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_OCTAL = re.compile(rb"\\([0-7]{3})")
# File systems that other hosts see, too, or that another host serves.
_NETWORK = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs", "fuse.ceph", "fuse.sshfs",
     "fuse.glusterfs", "glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "fuse.juicefs", "efs", "fhgfs", "daos"}
)  # fmt: skip


class Mount(NamedTuple):
    """A mounted file system: its type `kind`, the folder `at` under which it appears, which of its own folders that is
    (`top`), the mount's `options` and the file system's own."""

    kind: str
    at: str
    top: str
    options: frozenset[str]
    own_options: frozenset[str]

    @property
    def shared(self) -> bool:
        """Whether other hosts may see it."""
        return self.kind in _NETWORK


def read_mounts(root: Path = Path("/")) -> list[Mount]:
    """All mounts of this mount namespace, in the kernel's order; `root` is where /proc lies. Raises OSError."""
    return list(parse_mounts(os.fsdecode((root / "proc/self/mountinfo").read_bytes())))


def parse_mounts(text: str) -> Iterator[Mount]:
    """The mounts of the text of a mountinfo; damaged lines are left out."""
    for line in text.split("\n"):
        before, _, after = line.partition(" - ")
        fields, own = before.split(" "), after.split(" ")
        if len(fields) > 5 and len(own) > 2:
            options = (frozenset(part.split(",")) for part in (fields[5], own[2]))
            yield Mount(own[0], _unescaped(fields[4]), _unescaped(fields[3]), *options)


def mount_of(path: Path, mounts: Iterable[Mount]) -> Mount | None:
    """The mount on which `path` lies, which need not exist."""
    real, best = os.path.realpath(path), None
    for mount in mounts:
        # Of several at one place the last lies on top.
        if (real == mount.at or real.startswith(mount.at.rstrip("/") + "/")) and (
            best is None or len(mount.at) >= len(best.at)
        ):
            best = mount
    return best


def _unescaped(text: str) -> str:
    """A path of mountinfo, in which the kernel writes blanks and backslashes as octal numbers."""
    raw = _OCTAL.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), os.fsencode(text))
    return os.fsdecode(raw)
