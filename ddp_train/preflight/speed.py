"""Speed of this node's processor, memory, network and GPUs, for comparison with the other nodes of the job.

It needs Python alone; only GPUs are measured with the artifact's torch. Each figure is the best of several measurements
of a tenth of a second: in shorter ones, a node with a limited share of a processor works at full speed between two
pauses, and a mean would include short disturbances by other processes. Nodes are compared with each other, never with
a table: no figure is good or bad by itself.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from .place import NodeInfo
from .wire import Wire, WireError, connect

_WINDOW_S, _WINDOWS = 0.1, 6
_SEND_S, _SEND_LIMIT_S, _MOST_BYTES = 0.5, 2.0, 256 << 20
# Two rounds of sending take no longer.
SENDING_S = 2 * 3 * _SEND_LIMIT_S
_BITS = 1 << 20
_COPIED = 32 << 20
_GPU_S = 60.0
# Every GPU multiplies matrices of bfloat16: TFLOP/s of each.
_GPU = """
import json, time, torch
rates = []
for index in range(torch.cuda.device_count()):
    a = torch.randn(4096, 4096, device=f"cuda:{index}", dtype=torch.bfloat16)
    for _ in range(5):
        a @ a
    torch.cuda.synchronize(index)
    began, times = time.perf_counter(), 0
    while time.perf_counter() - began < 0.5:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize(index)
        times += 10
    rates.append(times * 2 * 4096**3 / (time.perf_counter() - began) / 1e12)
print(json.dumps(rates))
"""
COMPUTE, MEMORY, SEND, RECEIVE = "compute", "memory", "send", "receive"
# Healthy nodes of the same kind differ by 10 % to 20 %.
SLOW = {COMPUTE: 0.5, MEMORY: 0.5, SEND: 0.5, RECEIVE: 0.5}
SLOW_GPU = 0.8
_UNITS = {COMPUTE: "products/s", MEMORY: "GB/s", SEND: "Gbit/s", RECEIVE: "Gbit/s"}


def measure(gpus: int) -> dict[str, float]:
    """Return this node's figures by name; `gpu N` is in TFLOP/s. GPUs that cannot be measured are left out."""
    number = (1 << _BITS) - 12345
    source = bytearray(_COPIED)

    def copy() -> None:
        source[:] = bytes(source)

    speeds = {COMPUTE: _times(lambda: number * number), MEMORY: 2 * _times(copy) * _COPIED / 1e9}
    if gpus:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _GPU], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GPU_S
            )
            speeds.update({f"gpu {index}": float(seconds) for index, seconds in enumerate(json.loads(done.stdout))})
        except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
            pass  # whether they work at all is for other checks
    return speeds


def _times(work: Callable[[], object]) -> float:
    """Return how often per second `work` runs."""
    best = 0.0
    for _ in range(_WINDOWS):
        began, times = time.perf_counter(), 0
        while (taken := time.perf_counter() - began) < _WINDOW_S:
            work()
            times += 1
        best = max(best, times / taken)
    return best


async def send_around(place: NodeInfo, ports: Mapping[int, int]) -> dict[int, float]:
    """Send to the next two nodes in turn, while other nodes send to this one; return Gbit/s by node.

    Every node sends and receives once at a time, so that two figures of a node can tell its fault from a partner's.
    """
    speeds: dict[int, float] = {}
    for step in range(1, min(3, place.nodes)):
        other = (place.node + step) % place.nodes
        if ports.get(other):
            try:
                speeds[other] = await _send(place.addresses[other], ports[other], place.run)
            except (OSError, WireError, ValueError, TypeError, KeyError):
                continue  # whether it can be reached is for other checks
    return speeds


async def _send(address: str, port: int, run: str) -> float:
    wire = await connect(address, port, run, _SEND_LIMIT_S)
    try:
        await wire.send({"stream": True})
        await wire.pour(_SEND_S)
        answer = await wire.receive(2 * _SEND_LIMIT_S)
        return float(answer["bytes"]) * 8 / max(float(answer["seconds"]), 1e-6) / 1e9
    finally:
        wire.finish()


async def take_in(wire: Wire) -> None:
    """Receive data for a while, and send back the number of bytes and seconds. Raises WireError."""
    size, seconds = await wire.drink(_SEND_LIMIT_S, _MOST_BYTES)
    await wire.send({"bytes": size, "seconds": seconds})


def figures(own: Sequence[Mapping[str, float]], sent: Sequence[Mapping[int, float]]) -> list[dict[str, float]]:
    """Return the figures of each node: its `own`, and its best rates of sending to and receiving from two others."""
    made = [dict(row) for row in own]
    received: list[list[float]] = [[] for _ in made]
    for number, rates in enumerate(sent):
        if rates:
            made[number][SEND] = max(rates.values())
        for other, rate in rates.items():
            if 0 <= other < len(made):
                received[other].append(rate)
    for number, got in enumerate(received):
        if got:
            made[number][RECEIVE] = max(got)
    return made


def slow(nodes: Sequence[Mapping[str, float]]) -> list[tuple[int, str]]:
    """Return (node, its slow figure as text) of nodes slower than the median of all; of two nodes, than the other.

    Two nodes that send to nobody else cannot tell whose link is slow: both are named, one as the sender and
    one as the receiver.
    """
    slow_nodes = []
    for name in sorted({name for row in nodes for name in row}):
        kind = "gpu" if name.startswith("gpu ") else name
        peers = [
            value
            for row in nodes
            for other, value in row.items()
            if other == name or (kind == "gpu" and other.startswith("gpu "))
        ]
        usual = statistics.median_high(peers)
        for number, values in enumerate(nodes):
            value = values.get(name)
            if value is not None and value < SLOW.get(kind, SLOW_GPU) * usual:
                unit = _UNITS.get(kind, "TFLOP/s")
                slow_nodes.append((number, f"{name}: {value:.3g} {unit}, the job's nodes {usual:.3g}"))
    return slow_nodes
