"""What a preflight knows and finds: facts of nodes, nodes, what a job wants of them, findings."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FAIL, WARN = "fail", "warn"
UNLIMITED = -1
# The variable in which a job's script tells of the files by which a node shows the adapters of the job's fabric.
DEVICES = "ENVBUILD_DEVICES"
# How many nodes or names a line shows.
SHOWN = 6
# Names of the package that holds NCCL, without the CUDA version at its end.
_NCCL = ("nvidia-nccl", "conda:nccl")
_LISTS = ("interfaces", "names")


@dataclass(frozen=True)
class Facts:
    """One node. Sizes are in bytes, -1 where they cannot be told; `memlock` is UNLIMITED or a limit.

    `source` is the address from which packets to the head leave; `names` are the addresses of hosts as this node
    looks them up, [] for an unknown name, None when nothing answered in time; `lines` tells where /etc/hosts has them;
    `reverse` the names of addresses. `provider` is "" when nothing was asked for or it is there, else why not.
    """

    hostname: str = ""
    source: str = ""
    arch: str = ""
    python: str = ""
    executable: str = ""
    interfaces: dict[str, list[str]] = field(default_factory=dict)
    mtu: int = -1
    packages: dict[str, str] = field(default_factory=dict)
    artifact: str = ""
    digest: str = ""
    shm: int = -1
    run_free: int = -1
    tmp_free: int = -1
    gpus: int = 0
    driver: str = ""
    provider: str = ""
    memlock: int = UNLIMITED
    cores: int = 0
    cores_allowed: int = 0
    names: dict[str, list[str] | None] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    reverse: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


def facts_of(message: object) -> Facts:
    """Facts that arrived from a node. Raises ValueError when they are none."""
    if not isinstance(message, dict):
        raise ValueError("facts are no table")
    made = {}
    for name, default in vars(Facts()).items():
        value = message.get(name, default)
        if type(value) is not type(default) or (isinstance(value, dict) and not _fits(name, value)):
            raise ValueError(f"{name} is not what it should be")
        made[name] = value
    return Facts(**made)


def _fits(name: str, table: Mapping[str, Any]) -> bool:
    if name not in _LISTS:
        return all(isinstance(value, str) for value in table.values())
    lists = [value for value in table.values() if value is not None or name != "names"]
    return all(isinstance(one, list) and all(isinstance(x, str) for x in one) for one in lists)


@dataclass(frozen=True)
class Wanted:
    """What the job asks of its nodes: "" and 0 ask nothing. `shm` and `free` are bytes; `pins` is whether the adapters
    of `provider` send from pinned memory."""

    digest: str = ""
    gpus: int = 0
    provider: str = ""
    arch: str = ""
    shm: int = 0
    free: int = 0
    pins: bool = False


@dataclass(frozen=True)
class Node:
    """One node as the head knows it at the end. `facts` is None when it did not answer, `finished` whether it came to
    the end. `seen` is its address as the head saw it; `ahead_s` its clock less the head's, give or take `error_s`;
    `pairs` how its attempts at others ended; `shared` why the run's folder is not the head's, "" when it is; `doubled`
    that two processes say they are this node."""

    number: int
    host: str
    address: str
    interface: str = ""
    facts: Facts | None = None
    finished: bool = False
    seen: str = ""
    ahead_s: float = 0.0
    error_s: float = 0.0
    pairs: Mapping[int, str] = field(default_factory=dict)
    shared: str = ""
    doubled: bool = False
    told: str = ""

    @property
    def known(self) -> Facts:
        """The facts, empty for a node that did not answer."""
        return self.facts or Facts()


@dataclass(frozen=True)
class Finding:
    """`what` is wrong with `nodes` (numbers; none: with the job), and its `remedy`. `status` is FAIL or WARN."""

    status: str
    check: str
    nodes: tuple[int, ...]
    what: str
    remedy: str


def is_loopback(address: str) -> bool:
    """Whether no other host can reach `address`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def listed(nodes: Sequence[Node], numbers: Sequence[int]) -> str:
    """`n1 (10.0.0.1), n2 (10.0.0.2) and 6 more`."""
    return few([f"{nodes[one].host} ({nodes[one].address})" for one in numbers])


def few(words: Sequence[str]) -> str:
    """`a, b and 6 more`."""
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


def torch_version(facts: Facts) -> str:
    """torch's version, "" without it."""
    return facts.packages.get("torch") or facts.packages.get("conda:pytorch", "")


def nccl_version(facts: Facts) -> str:
    """The version of the package with NCCL, "" where torch brings its own or none."""
    return next((facts.packages[name] for name in sorted(facts.packages) if is_nccl(name)), "")


def is_nccl(name: str) -> bool:
    return name.startswith(_NCCL)
