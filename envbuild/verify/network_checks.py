"""Checks on the path of the ranks' traffic: mapped libraries, bandwidth, and the source layers' own commands."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envbuild import process
from envbuild.artifacts.state import BuiltLayer, State
from envbuild.errors import EnvbuildError
from envbuild.fabrics import Fabric
from envbuild.recipe.accelerators import gpu_families
from envbuild.verify.model import Check, judge
from envbuild.verify.network_variables import PLUGIN
from envbuild.verify.nodes import Nodes
from envbuild.verify.subject import Subject

LIBRARIES, BANDWIDTH = "NCCL, plugin and libfabric as loaded", "all-reduce bus bandwidth"
Report = Mapping[str, Any]
_NCCL_WHEEL = re.compile(r"nvidia-nccl-cu\d+|nccl")
_KEPT_TEXT = 2000
_LAYER_TIMEOUT_S = 60.0
_POLL_S = 0.05


def nccl_version(state: State) -> str:
    """Return the version of NCCL that the artifact was built with; "" if torch contains its own NCCL."""
    built = next((layer.version for layer in state.layers if layer.name == "nccl"), "")
    if built:
        return built.split("-")[0]
    return next((v for name, v, _ in state.packages if _NCCL_WHEEL.fullmatch(name)), "")


def check_libraries(subject: Subject, fabric: Fabric, report: Report) -> Check:
    """Check that every rank maps the artifact's own NCCL in the locked version.

    If the fabric needs a plugin and libfabric, both must come from the artifact or from the recipe's host
    layers.
    """
    state = subject.state
    layers = {layer.name: layer for layer in state.layers}
    locked = nccl_version(state)
    wrong: dict[str, list[int]] = {}
    for rank in report["ranks"]:
        for text in _library_problems(subject, fabric, layers, locked, rank):
            wrong.setdefault(text, []).append(rank["rank"])
    first = report["ranks"][0]
    return judge(
        "libraries",
        LIBRARIES,
        not wrong,
        seen="; ".join(f"{text} (ranks {', '.join(map(str, n))})" for text, n in wrong.items())
        or f"NCCL {first.get('nccl')} of the artifact on all {len(report['ranks'])} ranks",
        expected=f"NCCL {locked or 'of torch'}, loaded from the artifact"
        + (", with its plugin and libfabric" if fabric.by_plugin else ""),
        cause="another copy is found first: LD_LIBRARY_PATH or LD_PRELOAD of the environment, a module loaded on the "
        "node; torch finds its NCCL by its own RPATH, so a newer one must replace the wheel in the environment",
        evidence={
            "nccl": {str(rank["rank"]): rank.get("nccl") for rank in report["ranks"]},
            "paths": sorted({subject.relative(p) for r in report["ranks"] for p in r["libraries"]}),
        },
    )


def _library_problems(
    subject: Subject, fabric: Fabric, layers: Mapping[str, BuiltLayer], locked: str, rank: Mapping[str, Any]
) -> list[str]:
    problems: list[str] = []
    loaded = rank.get("nccl")
    if loaded is None:
        return ["NCCL was not used"]
    if locked and locked != loaded and not locked.startswith(f"{loaded}."):
        problems.append(f"NCCL {loaded} is loaded, {locked} was locked")
    by_kind: dict[str, list[str]] = {}
    for path in rank["libraries"]:
        by_kind.setdefault(_kind(path), []).append(path)
    if len(by_kind.get("nccl", ())) > 1:
        problems.append(f"two copies of NCCL: {', '.join(by_kind['nccl'])}")
    if locked and not by_kind.get("nccl"):
        problems.append("no libnccl is mapped: torch has its own NCCL inside, the locked one is not used")
    problems += [f"NCCL is {p}, outside of the artifact" for p in by_kind.get("nccl", ()) if not subject.holds(p)]
    for kind, name in (("plugin", PLUGIN), ("libfabric", "libfabric")):
        layer = layers.get(name)
        if layer is None:
            continue
        found = by_kind.get(kind, [])
        if fabric.by_plugin and not found:
            problems.append(f"{name} is not mapped")
        problems += [
            f"{name} is {path}, not {layer.path or 'the one built for the artifact'}"
            for path in found
            if not _of_layer(subject, layer, path)
        ]
    return problems  # fmt: skip


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
    if layer.path:
        folders = {layer.path, os.path.realpath(layer.path)}
        return any(path.startswith(folder.rstrip("/") + "/") for folder in folders)
    return any(path.startswith(root + os.sep) for root in subject.roots)


def check_bandwidth(report: Report, floor: float, floor_of: str) -> Check:
    """Check that the bus bandwidth of the largest measured all-reduce reaches `floor` (GB/s; 0 always passes).

    `floor_of` names who set the floor: the recipe or the site.
    """
    rows = report.get("bandwidth") or []
    alone = report["world_size"] < 2
    best: Mapping[str, Any] = rows[-1] if rows else {"bytes": 0, "busbw": 0.0}
    seen = f"{best['busbw']:.3g} GB/s at {_size(best['bytes'])}" if rows else "nothing was measured"
    return judge(
        "bandwidth",
        BANDWIDTH,
        alone or (bool(rows) and best["busbw"] >= floor),
        seen="one rank has no bandwidth" if alone else seen,
        expected=f"at least {floor:g} GB/s ({floor_of}'s busbw_floor)" if floor else "a measurement; no floor is set",
        cause="the ranks reach each other over a slower path than meant (see the check `fabric`), other jobs share the "
        "host or its network, or the floor is not for this host",
        evidence={"backend": report.get("backend"), "floor": floor, "table": rows},
    )  # fmt: skip


def check_layer(layer: BuiltLayer, nodes: Nodes, work: Path) -> Check:
    """Check that a source layer's own command exits with 0 on a node, and fi_info reports the requested provider."""
    program, *arguments = layer.check
    log = work / f"layer-{layer.name}.log"
    wanted = _provider(program, arguments)
    code: int | None = None
    try:
        # FI_PROVIDER overrides the caller's: another provider would hide the requested one.
        chosen = {"FI_PROVIDER": wanted} if wanted else {}
        agent = nodes.start(0, program, arguments, chosen, log)
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
    said = "\n".join(text[-_KEPT_TEXT:].splitlines()[-process.TAIL_LINES :])
    ended = "did not end in time" if code is None else f"exit {code}"
    missing = wanted is not None and f"provider: {wanted}" not in text
    head = f"{layer.name} {layer.version}: {ended}"
    return judge(
        f"layer:{layer.name}",
        f"{' '.join(layer.check)}",
        code == 0 and not missing,
        seen=f"{head}, provider {wanted}" if wanted and not missing and code == 0
        else head if code == 0 and not missing else f"{head}\n{_indented(said)}",
        expected="exit 0" + (f" and a line `provider: {wanted}`" if wanted else ""),
        cause="a library that the layer needs is not on this host (see its text), or the layer was built without what "
        "its check asks for",
        evidence={"command": list(layer.check), "returncode": code, "output": said},
    )  # fmt: skip


def _provider(program: str, arguments: list[str]) -> str | None:
    """Return the provider that `fi_info -p NAME` asks for; None for any other command."""
    if os.path.basename(program) != "fi_info" or "-p" not in arguments[:-1]:
        return None
    return arguments[arguments.index("-p") + 1]


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines()) or "    (it printed nothing)"


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
