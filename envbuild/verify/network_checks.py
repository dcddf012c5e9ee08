"""Checks on the network that the ranks used: NCCL's logs, the ranks' own connections, mapped libraries, bandwidth."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envbuild.contract.state import BuiltLayer
from envbuild.fabrics import PLUGIN, Fabric
from envbuild.jobcheck.diagnose.nccl_log import Kind, NcclLog, parse_nccl_log
from envbuild.recipe.targets import gpu_families
from envbuild.verify.model import Check, Report, Subject, check_texts, judge

_MAX_LOG = 16 << 20


def rank_logs(report: Report, work: Path) -> dict[int, NcclLog]:
    """Return the parsed NCCL log of each rank that wrote one into the folder `work`."""
    logs = {}
    for rank in report["ranks"]:
        path = work / posixpath.basename(rank.get("nccl_log") or "-")
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as stream:
                logs[rank["rank"]] = parse_nccl_log(stream.read(_MAX_LOG))
    return logs


def check_nccl(fabric: Fabric, report: Report, logs: Mapping[int, NcclLog], variables: Mapping[str, str]) -> Check:
    """Check that NCCL used `fabric` on every rank and between nodes; the job's `variables` for it are evidence."""
    ranks = report["ranks"]
    nodes: dict[int, list[NcclLog]] = {}
    wrong: dict[str, list[int]] = {}
    for rank in ranks:
        log = logs.get(rank["rank"])
        nodes.setdefault(rank["group_rank"], []).extend([log] if log else [])
        for text in _rank_problems(fabric, rank, log):
            wrong.setdefault(text, []).append(rank["rank"])
    for node, of_node in sorted(nodes.items()) if len(nodes) > 1 else ():
        channels = {name for log in of_node for name in log.transports}
        names = fabric.names or tuple(name for log in of_node for name in log.networks)
        if not wrong and not channels & {f"NET/{name}" for name in names}:
            text = f"node {node} has no channel over {names[0] if names else 'any network'}"
            wrong[f"{text} (its channels: {', '.join(sorted(channels)) or 'none'})"] = []
    used = ", ".join(sorted({name for log in logs.values() for name in log.networks}))
    providers = ", ".join(sorted({name for log in logs.values() for name in log.providers}))
    causes = (fault.cause for log in logs.values() for fault in log.having(*_telling(fabric)) if fault.cause)
    # A fabric that accepts any network passes also after a plugin's failure.
    failed = next((fault.text for log in logs.values() for fault in log.having("plugin failed")), "")
    return judge(
        "fabric",
        not wrong,
        seen="; ".join(_of_ranks(numbers) + text for text, numbers in wrong.items())
        or f"NCCL over {used}{f' by provider {providers}' if providers else ''} on all {len(ranks)} ranks"
        + (f"; its plugin did not start: {failed}" if failed else ""),
        expected=_expected(fabric, len(nodes)),
        cause=next(causes, check_texts()["fabric"]["plugin" if fabric.by_plugin else "nccl"]),
        evidence={
            "fabric": fabric.name,
            "backend": report.get("backend"),
            "variables": dict(variables),
            "ranks": [
                {
                    "rank": number,
                    "version": log.version,
                    "networks": log.networks,
                    "providers": log.providers,
                    "plugins": log.plugins,
                    "transports": log.transports,
                    "notes": [fault.text for fault in log.faults][:20],
                }
                for number, log in sorted(logs.items())
            ],
        },
    )


def _rank_problems(fabric: Fabric, rank: Mapping[str, Any], log: NcclLog | None) -> list[str]:
    if rank.get("nccl") is None:
        return ["NCCL was not used: the ranks trained with gloo"]
    if log is None or not log.networks:
        return ["NCCL's log names no network"]
    other = [name for name in log.networks if fabric.names and name not in fabric.names]
    if other:
        lines = "".join(f"\n      {fault.text}" for fault in log.having(*_telling(fabric))[:3])
        return [f"NCCL used {', '.join(other)}, not {fabric.names[0]}{lines}"]
    # "tcp;ofi_rxm" is tcp with a utility provider on top of it.
    bad = [name for name in log.providers if name.split(";")[0] != fabric.provider]
    if fabric.provider and (bad or not log.providers):
        return [f"libfabric's provider is {', '.join(bad) or 'not named'}, not {fabric.provider}"]
    return []


def _telling(fabric: Fabric) -> tuple[Kind, ...]:
    """Return the kinds of NCCL faults that explain why NCCL did not use `fabric`."""
    if fabric.by_plugin:
        return ("plugin failed", "plugin missing", "fatal")
    return ("no adapter", "fatal") if fabric.adapter else ("fatal",)


def _expected(fabric: Fabric, nodes: int) -> str:
    if not fabric.names:
        return "NCCL on every rank" + (", with channels between nodes" if nodes > 1 else "")
    text = f"NCCL over {fabric.names[0]} on every rank"
    if fabric.provider:
        text += f", by libfabric's provider {fabric.provider}"
    return text + (", and channels over it between nodes" if nodes > 1 else "")


def _of_ranks(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    shown = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}: "


def check_gloo(interface: str, report: Report) -> Check:
    """Check that gloo's connections between ranks use `interface`, by the addresses that each rank reports."""
    links = _links(report["ranks"])
    wrong: list[str] = []
    for rank in report["ranks"]:
        number, interfaces = rank["rank"], rank.get("interfaces", {})
        own = sorted({local for rank, _, local in links if rank == number})
        if rank.get("gloo_ifname") != interface:
            wrong.append(f"rank {number}: GLOO_SOCKET_IFNAME is {rank.get('gloo_ifname') or 'not set'}")
        for address in own:
            if address not in interfaces.get(interface, ()) and not (interface == "lo" and address.startswith("127.")):
                name = next((name for name, addresses in interfaces.items() if address in addresses), "?")
                wrong.append(f"rank {number} talks over {address} ({name}), not {interface}")
        if not own and report["world_size"] > 1:
            wrong.append(f"rank {number} has no connection to another rank")
    return judge(
        "fabric",
        not wrong,
        seen="; ".join(wrong[:6])
        or f"gloo over {interface}: {len(links) // 2} connections between {report['world_size']} ranks",
        expected=f"every rank's connections on {interface}",
        evidence={
            "backend": report.get("backend"),
            "interface": interface,
            "connections": [f"rank {rank} to {other}: {address}" for rank, other, address in links][:200],
        },
    )


def _links(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, str]]:
    """Return (rank, other rank, the rank's own address) for each connection between two ranks."""
    # Connections to the rendezvous store are left out: the launcher chooses their network.
    stores = {_port(rank["store"]) for rank in ranks if rank.get("store")}
    ends = {
        (local, peer): rank["rank"]
        for rank in ranks
        for local, peer in rank.get("sockets", ())
        if not {_port(local), _port(peer)} & stores
    }
    return sorted(
        (number, ends[peer, local], local.rpartition(":")[0].strip("[]"))
        for (local, peer), number in ends.items()
        if ends.get((peer, local), number) != number
    )


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def check_libraries(subject: Subject, fabric: Fabric, report: Report) -> Check:
    """Check that each rank maps the artifact's own NCCL as locked, and plugin and libfabric as built or named."""
    locked, ranks = subject.state.nccl, report["ranks"]
    wrong: dict[str, list[str]] = {}
    for rank in ranks:
        for text in _library_problems(subject, fabric, locked, rank):
            wrong.setdefault(text, []).append(str(rank["rank"]))
    return judge(
        "libraries",
        not wrong,
        seen="; ".join(f"{text} (ranks {', '.join(numbers)})" for text, numbers in wrong.items())
        or f"NCCL {ranks[0].get('nccl')} of the artifact on all {len(ranks)} ranks",
        expected=f"NCCL {locked or 'of torch'}, loaded from the artifact"
        + (", with its plugin and libfabric" if fabric.by_plugin else ""),
        evidence={
            "nccl": {str(rank["rank"]): rank.get("nccl") for rank in ranks},
            "paths": sorted({subject.relative(path) for rank in ranks for path in rank["libraries"]}),
        },
    )


def _library_problems(subject: Subject, fabric: Fabric, locked: str, rank: Mapping[str, Any]) -> Iterator[str]:
    loaded = rank.get("nccl")
    if loaded is None:
        yield "NCCL was not used"
        return
    if locked and locked != loaded and not locked.startswith(f"{loaded}."):
        yield f"NCCL {loaded} is loaded, {locked} was locked"
    by_kind: dict[str, list[str]] = {"nccl": [], "plugin": [], "libfabric": [], "other": []}
    for path in rank["libraries"]:
        by_kind[_kind(path)].append(path)
    if len(by_kind["nccl"]) > 1:
        yield f"two copies of NCCL: {', '.join(by_kind['nccl'])}"
    if locked and not by_kind["nccl"]:
        yield "no libnccl is mapped: torch has its own NCCL inside, the locked one is not used"
    yield from (f"NCCL is {path}, outside of the artifact" for path in by_kind["nccl"] if not subject.holds(path))
    layers = {layer.name: layer for layer in subject.state.layers}
    for kind, name in (("plugin", PLUGIN), ("libfabric", "libfabric")):
        if (layer := layers.get(name)) is None:
            continue
        if fabric.by_plugin and not by_kind[kind]:
            yield f"{name} is not mapped"
        for path in by_kind[kind]:
            if not _of_layer(subject, layer, path):
                yield f"{name} is {path}, not {layer.path or 'the one built for the artifact'}"


def _kind(path: str) -> str:
    name = os.path.basename(path)
    if name.startswith(tuple(accelerator.net_plugin for accelerator in gpu_families())):
        return "plugin"
    stem = name.split(".so")[0]
    if stem in {accelerator.nccl for accelerator in gpu_families()}:
        return "nccl"
    return "libfabric" if stem == "libfabric" else "other"


def _of_layer(subject: Subject, layer: BuiltLayer, path: str) -> bool:
    """Return whether the mapped file `path` belongs to the source layer: its folder on the host, or the artifact."""
    folders = (layer.path, os.path.realpath(layer.path)) if layer.path else subject.roots
    return path.startswith(tuple(folder.rstrip("/") + "/" for folder in folders))


def check_bandwidth(report: Report, floor: float, floor_of: str) -> Check:
    """Check that the largest all-reduce reaches the bus bandwidth `floor` (GB/s; 0 passes), set by `floor_of`."""
    rows = report.get("bandwidth") or []
    one_rank, reached = report["world_size"] < 2, rows[-1]["busbw"] if rows else 0.0
    if one_rank:
        seen = "one rank has no bandwidth"
    else:
        size = rows[-1]["bytes"] if rows else 0
        shown = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        seen = f"{reached:.3g} GB/s at {shown}" if rows else "nothing was measured"
    return judge(
        "bandwidth",
        one_rank or (bool(rows) and reached >= floor),
        seen=seen,
        expected=f"at least {floor:g} GB/s ({floor_of}'s busbw_floor)" if floor else "a measurement; no floor is set",
        evidence={"backend": report.get("backend"), "floor": floor, "table": rows},
    )
