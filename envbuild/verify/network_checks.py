"""Checks on the path of the ranks' traffic: mapped libraries, bandwidth, and the source layers' own commands."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envbuild import process
from envbuild.artifacts.state import BuiltLayer
from envbuild.errors import EnvbuildError
from envbuild.fabrics import Fabric
from envbuild.recipe.accelerators import gpu_families
from envbuild.verify.model import Check, Report, judge
from envbuild.verify.network import PLUGIN, nccl_version
from envbuild.verify.subject import Nodes, Subject

_KEPT_TEXT = 2000
_LAYER_TIMEOUT_S = 60.0
_POLL_S = 0.05


def check_libraries(subject: Subject, fabric: Fabric, report: Report) -> Check:
    """Check that every rank maps the artifact's own NCCL in the locked version.

    If the fabric needs a plugin and libfabric, both must come from the artifact or from the recipe's host layers.
    """
    locked, ranks = nccl_version(subject.state), report["ranks"]
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
    if name.startswith(tuple(one.net_plugin for one in gpu_families())):
        return "plugin"
    stem = name.split(".so")[0]
    if stem in {one.nccl for one in gpu_families()}:
        return "nccl"
    return "libfabric" if stem == "libfabric" else "other"


def _of_layer(subject: Subject, layer: BuiltLayer, path: str) -> bool:
    """Return whether the mapped file `path` belongs to the source layer: its folder on the host, or the artifact."""
    folders = (layer.path, os.path.realpath(layer.path)) if layer.path else subject.roots
    return path.startswith(tuple(folder.rstrip("/") + "/" for folder in folders))


def check_bandwidth(report: Report, floor: float, floor_of: str) -> Check:
    """Check that the bus bandwidth of the largest measured all-reduce reaches `floor` (GB/s; 0 always passes).

    `floor_of` names who set the floor: the recipe or the site.
    """
    rows = report.get("bandwidth") or []
    one_rank, reached = report["world_size"] < 2, rows[-1]["busbw"] if rows else 0.0
    if one_rank:
        seen = "one rank has no bandwidth"
    else:
        seen = f"{reached:.3g} GB/s at {_size(rows[-1]['bytes'])}" if rows else "nothing was measured"
    return judge(
        "bandwidth",
        one_rank or (bool(rows) and reached >= floor),
        seen=seen,
        expected=f"at least {floor:g} GB/s ({floor_of}'s busbw_floor)" if floor else "a measurement; no floor is set",
        evidence={"backend": report.get("backend"), "floor": floor, "table": rows},
    )


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def check_layer(layer: BuiltLayer, nodes: Nodes, work: Path) -> Check:
    """Check that a source layer's own command exits with 0 on a node, and fi_info reports the requested provider."""
    program, *arguments = layer.check
    log = work / f"layer-{layer.name}.log"
    wanted = _provider(program, arguments)
    code: int | None = None
    try:
        # FI_PROVIDER overrides the caller's: another provider would hide the requested one.
        agent = nodes.start(0, program, arguments, {"FI_PROVIDER": wanted} if wanted else {}, log)
        deadline = time.monotonic() + _LAYER_TIMEOUT_S
        try:
            while agent.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            code = agent.poll()
        finally:
            nodes.stop([agent])
        text = log.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, EnvbuildError) as error:
        text = str(error)
    lines = text[-_KEPT_TEXT:].splitlines()[-process.TAIL_LINES :]
    good = code == 0 and (not wanted or f"provider: {wanted}" in text)
    seen = f"{layer.name} {layer.version}: " + ("did not end in time" if code is None else f"exit {code}")
    if good:
        seen += f", provider {wanted}" if wanted else ""
    else:
        seen += "\n" + ("\n".join(f"    {line}" for line in lines) or "    (it printed nothing)")
    return judge(
        f"layer:{layer.name}",
        good,
        title=" ".join(layer.check),
        seen=seen,
        expected="exit 0" + (f" and a line `provider: {wanted}`" if wanted else ""),
        evidence={"command": list(layer.check), "returncode": code, "output": "\n".join(lines)},
    )


def _provider(program: str, arguments: list[str]) -> str:
    """Return the provider that `fi_info -p NAME` asks for; "" for any other command."""
    if os.path.basename(program) != "fi_info" or "-p" not in arguments[:-1]:
        return ""
    return arguments[arguments.index("-p") + 1]
