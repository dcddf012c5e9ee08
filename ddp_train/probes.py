"""Probes of torch for `envbuild verify`, which computes every result itself and compares it with these.

envbuild writes the probes and their inputs, random for each verification, into a file; this module reports the
results and judges nothing. The ranks of a group probe its collective operations, one process alone those of
operations.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .distributed import Group
from .errors import BAD_INPUT, TrainError, one_line, os_reason
from .operations import run_operations

# `envbuild verify` sets it to the path of the file that names the probes, or to nothing for a launch without them.
PROBES = "DDP_TRAIN_PROBES"
_LATE_S = 0.02


def run_probes(group: Group, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return this rank's results of the requested probes; an empty dict if none are requested. All ranks call it.

    Raises TrainError if the file of requests cannot be read.
    """
    path = environ.get(PROBES)
    if not path:
        return {}
    try:
        request = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainError(f"cannot read the probes in {path}: {os_reason(error)}", BAD_INPUT) from None
    if group.backend is None:
        return {"operations": run_operations(group.device, request["operations"])}
    results: dict[str, Any] = {}
    for check, cases in request["cases"].items():
        results[check] = {
            f"{op} {dtype} × {numel}": _result(group, request, op, dtype, numel) for op, dtype, numel in cases
        }
    return {
        **results,
        "barrier": _barrier(group, request["source"]),
        "sampler": _shares(group, **request["sampler"]),
        "optimizer": _steps(group, **request["optimizer"]),
    }


def _result(group: Group, request: dict[str, Any], op: str, dtype: str, numel: int) -> str:
    """Return the SHA-256 (hex) of an operation's result, or `error: …` if torch does not support the operation."""
    try:
        return _digest(_collective(group, request, op, dtype, numel))
    except (RuntimeError, ValueError, TypeError) as error:
        return f"error: {one_line(error)}"


def _collective(group: Group, request: dict[str, Any], op: str, dtype: str, numel: int) -> Any:
    world, distributed = group.place.world_size, torch.distributed
    values = torch.tensor(request["values"][group.place.rank]).to(getattr(torch, dtype)).to(group.device)

    def tiled(size: int) -> Any:
        return values.repeat(size // len(values) + 1)[:size].contiguous()

    if op == "all_gather":
        parts = [torch.zeros(numel, dtype=values.dtype, device=group.device) for _ in range(world)]
        distributed.all_gather(parts, tiled(numel))
        return torch.cat(parts)
    if op == "reduce_scatter":
        result = torch.zeros(numel, dtype=values.dtype, device=group.device)
        distributed.reduce_scatter(result, list(tiled(numel * world).chunk(world)))
        return result
    tensor = tiled(numel)
    if op == "broadcast":
        distributed.broadcast(tensor, src=request["source"])
    else:
        distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, op.upper()))
    return tensor


def _digest(tensor: Any) -> str:
    flat = tensor.cpu().contiguous()
    size = flat.numel() * flat.element_size()
    # Without the copy that tensor_bytes makes.
    return hashlib.sha256((ctypes.c_char * size).from_address(flat.data_ptr())).hexdigest()


def _barrier(group: Group, late: int) -> dict[str, float]:
    """Return when this rank entered and left a barrier, in seconds of the host's monotonic clock."""
    if group.place.rank == late:
        time.sleep(_LATE_S)
    entered = time.monotonic()
    torch.distributed.barrier()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    return {"entered": entered, "left": time.monotonic()}


def _shares(group: Group, size: int, epochs: list[int], seed: int) -> list[list[int]]:
    """Return this rank's share of `size` samples in each of `epochs`."""
    sampler = torch.utils.data.distributed.DistributedSampler(
        range(size), num_replicas=group.place.world_size, rank=group.place.rank, shuffle=True, seed=seed
    )
    indices = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        indices.append(list(sampler))
    return indices


def _steps(group: Group, start: list[float], data: list[Any], **options: dict[str, Any]) -> dict[str, list[float]]:
    """Train a linear model in float64 on this rank's `data` of each step, once with each optimizer of `options`.

    Return its parameters after each step by optimizer.
    """
    losses = {}
    for name, settings in options.items():
        model = torch.nn.Linear(len(start) - 1, 1).to(torch.float64).to(group.device)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([start[:-1]], dtype=torch.float64))
            model.bias.fill_(start[-1])
        optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
        step_model, optimizer = group.collectives.prepare(model, optimizer, group.device)
        values: list[float] = []
        for ranks in data:
            rows = torch.tensor(ranks[group.place.rank], dtype=torch.float64, device=group.device)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(step_model(rows[:, :-1]), rows[:, -1:]).backward()
            optimizer.step()
            values += [*model.weight.detach().flatten().tolist(), *model.bias.detach().tolist()]
        losses[name] = [value if math.isfinite(value) else 1e300 for value in values]  # JSON has no NaN
    return losses
