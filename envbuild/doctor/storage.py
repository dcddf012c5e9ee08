"""Checks of the file systems of the store, home, temporary and current folder. Sources: proc(5), statvfs(3)."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from envbuild.base.host import Mount, mount_of, read_mounts
from envbuild.base.text import human_size
from envbuild.doctor.probe import Host, HostFinding, Status, find, run_probe

_MEMORY = frozenset({"tmpfs", "ramfs"})
# Disk space for a CPU environment of torch with its wheels, and for a CUDA one.
_SMALL, _COMFORTABLE = 3 << 30, 12 << 30
_LITTLE = 256 << 20
_INODES = 60_000
# Folders of the store (store/store.py), by the plural name of their contents.
_HOLDS = {"wheels": "wheels", "conda packages": "conda/archives", "image blobs": "blobs/sha256"}


def mounts(root: Path = Path("/")) -> list[Mount]:
    """Return the mounts of this host, [] if the kernel does not report them."""
    try:
        return read_mounts(root)
    except OSError:
        return []


def mount_at(path: Path, root: Path = Path("/")) -> Mount | None:
    """Return the file system of `path`, or None if the kernel does not report it."""
    return mount_of(path, mounts(root))


def store(host: Host) -> Iterator[HostFinding]:
    """Check the store's folder."""
    if host.environment is not None:
        folder = host.environment.site.store
        found = _place("store", folder, host, heavy=True)
        holds = {what: len(list((folder / place).glob("*"))) for what, place in _HOLDS.items()}
        yield replace(found, facts={**found.facts, "holds": holds})


def home(host: Host) -> Iterator[HostFinding]:
    """Check $HOME, and its quota if `quota` or Lustre reports one."""
    named = host.variables.get("HOME")
    if not named:
        yield HostFinding("home", "warn", "$HOME is not set", "export HOME=…: tools look for their settings there")
        return
    yield _place("home", Path(named), host)
    yield from _quota(Path(named), host)


def temporary(host: Host) -> list[HostFinding]:
    """Check the folder of temporary files."""
    try:
        return [_place("tmp", Path(tempfile.gettempdir()), host)]
    except FileNotFoundError:
        what = "no folder for temporary files can be written"
        return [HostFinding("tmp", "fail", what, "export TMPDIR=… with free disk space")]


def current(host: Host) -> list[HostFinding]:
    """Check the current folder, where artifacts are built."""
    try:
        folder = Path.cwd()
    except OSError:
        return [HostFinding("current folder", "fail", "it does not exist any more", "cd to one that does")]
    return [_place("current folder", folder, host, heavy=True)]


def _place(name: str, path: Path, host: Host, *, heavy: bool = False) -> HostFinding:
    there = path
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    mount = mount_at(there, host.root)
    about = os.statvfs(there)
    facts: dict[str, Any] = {
        "path": str(path),
        "kind": mount.kind if mount else "unknown file system",
        # File systems without such a count, such as some network file systems, report 0 of 0.
        "free": about.f_bavail * about.f_frsize if about.f_blocks else None,
        "inodes": about.f_favail if about.f_files else None,
        "noexec": bool(about.f_flag & os.ST_NOEXEC),
        "writable": there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        "shared": bool(mount and mount.shared),
    }
    free = facts["free"]
    what = f"{path}: {facts['kind']}" + (f", {human_size(free)} free" if free is not None else "")
    status, more, hint = judge_place(name, facts, heavy=heavy)
    if not facts["writable"]:
        more = f"{there} {more}"
    return HostFinding(name, status, f"{what}; {more}" if more else what, hint, facts)


def judge_place(name: str, facts: Mapping[str, Any], *, heavy: bool) -> tuple[Status, str, str]:
    """Return (status, problem, advised change) for a folder; `heavy`: environments are written to it."""
    other = {"store": "set ENVBUILD_STORE", "tmp": "set TMPDIR", "home": "move caches"}
    elsewhere = f"{other.get(name, 'use --out')} to a folder"
    free, inodes = facts["free"], facts["inodes"]
    if not facts["writable"] and name == "home":
        return "info", "cannot be written", ""
    if not facts["writable"]:
        return "fail", "cannot be written", f"{elsewhere} that you may write"
    if heavy and facts["noexec"]:
        return "warn", "programs on it cannot be run (noexec)", f"{elsewhere} elsewhere"
    if free is not None and free < (_SMALL if heavy else _LITTLE):
        return "warn", "too little for torch" if heavy else "little", f"free disk space, or {elsewhere} with more"
    if inodes is not None and inodes < _INODES:
        what = f"{inodes} inodes left, and an environment has 15,000 files and more"
        return "warn", what, f"free disk space, or {elsewhere} elsewhere"
    if name == "tmp" and facts["kind"] in _MEMORY:
        return "info", "it is memory", "set TMPDIR to a disk for large images"
    if name == "store" and facts["shared"]:
        return "info", "environments are copied from it, not linked", ""
    if heavy and free is not None and free < _COMFORTABLE:
        return "info", "little for CUDA images", ""
    return "ok", "", ""


def _quota(folder: Path, host: Host) -> list[HostFinding]:
    mount = mount_at(folder, host.root)
    if mount and mount.kind == "lustre" and (tool := find("lfs", host.variables)):
        command = [tool, "quota", "-q", "-h", "-u", str(os.getuid()), str(folder)]
    elif tool := find("quota", host.variables):
        command = [tool, "-w", "-p", "-s"]
    else:
        return []
    code, said = run_probe(command, host.variables)
    if code is None:
        return [HostFinding("quota", "info", f"{tool}: {said}")]
    # The line with the most numbers.
    lines = [" ".join(line.split()) for line in said.splitlines()]
    row = max(lines, key=lambda line: len(re.findall(r"\d+", line)), default="")[:160]
    if "*" in said:
        return [
            HostFinding("quota", "warn", f"over quota: {row}", "set ENVBUILD_STORE and caches to another file system")
        ]
    return [HostFinding("quota", "info", row)] if row else []
