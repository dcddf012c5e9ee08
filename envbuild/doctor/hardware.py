"""Checks of available processors, memory, shared memory and GPUs. Sources: envbuild/resources.py; nvidia-smi(1)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envbuild import resources
from envbuild.doctor.model import Host, HostFinding
from envbuild.doctor.probe import find, first_line, run_probe
from envbuild.progress import human_size

_ENOUGH_MEMORY = 3 << 30
_ENOUGH_SHM = 1 << 30


def processors(host: Host) -> Iterator[HostFinding]:
    """Report the number of available processors."""
    ours, all_ = resources.workers(host.variables, 4096, root=host.root), os.cpu_count() or 1
    what = f"{ours} of {all_}" if ours != all_ else f"{all_}"
    yield HostFinding("processors", "ok", what, facts={"usable": ours, "all": all_})


def memory(host: Host) -> Iterator[HostFinding]:
    """Check the available memory."""
    found = resources.memory(host.variables, root=host.root)
    if found is None:
        yield HostFinding("memory", "info", "not known")
        return
    few = found < _ENOUGH_MEMORY
    yield HostFinding(
        "memory", "warn" if few else "ok", f"{human_size(found)} available to us",
        "two ranks with torch need about 1.5 GB; ask for more in a job, or free some" if few else "",
        {"usable": found},
    )  # fmt: skip


def shared_memory(host: Host) -> Iterator[HostFinding]:
    """Check /dev/shm, through which data loaders and NCCL exchange data."""
    try:
        about = os.statvfs(host.root / "dev/shm")
    except OSError as error:
        yield HostFinding("/dev/shm", "warn", f"{error.strerror}", "mount a tmpfs there: loaders with workers need it")
        return
    size = about.f_blocks * about.f_frsize
    if not size or not os.access(host.root / "dev/shm", os.W_OK):
        yield HostFinding("/dev/shm", "warn", "cannot be written", "loaders of data and NCCL need it: mode 1777")
        return
    small = size < _ENOUGH_SHM
    yield HostFinding(
        "/dev/shm", "warn" if small else "ok", human_size(size),
        "docker run --shm-size=8g, or in a pod an emptyDir of medium Memory ([kubernetes] shm)" if small else "",
        {"size": size},
    )  # fmt: skip


def gpus(host: Host) -> Iterator[HostFinding]:
    """Check NVIDIA GPUs (driver, listed GPUs, driver library), else AMD GPUs."""
    driver = _driver_version(host)
    tool = find("nvidia-smi", host.variables)
    listed: list[list[str]] = []
    trouble = ""
    if tool:
        fields = "--query-gpu=name,driver_version,memory.total"
        code, said = run_probe([tool, fields, "--format=csv,noheader"], host.variables)
        rows = [re.split(r"\s*,\s*", line.strip()) for line in said.splitlines()]
        listed = [row for row in rows if len(row) == 3] if code == 0 else []
        trouble = "" if code == 0 else first_line(said)
    devices = sorted(path.name for path in (host.root / "dev").glob("nvidia[0-9]*"))
    library = _libcuda(host)
    facts: dict[str, Any] = {
        "gpus": [row[0] for row in listed], "driver": driver or (listed[0][1] if listed else ""),
        "devices": devices, "libcuda": library,
    }  # fmt: skip
    if listed:
        names = ", ".join(f"{sum(r[0] == n for r in listed)} × {n}" for n in dict.fromkeys(r[0] for r in listed))
        facts["cuda"], text = _cuda(facts["driver"])
        if library:
            yield HostFinding("GPU", "ok", f"{names}, driver {facts['driver']}{text}, {library}", facts=facts)
        else:
            hint = "install the driver's libraries, or pass them into this container (--gpus all, --nv)"
            yield HostFinding("GPU", "warn", f"{names}, but libcuda.so.1 is not found", hint, facts)
    elif tool or driver or devices:
        parts = [f"driver {driver}" if driver else "no driver is loaded"]
        parts += [f"nvidia-smi: {trouble}"] if trouble else ([] if tool else ["no nvidia-smi"])
        parts += [", ".join(devices)] if devices else ["no /dev/nvidia0"]
        hint = (
            "this container was started without its GPUs (--gpus all, --nv)"
            if driver and not devices
            else "load or repair NVIDIA's driver (dmesg tells why), or ask the job for GPUs"
        )
        yield HostFinding("GPU", "warn", "; ".join(parts), hint, facts)
    elif (host.root / "dev/kfd").exists():
        yield _amd(host)
    else:
        what = "none: artifacts for CUDA can be built here, not verified"
        yield HostFinding("GPU", "info", what, "verify them in a job on a node with GPUs", facts)


def _amd(host: Host) -> HostFinding:
    """Check AMD GPUs as the kernel driver lists them: topology nodes with compute units."""
    nodes = (host.root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    count = sum(bool(re.search(r"^simd_count [1-9]", _text(path), re.MULTILINE)) for path in nodes)
    driver = _text(host.root / "sys/module/amdgpu/version").strip()
    facts = {"gpus": ["AMD"] * count, "driver": driver, "devices": ["kfd"]}
    what = f"{count} × AMD, driver {driver or 'of the kernel'}"
    if os.access(host.root / "dev/kfd", os.R_OK | os.W_OK) and count:
        return HostFinding("GPU", "ok", what, facts=facts)
    hint = "join the groups that own /dev/kfd and /dev/dri (render, video), or ask the job for GPUs"
    return HostFinding("GPU", "warn", f"{what}, but /dev/kfd cannot be used", hint, facts)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _libcuda(host: Host) -> str:
    """Return the path of the driver's library, found as verification finds it, or ""."""
    from envbuild.verify.own_runtime import cached, named

    if tool := find("nvidia-container-cli", host.variables):
        code, said = run_probe([tool, "list", "--libraries"], host.variables)
        if code == 0 and (found := named(said.split())):
            return found.get("libcuda.so.1", "")
    if tool := find("ldconfig", host.variables):
        return named(cached(run_probe([tool, "-p"], host.variables)[1])).get("libcuda.so.1", "")
    return ""


def _driver_version(host: Host) -> str:
    try:
        text = (host.root / "proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return ""
    match = re.search(r"Module(?:\s+for \S+)?\s+(\d[\d.]+)", text)
    return match[1] if match else ""


def _cuda(driver: str) -> tuple[list[str], str]:
    """Return the major CUDA versions that a driver supports (data/compatibility.toml), and a text for messages."""
    from envbuild.compat.rows import load_rows
    from envbuild.compat.versions import older

    good = []
    for row in load_rows().drivers:
        if older(driver, row.minimum) is False:
            good.append(row.cuda.removeprefix(">=").partition(",")[0])
    return good, f" (CUDA {', '.join(good)})" if good else ""
