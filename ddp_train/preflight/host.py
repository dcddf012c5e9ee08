"""Probes of this host with time limits: tools, look-ups, file systems, resource limits.

Sources: statvfs(3), getrlimit(2), /proc/driver/nvidia (NVIDIA's driver),
drivers/gpu/drm/amd/amdkfd/kfd_topology.c of the kernel (AMD's), fi_info(1) of libfabric, NVIDIA's "IMEX Channels".
"""

from __future__ import annotations

import glob
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .model import UNLIMITED

TOOL_S = 8.0
# Variables that restrict a process to some GPUs; ROCm's libraries obey all three.
_CUDA = ("CUDA_VISIBLE_DEVICES",)
_ROCM = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def driver(text: str) -> str:
    """Return the version of NVIDIA's kernel driver from the text of /proc/driver/nvidia/version, or ""."""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
    return match[1] if match else ""


def gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that this process may use; the scheduler may grant fewer than the node has."""
    listed = _run("nvidia-smi", "-L")
    if listed is not None and listed.returncode == 0:
        count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    else:
        count = sum(map(_opens, glob.glob("/dev/nvidia[0-9]*")))
    names: tuple[str, ...] = _CUDA
    if not count and (count := amd_gpus()):
        names = _ROCM
    for visible in (environ[name] for name in names if name in environ):
        chosen = [index for index in visible.split(",") if index.strip() and index.strip() != "-1"]
        count = min(count, len(chosen))
    return count


def amd_gpus(kfd: str = "/dev/kfd", nodes: str = "/sys/class/kfd/kfd/topology/nodes") -> int:
    """Return the number of AMD GPUs that the kernel shows to this process; 0 if it may not open them."""
    if not _opens(kfd):
        return 0
    properties = map(text, glob.glob(f"{nodes}/*/properties"))
    return sum(bool(re.search(r"^simd_count [1-9]", text_of_node, re.MULTILINE)) for text_of_node in properties)


def missing_provider(name: str, devices: str, state: Mapping[str, Any]) -> str:
    """Return why libfabric's provider `name` is missing, or "".

    Without fi_info, `devices` decides: a glob pattern, or GLOB=DRIVER if one of the links must lead to that
    driver; "" if the provider needs no device of its own.
    """
    layers = state.get("layers") or []
    places = [os.path.join(sys.prefix, "bin")]
    places += [os.path.join(str(layer.get("path")), "bin") for layer in layers if layer.get("path")]
    tool = shutil.which("fi_info", path=os.pathsep.join([*places, os.environ.get("PATH", "")]))
    if tool is not None:
        done = _run(tool, "-p", name)
        if done is not None and done.returncode == 0 and f"provider: {name}" in done.stdout:
            return ""
        lines = (done.stderr or done.stdout).strip().splitlines() if done else []
        return f"{tool} -p {name}: {lines[-1] if lines else 'no such provider'}"
    if not devices:
        return ""
    pattern, _, driver = devices.partition("=")
    devices_found = glob.glob(pattern)
    if driver:
        devices_found = [device for device in devices_found if os.path.basename(os.path.realpath(device)) == driver]
    return "" if devices_found else f"no fi_info, and no {name} device ({pattern})"


def missing_channel(folder: str) -> str:
    """Return why this process cannot use a channel of NVIDIA's IMEX, whose device files are in `folder`, or "".

    Only GPUs with a cluster, to which NVLink joins them, need one.
    """
    channels = sorted(glob.glob(f"{glob.escape(folder)}/channel*"))
    if any(_opens(channel, os.O_RDONLY) for channel in channels):
        return ""
    done = _run("nvidia-smi", "-q")
    clusters = re.findall(r"^\s*ClusterUUID\s*: ([0-9a-fA-F-]{36})\s*$", done.stdout if done else "", re.MULTILINE)
    if not any(cluster.strip("0-") for cluster in clusters):
        return ""
    return f"{channels[0]} cannot be read" if channels else f"{folder} has no channel"


def at_once(jobs: Mapping[str, Callable[[], Any]], limit_s: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """Run all jobs in parallel and return the results of those that end in time.

    A job that hangs (a dead name server) is abandoned.
    """
    results: dict[str, Any] = {}

    def do(name: str, job: Callable[[], Any]) -> None:
        with suppress(Exception):  # a failed probe must not print a traceback
            results[name] = job()

    threads = {name: threading.Thread(target=do, args=(name, job), daemon=True) for name, job in jobs.items()}
    started = time.monotonic()
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        left = started + limits.get(name.partition(" ")[0], limit_s) - time.monotonic()
        thread.join(max(0.0, left))
    return dict(results)


def addresses_of(host: str) -> list[str]:
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(row[4][0]).partition("%")[0] for row in rows))


def name_of(address: str) -> str:
    try:
        return socket.gethostbyaddr(address)[0]
    except (OSError, UnicodeError):
        return ""


def _run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            [tool, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _opens(path: str, flags: int = os.O_RDWR) -> bool:
    try:
        os.close(os.open(path, flags))
    except OSError:
        return False
    return True


def size(path: str) -> tuple[int, int]:
    """Return (size, free space for users) in bytes of the file system of `path`; (-1, -1) if unknown."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return -1, -1
    return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize


def limit(resource_id: int) -> int:
    soft = resource.getrlimit(resource_id)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def number(path: str) -> int:
    try:
        return int(text(path))
    except ValueError:
        return -1


def text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
