"""Facts of this node, which a preflight compares with those of other nodes. Nothing here imports torch.

Sources: getifaddrs(3), hosts(5), the kernel's Documentation/ABI/testing/sysfs-class-net, PEP 376 and 566
(installed packages), conda-meta, and envbuild.json of envbuild/contract/state.py.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ..loaded import interfaces
from . import host as this_host
from .files import FileCheck, changed_files
from .model import DEVICES, IMEX, UNKNOWN, Facts
from .stack import STACK, loaded_stack

_LOOKUP_S = 4.0
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def collect(
    environ: Mapping[str, str],
    head: str,
    interface: str,
    hosts: Sequence[str],
    addresses: Iterable[str],
    provider: str,
    files: FileCheck | None,
) -> Facts:
    """Return the facts of this node, with `hosts` and `addresses` looked up, and the environment's `files` compared.

    Every probe has a time limit of seconds, so that a dead service does not block this.
    """
    state = _state(Path(sys.prefix))
    devices = environ.get(DEVICES, "")
    channels = environ.get(IMEX, "") if environ.get("NCCL_MNNVL_ENABLE") != "0" else ""
    jobs: dict[str, Callable[[], Any]] = {
        "gpus": lambda: this_host.gpus(environ),
        "provider": lambda: this_host.missing_provider(provider, devices, state) if provider else "",
        "imex": lambda: this_host.missing_channel(channels) if channels else "",
        **({"stack": partial(loaded_stack, environ)} if environ.get(STACK) else {}),
        **({"files": partial(changed_files, Path(sys.prefix), files)} if files else {}),
        **{f"name {host}": partial(this_host.addresses_of, host) for host in hosts},
        **{f"reverse {address}": partial(this_host.name_of, address) for address in addresses},
    }
    limits = {"name": _LOOKUP_S, "reverse": _LOOKUP_S, "files": files.limit_s if files else 0.0}
    results = this_host.at_once(jobs, this_host.TOOL_S + 1, limits)
    late: tuple[str, dict[str, str], str] = ("its network libraries could not be loaded in time", {}, "")
    stack, loaded, digest = results.get("stack", late) if environ.get(STACK) else ("", {}, "")
    looked_up = {host: results.get(f"name {host}") for host in hosts}
    return Facts(
        hostname=socket.gethostname(),
        source=source_towards(head),
        arch=platform.machine(),
        python=platform.python_version(),
        executable=sys.executable,
        interfaces=interfaces(),
        mtu=this_host.number(f"/sys/class/net/{interface}/mtu"),
        packages=packages(Path(sys.prefix)),
        artifact=str(state.get("artifact", "")),
        digest=state_digest(state),
        changed=results.get("files", UNKNOWN),
        shm=this_host.size("/dev/shm")[0],
        run_free=this_host.size(environ.get("ENVBUILD_RUN", ""))[1],
        tmp_free=this_host.size(environ.get("TMPDIR") or "/tmp")[1],
        gpus=results.get("gpus") or 0,
        driver=this_host.driver(this_host.text("/proc/driver/nvidia/version")),
        provider=results.get("provider", "fi_info did not end"),
        imex=results.get("imex", ""),
        stack=stack,
        loaded=loaded,
        inventory=digest,
        memlock=this_host.limit(resource.RLIMIT_MEMLOCK),
        cores=os.cpu_count() or 0,
        cores_allowed=len(os.sched_getaffinity(0)),
        names=looked_up,
        lines=hosts_lines(this_host.text("/etc/hosts"), hosts),
        reverse={address: name for address in addresses if (name := results.get(f"reverse {address}"))},
        variables={name: environ[name] for name in _VARIABLES if environ.get(name)},
    )


def source_towards(address: str) -> str:
    """Return the source address of packets to `address`, or "" without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def hosts_lines(text: str, names: Iterable[str]) -> dict[str, str]:
    """Return the first line of a hosts(5) file for each of `names`: name → `line 3: 127.0.1.1 n1`."""
    names_left = set(names)
    lines_of: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        for word in words[1:]:
            if word in names_left and word not in lines_of:
                lines_of[word] = f"line {number}: {' '.join(words)}"[:200]
    return lines_of


def state_digest(state: Mapping[str, Any]) -> str:
    """Return the digest of the artifact in envbuild.json, as envbuild computes it; "" if the file names none."""
    try:
        content = [state["artifact"], state["target"], state["python_version"]]
        content.append([[str(part) for part in package] for package in state["packages"]])
        if state.get("layers"):
            keys = ("name", "version", "files", "path")
            content.append([[str(layer.get(key, "")) for key in keys] for layer in state["layers"]])
    except (KeyError, TypeError, AttributeError):
        return ""
    return "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()


def packages(prefix: Path) -> dict[str, str]:
    """Return name → version of the installed packages; conda packages as `conda:NAME`."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        try:
            name = distribution.metadata["Name"]
        except (OSError, UnicodeDecodeError):  # metadata in another encoding: pip installs it, too
            continue
        # Of two distributions, the first one is imported.
        if isinstance(name, str):
            versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), str(distribution.version))
    for path in glob.glob(f"{glob.escape(str(prefix))}/conda-meta/*.json"):
        name, _, rest = os.path.basename(path)[: -len(".json")].rpartition("-")[0].rpartition("-")
        if name:
            versions[f"conda:{name}"] = rest
    return versions


def _state(prefix: Path) -> dict[str, Any]:
    try:
        state = json.loads((prefix / "envbuild.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
