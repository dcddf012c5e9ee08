"""Checks of processors, memory, GPUs, user, clock, locale and own name. Sources: nvidia-smi(1), adjtimex(2)."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import envbuild
from envbuild.base import host as granted
from envbuild.base.text import human_size
from envbuild.doctor.probe import Host, HostFinding, find, first_line, read_text, run_probe

_ENOUGH_MEMORY = 3 << 30
_ENOUGH_SHM = 1 << 30
# adjtimex(2): the state of an unsynchronised clock.
_TIME_ERROR = 5


def who(host: Host) -> list[HostFinding]:
    """Report the current user."""
    user = os.getuid()
    what = "root" if os.geteuid() == 0 else f"user {user}; nothing here needs root"
    return [HostFinding("user", "ok", what, facts={"uid": user})]


def processors(host: Host) -> list[HostFinding]:
    """Report the number of available processors."""
    ours, all_ = granted.workers(host.variables, 4096, root=host.root), os.cpu_count() or 1
    what = f"{ours} of {all_}" if ours != all_ else f"{all_}"
    return [HostFinding("processors", "ok", what, facts={"usable": ours, "all": all_})]


def memory(host: Host) -> list[HostFinding]:
    """Check the available memory."""
    found = granted.memory(host.variables, root=host.root)
    if found is None:
        return [HostFinding("memory", "info", "not known")]
    what, facts = f"{human_size(found)} available to us", {"usable": found}
    if found >= _ENOUGH_MEMORY:
        return [HostFinding("memory", "ok", what, facts=facts)]
    hint = "two ranks with torch need about 1.5 GB; ask for more in a job, or free some"
    return [HostFinding("memory", "warn", what, hint, facts)]


def shared_memory(host: Host) -> list[HostFinding]:
    """Check /dev/shm, through which data loaders and NCCL exchange data."""
    name, place = "/dev/shm", host.root / "dev/shm"
    try:
        about = os.statvfs(place)
    except OSError as error:
        return [HostFinding(name, "warn", f"{error.strerror}", "mount a tmpfs there: loaders with workers need it")]
    size = about.f_blocks * about.f_frsize
    if not size or not os.access(place, os.W_OK):
        return [HostFinding(name, "warn", "cannot be written", "loaders of data and NCCL need it: mode 1777")]
    if size >= _ENOUGH_SHM:
        return [HostFinding(name, "ok", human_size(size), facts={"size": size})]
    hint = "docker run --shm-size=8g, or in a pod an emptyDir of medium Memory ([kubernetes] shm)"
    return [HostFinding(name, "warn", human_size(size), hint, {"size": size})]


def gpus(host: Host) -> list[HostFinding]:
    """Check NVIDIA GPUs (driver, listed GPUs, driver library), else AMD GPUs."""
    loaded = re.search(r"Module(?:\s+for \S+)?\s+(\d[\d.]+)", read_text(host.root / "proc/driver/nvidia/version"))
    driver = loaded[1] if loaded else ""
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
    names = [row[0] for row in listed]
    known = driver or (listed[0][1] if listed else "")
    facts: dict[str, Any] = {"gpus": names, "driver": known, "devices": devices, "libcuda": library}
    if listed:
        code, said = run_probe([str(tool), "--query-gpu=compute_cap", "--format=csv,noheader"], host.variables)
        found = re.findall(r"^(\d{1,2})\.(\d)\s*$", said, re.MULTILINE) if code == 0 else []
        facts["chips"] = sorted({f"sm_{major}{minor}" for major, minor in found})
        counted = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        facts["cuda"] = _cuda(known)
        if library:
            cuda = f" (CUDA {', '.join(facts['cuda'])})" if facts["cuda"] else ""
            return [HostFinding("GPU", "ok", f"{counted}, driver {known}{cuda}, {library}", facts=facts)]
        hint = "install the driver's libraries, or pass them into this container (--gpus all, --nv)"
        return [HostFinding("GPU", "warn", f"{counted}, but libcuda.so.1 is not found", hint, facts)]
    if tool or driver or devices:
        parts = [f"driver {driver}" if driver else "no driver is loaded"]
        parts += [f"nvidia-smi: {trouble}"] if trouble else ([] if tool else ["no nvidia-smi"])
        parts += [", ".join(devices)] if devices else ["no /dev/nvidia0"]
        hint = "load or repair NVIDIA's driver (dmesg tells why), or ask the job for GPUs"
        if driver and not devices:
            hint = "this container was started without its GPUs (--gpus all, --nv)"
        return [HostFinding("GPU", "warn", "; ".join(parts), hint, facts)]
    if (host.root / "dev/kfd").exists():
        return [_amd(host)]
    what = "none: artifacts for CUDA can be built here, not verified"
    return [HostFinding("GPU", "info", what, "verify them in a job on a node with GPUs", facts)]


def _amd(host: Host) -> HostFinding:
    """Check AMD GPUs as the kernel driver lists them: topology nodes with compute units."""
    paths = (host.root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    nodes = [text for text in map(read_text, paths) if re.search(r"^simd_count [1-9]", text, re.MULTILINE)]
    count = len(nodes)
    # 90010 is gfx90a: two decimal digits each for minor version and stepping, which the name has in hexadecimal.
    versions = {int(n) for text in nodes for n in re.findall(r"^gfx_target_version (\d{5,6})$", text, re.MULTILINE)}
    driver = read_text(host.root / "sys/module/amdgpu/version").strip()
    facts = {"gpus": ["AMD"] * count, "driver": driver, "devices": ["kfd"]}
    facts["chips"] = [f"gfx{one // 10000}{one // 100 % 100:x}{one % 100:x}" for one in sorted(versions)]
    what = f"{count} × AMD, driver {driver or 'of the kernel'}"
    if os.access(host.root / "dev/kfd", os.R_OK | os.W_OK) and count:
        return HostFinding("GPU", "ok", what, facts=facts)
    hint = "join the groups that own /dev/kfd and /dev/dri (render, video), or ask the job for GPUs"
    return HostFinding("GPU", "warn", f"{what}, but /dev/kfd cannot be used", hint, facts)


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


def _cuda(driver: str) -> list[str]:
    """Return the major CUDA versions that a driver supports (data/compatibility.toml)."""
    from envbuild.compat.rows import load_rows
    from envbuild.compat.versions import older

    fitting = (row for row in load_rows().drivers if older(driver, row.minimum) is False)
    return [row.cuda.removeprefix(">=").partition(",")[0] for row in fitting]


def clock(host: Host) -> list[HostFinding]:
    """Check whether the clock is plausible and synchronised."""
    newest = max((path.stat().st_mtime for path in Path(envbuild.__file__).parent.glob("*.py")), default=0.0)
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if time.time() < newest - 86400:
        hint = "set the clock (chrony, ntpd): certificates are refused and builds are dated wrongly"
        return [HostFinding("clock", "warn", f"{now} is before envbuild itself was written", hint)]
    function = getattr(ctypes.CDLL(None), "adjtimex", None)
    # struct timex, all 0: read only
    state = None if function is None else function(ctypes.create_string_buffer(512))
    if state == _TIME_ERROR:
        what = f"{now}; the kernel does not report a synchronised clock"
        hint = "on cluster nodes let chrony or ntpd run; in a virtual machine its host may do it"
        return [HostFinding("clock", "info", what, hint, {"synchronised": False})]
    return [HostFinding("clock", "ok", now, facts={"synchronised": state is not None and state >= 0})]


def locale(host: Host) -> list[HostFinding]:
    """Check whether file names and output use UTF-8, and whether the configured locale exists."""
    named = next((host.variables[n] for n in ("LC_ALL", "LC_CTYPE", "LANG") if host.variables.get(n)), "")
    encoding = sys.getfilesystemencoding()
    if encoding.lower() != "utf-8":
        what = f"{named or 'none'}: names of files are {encoding}"
        return [HostFinding("locale", "warn", what, "export LC_ALL=C.UTF-8")]
    tool = find("locale", host.variables)
    if named and tool:
        code, said = run_probe([tool, "-a"], host.variables)
        known = {_plain(line) for line in said.splitlines()} if code == 0 else set()
        if known and _plain(named) not in known | {"c", "posix"}:
            hint = "export LC_ALL=C.UTF-8, or let the administrator generate it (locale-gen)"
            return [HostFinding("locale", "warn", f"{first_line(named)} is not installed", hint)]
    return [HostFinding("locale", "ok", f"{first_line(named) or 'none named'}, {encoding}")]


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "")


def own_name(host: Host) -> list[HostFinding]:
    """Check whether this host's name resolves to an address that other hosts reach, not to Debian's 127.0.1.1."""
    name = socket.gethostname()
    lines = (line.partition("#")[0].split() for line in read_text(host.root / "etc/hosts").splitlines())
    in_file = [words[0] for words in lines if name in words[1:]]
    facts: dict[str, Any] = {"hostname": name, "hosts": in_file}
    if loop := next(filter(_loopback, in_file), None):
        hint = (
            "harmless to jobs that envbuild writes, which pass addresses on; elsewhere torchrun's nodes "
            f"meet at {loop} or hang: give {name} its own address in /etc/hosts"
        )
        return [HostFinding("own name", "warn", f"/etc/hosts gives {loop} for {name}", hint, facts)]
    try:
        found = sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = f"give {name} its address in /etc/hosts or DNS: torchrun without --local-addr stops at once"
        return [HostFinding("own name", "warn", f"{name} means no address: {why}", hint, facts)]
    what = f"{name} means {', '.join(found)}"
    if all(map(_loopback, found)):
        return [
            HostFinding("own name", "warn", f"{what} alone", f"give {name} its own address in /etc/hosts or DNS", facts)
        ]
    return [HostFinding("own name", "ok", what, facts={**facts, "addresses": found})]


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
