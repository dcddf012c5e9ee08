"""Measurement of network bandwidth: timed all-reduces of growing size.

algbw is bytes per second, busbw is algbw × 2(n-1)/n: the load of each rank's link, which is independent of the
number of ranks and comparable to the hardware's bandwidth. Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from .distributed import Group

_SMALLEST = 1 << 16
_STEP = 4
_LARGEST = {"cpu": 1 << 26, "cuda": 1 << 30}
_ROUNDS = 10


def measure_bandwidth(group: Group, seconds: float) -> list[dict[str, Any]]:
    """Measure all-reduces of growing size for about `seconds` and return one entry per size.

    An entry has `bytes`, `seconds` (the median over rounds of the slowest rank's time), `algbw` and `busbw`
    (GB/s, 10⁹ bytes). The list is empty for one process. All ranks must call this function.
    """
    world = group.place.world_size
    if group.backend is None or world < 2:
        return []
    results: list[dict[str, Any]] = []
    started = time.perf_counter()
    size = _SMALLEST
    while size <= _LARGEST.get(group.device.type, _LARGEST["cpu"]):
        try:
            tensor = torch.ones(size // 4, dtype=torch.float32, device=group.device)
        except RuntimeError:  # out of memory: keep the results so far
            fits = 0.0
        else:
            fits = 1.0
        # All ranks use the slowest rank's value, so that they take the same decisions.
        if _slowest(group, 1.0 - fits) > 0:
            break
        warm = _slowest(group, _timed(group, tensor))
        left = seconds - _slowest(group, time.perf_counter() - started)
        rounds = max(1, min(_ROUNDS, int(left / _STEP / max(warm, 1e-6))))
        times = [_slowest(group, _timed(group, tensor)) for _ in range(rounds)]
        middle = max(statistics.median(times), 1e-9)
        results.append(
            {
                "bytes": size,
                "seconds": round(middle, 9),
                "algbw": round(size / middle / 1e9, 6),
                "busbw": round(size / middle / 1e9 * 2 * (world - 1) / world, 6),
            }
        )
        del tensor
        left = seconds - _slowest(group, time.perf_counter() - started)
        if left < middle * _STEP * 2:  # time for a warm-up and one round of the next size
            break
        size *= _STEP
    return results


def bandwidth_table(rows: list[dict[str, Any]]) -> str:
    """Return the measurements as a table, one line each."""
    lines = ["       bytes     time (us)  algbw (GB/s)  busbw (GB/s)"]
    lines += [
        f"{row['bytes']:>12}  {row['seconds'] * 1e6:>12.1f}  {row['algbw']:>12.3f}  {row['busbw']:>12.3f}"
        for row in rows
    ]
    return "\n".join(lines)


def _timed(group: Group, tensor: Any) -> float:
    """Return the seconds of one all-reduce on this rank."""
    _wait(group)
    before = time.perf_counter()
    group.sum_over_ranks(tensor)
    _wait(group)
    # Without this reset the sums overflow to infinity, which some processors add more slowly.
    elapsed = time.perf_counter() - before
    tensor.fill_(1.0)
    return elapsed


def _wait(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def _slowest(group: Group, value: float) -> float:
    """Return the largest `value` over all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64, device=group.device)
    return float(group.largest(tensor).item())
