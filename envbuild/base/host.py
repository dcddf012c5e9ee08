"""This host: its mounted file systems, their free space, and the CPUs and memory available to this process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import platform
import re
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from envbuild.base.errors import BuildError
from envbuild.base.text import human_size

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HINT = "free disk space, write elsewhere with --out, or set ENVBUILD_STORE to a folder on another file system"
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
    """Mounted file system.

    `kind` is its type, `at` the mount point, `top` the mounted folder of the file system, `options` are
    the options of the mount, `own_options` the options of the file system.
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
    holding = [mount for mount in mounts if real == mount.at or real.startswith(mount.at.rstrip("/") + "/")]
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
        mount = mount_of(folder, read_mounts())
    except OSError:
        mount = None
    if mount and mount.kind in _COPIED:
        return "copy"
    return "clone" if mount and mount.kind in _REFLINK else "hardlink"


# Without a limit, cgroups of version 1 report the largest integer, rounded down to pages.
_NO_LIMIT = 1 << 62
_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,15})([KMGT]?)B?", re.ASCII | re.IGNORECASE)


def workers(variables: Mapping[str, str], most: int = 64, *, root: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may use: at least 1, at most `most`.

    It is the minimum of the CPU affinity, the CPU quotas of the process's cgroups (rounded up) and Slurm's allocation.
    `root` is the folder with proc and sys.
    """
    counts = [most, len(os.sched_getaffinity(0))]
    for version, folder in _groups("cpu", root):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if (whole := _natural(quota)) and (part := _natural(period)):
            counts.append(-(-whole // part))
    slurm = _natural(variables.get("SLURM_CPUS_PER_TASK")) or _natural(variables.get("SLURM_CPUS_ON_NODE"))
    return max(1, min(*counts, slurm or most))


def memory(variables: Mapping[str, str], *, root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process may use, None if unknown.

    It is the minimum of the limits of the process's cgroups, Slurm's allocation, and the memory that the kernel calls
    available. `root` is the folder with proc and sys.
    """
    limits: list[int] = []
    for version, folder in _groups("memory", root):
        limit = _natural(_text(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")))
        if limit is not None and limit < _NO_LIMIT:
            limits.append(limit)
    # The value 0 stands for all memory of the node.
    node, each = (_size(variables.get(f"SLURM_MEM_PER_{of}")) for of in ("NODE", "CPU"))
    if node:
        limits.append(node)
    elif each:
        count = _natural(variables.get("SLURM_CPUS_ON_NODE")) or _natural(variables.get("SLURM_CPUS_PER_TASK"))
        limits.append(each * (count or 1))
    if available := re.search(r"^MemAvailable:\s*([0-9]+) kB$", _text(root / "proc/meminfo"), re.M):
        limits.append(int(available[1]) << 10)
    return min(limits, default=None)


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) of each cgroup of this process that `controller` limits, innermost first."""
    places: dict[str, str] = {}  # controller ("" for version 2) → path of this process's cgroup
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for name in names.split(","):
            places[name] = path
    for mount in parse_mounts(_text(root / "proc/self/mountinfo")):
        if mount.kind == "cgroup2":
            version, place = 2, places.get("")
        elif mount.kind == "cgroup" and controller in mount.own_options:
            version, place = 1, places.get(controller)
        else:
            continue
        if place is None:
            continue
        top = root / mount.at.lstrip("/")
        # A part of the hierarchy may be mounted, as in a container without a cgroup namespace of its own.
        inner = os.path.relpath(place, mount.top) if place.startswith("/") else "."
        parts = [] if inner.startswith("..") or inner == "." else inner.split("/")
        for depth in range(len(parts), -1, -1):
            yield version, top.joinpath(*parts[:depth])


def _text(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except (OSError, ValueError):  # a damaged mountinfo may contain any path
        return ""


def _natural(text: str | None) -> int | None:
    digits = (text or "").strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None


def _size(text: str | None) -> int | None:
    """Return the bytes in a size as written by Slurm, in MiB or with a unit; None for any other text."""
    match = _SIZE.fullmatch((text or "").strip())
    return int(match[1]) * _UNITS[match[2].upper()] if match else None


@functools.cache
def this_boot() -> str:
    """Return a name of this machine since its last boot (random(4), boot_id)."""
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        known = platform.node().encode()
    return hashlib.sha256(known).hexdigest()[:8] + "-"


def check_disk_space(folder: Path, size: int) -> None:
    """Check that a new file of `size` bytes fits into the existing folder `folder`.

    Raises BuildError when the file system has too little space or no inode left for this user. Quotas are not checked.
    """
    try:
        about = os.statvfs(folder)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}") from error
    # File systems that do not know these numbers, such as some network file systems, report a total of 0.
    if about.f_blocks and about.f_bavail * about.f_frsize < size:
        raise _no_disk_space(folder, size)
    if about.f_files and not about.f_favail:
        raise BuildError(f"{folder}: no inode is left on its file system for a new file", _HINT)


def reserve(stream: BinaryIO, size: int) -> None:
    """Reserve `size` bytes of disk space, from the stream's position on; this detects quotas too.

    The file's length does not change: `stream.truncate()` releases unused space. Does nothing if the file
    system cannot reserve space. Raises BuildError when there is too little space.
    """
    if size <= 0:
        return
    start, handle, place = stream.tell(), stream.fileno(), Path(str(stream.name))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and start + size > limit:  # set by `ulimit -f`
        raise _no_disk_space(place, size)
    # Call fallocate(2) itself: without support for it, glibc's posix_fallocate writes zeros instead.
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is None:
        return
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    while function(handle, _KEEP_SIZE, start, size) != 0:
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in _FULL:
            raise _no_disk_space(place, size)
        return  # the write itself will report the error, if there is one


def _no_disk_space(place: Path, size: int) -> BuildError:
    message = f"{place}: not enough disk space for {human_size(size)}"
    with contextlib.suppress(OSError):
        about = os.statvfs(place)
        free = about.f_bavail * about.f_frsize
        if about.f_blocks:
            message += f"; {human_size(free)} are free"
        if about.f_blocks and free >= size:
            message += ", so a quota or a limit on file sizes prevents it"
    return BuildError(message, _HINT)
