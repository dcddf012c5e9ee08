"""Data model of a preflight: facts of nodes, nodes, requirements of a job, findings."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FAIL, WARN = "fail", "warn"
SPEED = "speed"
UNLIMITED = -1
UNKNOWN = "?"
# Variable in which a job's script passes the files that show the adapters of the job's fabric on a node.
DEVICES = "ENVBUILD_DEVICES"
# Variable in which it passes the folder of IMEX's channels, if NVLink may join the nodes.
IMEX = "ENVBUILD_IMEX"
# Number of nodes or names that a line shows.
SHOWN = 6
# Names of packages with NCCL, without the CUDA version at the end.
_NCCL = ("nvidia-nccl", "conda:nccl")
_LISTS = ("interfaces", "names")


@dataclass(frozen=True)
class Facts:
    """Facts of one node. Sizes are in bytes, -1 if unknown; `memlock` is in bytes, or UNLIMITED.

    `source` is the source address of packets to the head. `names` maps hosts to the addresses that this node
    looks up: [] for an unknown name, None for a look-up that did not end in time. `lines` maps hosts to their
    lines in /etc/hosts, `reverse` addresses to names. `provider` is "" if the provider is present or not
    required, else the reason of its absence; `imex` likewise for a channel of IMEX. `changed` lists the files that
    differ from the environment's manifest, UNKNOWN if they were not compared in time. `stack` is why ranks do not load
    the network libraries that the site names, or ""; `loaded` has the paths of those that they load, by name, and
    `inventory` is a digest of the node's own. `speeds` are the figures of
    speed.py, if they were requested.
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
    changed: str = UNKNOWN
    shm: int = -1
    run_free: int = -1
    tmp_free: int = -1
    gpus: int = 0
    driver: str = ""
    provider: str = ""
    imex: str = ""
    stack: str = ""
    loaded: dict[str, str] = field(default_factory=dict)
    inventory: str = ""
    memlock: int = UNLIMITED
    cores: int = 0
    cores_allowed: int = 0
    names: dict[str, list[str] | None] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    reverse: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)


def facts_of(message: object) -> Facts:
    """Return the facts in a node's message. Raises ValueError when the message is malformed."""
    if not isinstance(message, dict):
        raise ValueError("facts are no table")
    made = {}
    for name, default in vars(Facts()).items():
        value = message.get(name, default)
        if type(value) is not type(default) or (isinstance(value, dict) and not _fits(name, value)):
            raise ValueError(f"{name} has an unexpected value")
        made[name] = value
    return Facts(**made)


def _fits(name: str, table: Mapping[str, Any]) -> bool:
    if name == "speeds":
        return all(isinstance(value, float) and 0 <= value < float("inf") for value in table.values())
    if name not in _LISTS:
        return all(isinstance(value, str) for value in table.values())
    lists = [value for value in table.values() if value is not None or name != "names"]
    return all(isinstance(entry, list) and all(isinstance(x, str) for x in entry) for entry in lists)


@dataclass(frozen=True)
class Requirements:
    """Requirements of the job on its nodes; "" and 0 require nothing.

    `manifest` is the sha256 of the environment's manifest. `shm` and `free` are in bytes; `pins` is whether the
    adapters of `provider` send from pinned memory, `fast` whether a slow node is a failure.
    """

    digest: str = ""
    gpus: int = 0
    provider: str = ""
    arch: str = ""
    shm: int = 0
    free: int = 0
    pins: bool = False
    manifest: str = ""
    fast: bool = False


@dataclass(frozen=True)
class Node:
    """The head's final knowledge of one node.

    `facts` is None when the node did not answer; `finished` is whether it completed its part. `seen` is its
    address as seen by the head. `ahead_s` is its clock minus the head's, with an error of `error_s`. `pairs`
    maps other nodes to the results of connections to them, `sent` some to Gbit/s. `shared` is the reason why the
    run's folder is not the head's, or "". `doubled` is whether two processes claim to be this node. `error` is
    the reason why the node's connection ended.
    """

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
    sent: Mapping[int, float] = field(default_factory=dict)
    shared: str = ""
    doubled: bool = False
    error: str = ""

    @property
    def known(self) -> Facts:
        """The facts; empty ones for a node that did not answer."""
        return self.facts or Facts()


@dataclass(frozen=True)
class Finding:
    """A `fault` on `nodes` (numbers; empty: in the whole job), and its `remedy`. `status` is FAIL or WARN."""

    status: str
    check: str
    nodes: tuple[int, ...]
    fault: str
    remedy: str


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address, which no other host can reach."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def listed(nodes: Sequence[Node], numbers: Sequence[int]) -> str:
    """Return the nodes as text: `n1 (10.0.0.1), n2 (10.0.0.2) and 6 more`."""
    return few([f"{nodes[number].host} ({nodes[number].address})" for number in numbers])


def few(words: Sequence[str]) -> str:
    """Return the words as text: `a, b and 6 more`."""
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


def torch_version(facts: Facts) -> str:
    """Return the version of torch, or "" without torch."""
    return facts.packages.get("torch") or facts.packages.get("conda:pytorch", "")


def nccl_version(facts: Facts) -> str:
    """Return the version of the package with NCCL, or "" if there is no such package."""
    return next((facts.packages[name] for name in sorted(facts.packages) if is_nccl(name)), "")


def is_nccl(name: str) -> bool:
    return name.startswith(_NCCL)
