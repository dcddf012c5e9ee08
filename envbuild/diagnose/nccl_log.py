"""NCCL's log of one rank: which version, which network, which plugin, over what its channels go, what went wrong.

A line is `host:pid:tid [gpu] NCCL INFO text`, or, for warnings, `host:pid:tid [gpu] file.cc:line NCCL WARN text`; where
others collected it, something may stand before it.
Source: NVIDIA/nccl, src/debug.cc of v2.18.5-1 to v2.29.7-1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "version", "network", "transport", "plugin", "provider",
    "plugin missing", "plugin failed", "no adapter", "fatal", "error",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a line of one kind says: `regex` is searched in its text, and its first group is what is kept.

    `texts` are the constant parts of the message, as they stand in the library `of` ("nccl" or "plugin");
    `source` is where it is printed, `cause` what is behind a failure.
    """

    kind: Kind
    regex: str
    texts: tuple[str, ...]
    source: str
    cause: str = ""
    of: str = "nccl"


_NO_PLUGIN = (
    "NCCL did not find its network plugin: put aws-ofi-nccl into [layers] of the recipe, or set NCCL_NET_PLUGIN to "
    "the path of libnccl-net-ofi.so"
)
_BAD_PLUGIN = (
    "the plugin was found and cannot be loaded: its libfabric is missing or older than the one it was built with, or "
    "it does not speak a net API of this NCCL (see `envbuild explain`)"
)
_NO_PROVIDER = (
    "the plugin found no device of the fabric: adapters that are not visible (a container without /dev/infiniband), "
    "the wrong FI_PROVIDER, or a libfabric built without this provider"
)
_NO_ADAPTER = (
    "NCCL sees no InfiniBand or RoCE adapter: /dev/infiniband is not in the container, the adapter's driver is not "
    "loaded (ibv_devinfo), or NCCL_IB_HCA or NCCL_IB_DISABLE leaves it out"
)
# A release in brackets is one that prints it; others between the first and the last do as well.
PATTERNS = (
    Pattern("version", r"NCCL version ([\d.]+\S*)", ("NCCL version ",), "src/init.cc [2.18.5, 2.29.7]"),
    Pattern("network", r"Using network (.+?)\s*$", ("Using network %s",), "src/init.cc [2.18.5, 2.29.7]"),
    Pattern("transport", r"via ((?:NET|COLLNET)/[^/]+(?=/)|P2P|SHM|NVLS)", ("via NET/%s/%d",),
            "src/transport/net.cc, p2p.cc, shm.cc [2.18.5, 2.29.7]"),
    Pattern("plugin", r"Loaded net plugin (.+?) \(v\d+\)", ("NET/Plugin: Loaded net plugin %s (v",),
            "src/net.cc [2.18.5], src/plugin/net/net_v*.cc [2.26.2, 2.29.7]"),
    Pattern("provider", r"NET/OFI Selected [Pp]rovider is ([^\s,(]+)", ("Selected provider is %s, fabric is %s",),
            "src/nccl_ofi_net.c [1.14.0], .cpp [1.21.1]", of="plugin"),
    Pattern("plugin missing", r"(NET/Plugin ?: .*No plugin found.*)", (), "src/net.cc [2.18.5, 2.21.5]", _NO_PLUGIN),
    Pattern("plugin missing", r"(NET/Plugin: Could not find:.*)", ("%s/Plugin: Could not find:%s",),
            "src/plugin/plugin_open.cc [2.26.2, 2.29.7]", _NO_PLUGIN),
    Pattern("plugin failed", r"(NET/Plugin ?: (?:Most recent p|P)lugin load .*returned \d+ ?: (?!.*No such file).*)",
            (), "src/net.cc [2.18.5, 2.21.5]", _BAD_PLUGIN),
    Pattern("plugin failed", r"(NET/Plugin: \S*[./]\S*: .*)", (), "src/plugin/plugin_open.cc [2.26.2, 2.29.7]",
            _BAD_PLUGIN),
    Pattern("plugin failed", r"(External network plugin \S+ is unsupported.*)",
            ("External network plugin %s is unsupported",), "src/plugin/net.cc [2.28.9, 2.29.7]", _BAD_PLUGIN),
    Pattern("no adapter", r"(Failed to initialize NET plugin IB\b.*)", ("Failed to initialize NET plugin %s",),
            "src/plugin/net.cc [2.28.9, 2.29.7]", _NO_ADAPTER),
    Pattern("plugin failed", r"(Failed to initialize NET plugin (?!Socket\b).*)",
            ("Failed to initialize NET plugin %s",), "src/plugin/net.cc [2.28.9, 2.29.7]", _NO_PROVIDER),
    Pattern("plugin failed", r"(NET/OFI \S+ initialization failed.*)", (" initialization failed",),
            "src/nccl_ofi_net.c [1.14.0], .cpp [1.21.1]", _NO_PROVIDER, of="plugin"),
    Pattern("plugin failed", r"(NET/OFI Unable to find a protocol that worked.*)",
            ("Unable to find a protocol that worked.  Failing initialization.",),
            "src/nccl_ofi_net.c [1.14.0], .cpp [1.21.1]", _NO_PROVIDER, of="plugin"),
    Pattern("plugin failed", r"(NET/OFI OFI fi_getinfo\(\) call failed.*)", ("OFI fi_getinfo() call failed: %s",),
            "src/nccl_ofi_rdma.c [1.14.2], .cpp [1.21.1]", _NO_PROVIDER, of="plugin"),
    Pattern("plugin failed", r"(NET/OFI Couldn't open a fabric .*)", ("Couldn't open a fabric",),
            "src/nccl_ofi_sendrecv.c [1.14.2], .cpp [1.21.1]",
            "libfabric cannot open the adapter: on Slingshot the job has no VNI (start it by the batch system with its "
            "network options), elsewhere permissions of the device", of="plugin"),
    Pattern("no adapter", r"(NET/IB ?: No device found.*)", ("NET/IB : No device found.",),
            "src/transport/net_ib.cc [2.18.5, 2.28.9], net_ib/init.cc [2.29.7]", _NO_ADAPTER),
    Pattern("no adapter", r"(Failed to open libibverbs.*)", ("Failed to open libibverbs.so[.1]",),
            "src/misc/ibvsymbols.cc [2.18.5, 2.29.7]",
            "the library libibverbs is missing: add libibverbs1 and ibverbs-providers to [image] packages, or rdma-core"
            " to the nodes"),
    Pattern("fatal", r"(Error: network .* not found.*)", ("Error: network %s not found.",),
            "src/net.cc [2.18.5], src/plugin/net.cc [2.26.2]", _NO_PLUGIN),
    Pattern("fatal", r"(Failed to initialize any NET plugin.*)", ("Failed to initialize any NET plugin",),
            "src/plugin/net.cc [2.27.7, 2.29.7]", _NO_PLUGIN),
    Pattern("fatal", r"(Bootstrap ?: no socket interface found.*)", ("Bootstrap : no socket interface found",),
            "src/bootstrap.cc [2.18.5, 2.29.7]", "NCCL_SOCKET_IFNAME names no interface of this node"),
    Pattern("fatal", r"(Duplicate GPU detected.*)", ("Duplicate GPU detected",), "src/init.cc [2.18.5, 2.29.7]",
            "fewer GPUs than ranks on a node: lower nproc_per_node"),
    Pattern("fatal", r"^(Cuda failure .*)", ("Cuda failure",), "src/include/checks.h [2.18.5, 2.29.7]",
            "CUDA cannot be used: no GPU is visible, or its driver is older than the CUDA of this NCCL (see nvidia-smi "
            "and `envbuild explain`)"),
    Pattern("fatal", r"(Mismatched NCCL version detected.*)", ("Mismatched NCCL version detected",),
            "src/init.cc [2.26.2, 2.29.7]", "the nodes hold different environments: give all the same one"),
)  # fmt: skip
# Printed by the plugin's first attempt, before the one that works; and by NCCL for plugins that nobody asked for.
_HARMLESS = re.compile(
    r"NET/OFI No eligible providers were found|(TUNER|PROFILER|GIN|RMA|ENV)/Plugin"
)
_SAID = re.compile(r"\bNCCL (?P<level>INFO|WARN|TRACE|ATTN|ABORT) (?P<text>.*)")
# Printed without a head, in some releases on standard output even where the log goes to a file.
_VERSION = re.compile(r"\bNCCL version (\d\S*)\s*$")
FAULTS: tuple[Kind, ...] = ("plugin missing", "plugin failed", "no adapter", "fatal", "error")
_KNOWN = tuple((pattern, re.compile(pattern.regex)) for pattern in PATTERNS)


@dataclass(frozen=True, slots=True)
class NcclFault:
    """A line that tells of a failure: the line's text, and what is behind it ("" if nobody knows)."""

    kind: Kind
    text: str
    cause: str


@dataclass(frozen=True, slots=True)
class NcclLog:
    """What one rank's log says; every list in the order of the log, without repetitions.

    `networks` are those that NCCL used for its communicators, `transports` what its channels go over ("NET/IB",
    "P2P", "SHM"), `providers` libfabric's, `plugins` those loaded. Of the `faults`, NCCL goes on after a plugin that
    is missing or failed and after a missing adapter, with another network; "fatal" ended the run, "error" is any other
    warning. `lines` counts what was understood.
    """

    version: str
    networks: tuple[str, ...]
    transports: tuple[str, ...]
    plugins: tuple[str, ...]
    providers: tuple[str, ...]
    faults: tuple[NcclFault, ...]
    lines: int

    def having(self, *kinds: Kind) -> list[NcclFault]:
        """The faults of these kinds, in their order."""
        return [fault for kind in kinds for fault in self.faults if fault.kind == kind]


def parse_nccl_log(text: str) -> NcclLog:
    """What `text`, the log of one rank, says. Lines that are not NCCL's are passed over, so that it may stand
    between others."""
    return _read(text.splitlines())


def _read(lines: Iterable[str]) -> NcclLog:
    found: dict[Kind, list[str]] = {}
    faults: dict[tuple[Kind, str], NcclFault] = {}
    count = 0
    for kind, value, cause in _events(lines):
        count += 1
        if kind in FAULTS:
            faults.setdefault((kind, value), NcclFault(kind, value, cause))
        elif value not in found.setdefault(kind, []):
            found[kind].append(value)
    versions = found.get("version", [""])
    return NcclLog(
        version=versions[0],
        networks=tuple(found.get("network", ())),
        transports=tuple(found.get("transport", ())),
        plugins=tuple(found.get("plugin", ())),
        providers=tuple(found.get("provider", ())),
        faults=tuple(faults.values()),
        lines=count,
    )


def _events(lines: Iterable[str]) -> Iterator[tuple[Kind, str, str]]:
    """(kind, what is kept, cause) of each line that says something."""
    for line in lines:
        match = _SAID.search(line)
        if match is None:
            if version := _VERSION.search(line):
                yield "version", version[1], ""
            continue
        text = match["text"].strip()
        if _HARMLESS.search(text):
            continue
        for pattern, regex in _KNOWN:
            if said := regex.search(text):
                yield pattern.kind, said[1], pattern.cause
                break
        else:
            if match["level"] == "WARN":
                yield "error", text, ""
