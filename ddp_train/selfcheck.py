"""Check of the network: all-reduces of numbers whose exact sum is known."""

from __future__ import annotations

from typing import Any

import torch

from .distributed import Group
from .errors import TrainError

SIZES = (1, 1023, 1 << 18)
TYPES = (torch.int64, torch.float32, torch.float64)


def _values(numel: int, rank: int, dtype: Any, device: Any) -> Any:
    """Return rank-dependent integers, shape (numel,), that float32 sums exactly for up to 8,000 ranks.

    With r = rank mod 8, element i is (i mod 251) * (r + 1) + r: a part that is lost, doubled or shifted changes
    the sum.
    """
    index = torch.arange(numel, dtype=torch.int64, device=device) % 251
    return (index * (rank % 8 + 1) + rank % 8).to(dtype)


def check_allreduce(group: Group) -> list[dict[str, Any]]:
    """Return one entry per type and size: `dtype`, `numel`, `ok`, `max_error` against the exact sum."""
    if group.backend is None:
        return []
    world = group.place.world_size
    offset = sum(rank % 8 for rank in range(world))
    factor = offset + world
    results = []
    for dtype in TYPES:
        for numel in SIZES:
            got = group.sum_over_ranks(_values(numel, group.place.rank, dtype, group.device))
            index = torch.arange(numel, dtype=torch.int64, device=group.device) % 251
            error = (got.to(torch.float64) - (index * factor + offset).to(torch.float64)).abs()
            # NaN compares as false, and JSON has neither NaN nor infinity.
            largest = float(torch.nan_to_num(error.max(), nan=1e300, posinf=1e300).item())
            results.append(
                {"dtype": str(dtype).replace("torch.", ""), "numel": numel, "ok": largest == 0.0, "max_error": largest}
            )
    return results


def require_exact(results: list[dict[str, Any]], host: str) -> None:
    """Raise TrainError for the first all-reduce with a wrong result."""
    for result in results:
        if not result["ok"]:
            raise TrainError(
                f"all-reduce of {result['numel']} {result['dtype']} values gave a wrong sum on"
                f" {host} (largest error {result['max_error']:g})"
            )
