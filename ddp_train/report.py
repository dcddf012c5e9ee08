"""JSON report of a finished run, and the description of each rank in it."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from . import __file__ as package_file
from .distributed import Group
from .files import replace_file
from .loaded import connections, interfaces, mapped_libraries

FORMAT = 1


def describe_rank(group: Group) -> dict[str, Any]:
    """Return this rank's entry in the report, without the results of its checks."""
    place = group.place
    return {
        "rank": place.rank,
        "local_rank": place.local_rank,
        "group_rank": place.group_rank,
        "local_world_size": place.local_world_size,
        "world_size": place.world_size,
        "host": place.host,
        "pid": os.getpid(),
        "device": str(group.device),
        "restart_count": place.restart_count,
        "sys_executable": sys.executable,
        "sys_prefix": sys.prefix,
        "python_version": platform.python_version(),
        "torch_version": str(torch.__version__),
        "torch_file": torch.__file__,
        "torch_cuda": torch.version.cuda,
        **_hip(),
        "ddp_train_file": str(Path(package_file).resolve()),
        "gloo_ifname": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


def _hip() -> dict[str, str]:
    """Return `torch_hip`, the HIP version of a torch for ROCm; an empty dict for other builds."""
    hip = getattr(torch.version, "hip", None)
    return {"torch_hip": hip} if hip else {}


def describe_network(group: Group) -> dict[str, Any]:
    """Return this rank's use of the network so far: libraries, connections, the loaded NCCL's version."""
    nccl = None
    if group.backend == "nccl":
        nccl = ".".join(str(number) for number in torch.cuda.nccl.version())
    where = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    log = os.environ.get("NCCL_DEBUG_FILE")
    if log is not None:  # as NCCL expands it: the host name up to its first dot
        log = log.replace("%h", group.place.host.split(".")[0]).replace("%p", str(os.getpid()))
    return {
        "libraries": mapped_libraries(),
        "sockets": connections(),
        "interfaces": interfaces(),
        "store": f"{where[0]}:{where[1]}" if all(where) else None,
        "nccl": nccl,
        "nccl_log": log,
    }


def memory_use(device: torch.device) -> dict[str, Any]:
    """Return the most memory that this process has had, in bytes, and for a GPU its name and what torch allocated.

    getrusage(2) has another value: it begins with the memory of the process that started this one.
    """
    facts: dict[str, Any] = {}
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
            facts["peak_memory"] = next(int(line.split()[1]) << 10 for line in stream if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # a sandbox without this line
        pass
    if device.type == "cuda":
        facts["peak_gpu_memory"] = torch.cuda.max_memory_allocated(device)
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def rank_table(ranks: list[dict[str, Any]]) -> str:
    """Return the ranks as a table, one line each, with torchrun's names for their numbers."""
    columns = (
        ("LOCAL_RANK", "local_rank"),
        ("RANK", "rank"),
        ("GROUP_RANK", "group_rank"),
        ("LOCAL_WORLD_SIZE", "local_world_size"),
        ("WORLD_SIZE", "world_size"),
        ("host", "host"),
        ("device", "device"),
    )
    rows = [[title for title, _ in columns]]
    rows += [[str(rank[key]) for _, key in columns] for rank in ranks]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ("  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def write_report(path: str, report: dict[str, Any]) -> None:
    """Write `report` to `path`, atomically. Raises TrainError."""
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    replace_file(Path(path), text.encode(), "report")
