"""The probes of a verification: what the trainer must compute (ddp_train/probes.py), and the results, without torch.

The inputs are random for each verification, so no report can be prepared. They are small integers whose results are
exact in every type: the bytes of each result are known.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envbuild.data import load_table
from envbuild.verify.operations import make_operations

_PERIOD = 251  # a prime: a buffer that is shifted by a power of two differs
_STEPS, _SAMPLES, _INPUTS = 3, 4, 3
_FORMATS = {"int64": "q", "float16": "e", "bfloat16": "f", "float32": "f", "float64": "d"}
_REDUCERS: Mapping[str, Callable[[tuple[int, ...]], int]] = {
    "sum": sum,
    "reduce_scatter": sum,
    "max": max,
    "min": min,
    "product": math.prod,
}
Request = Mapping[str, Any]
# Operation, type, number of elements
Case = tuple[str, str, int]
# What an optimizer keeps of a parameter: the momentum, or both moments
_State = tuple[float, float]


def probe_table() -> dict[str, Any]:
    """Return data/probes.toml."""
    return load_table("probes")


def cases_of(check: str, *, gpu: bool = False) -> list[Case]:
    """Return the probes of the check `allreduce` or `collectives`, with those for GPUs if `gpu`."""
    rows = [row for row in probe_table()[check] if gpu or not row.get("gpu")]
    return [(op, dtype, size) for row in rows for op in row["ops"] for dtype in row["dtypes"] for size in row["sizes"]]


def make_request(world: int, *, gpu: bool = False) -> dict[str, Any]:
    """Return random probes for `world` ranks, as JSON values: `values` by rank, the optimizer's `data` by step, rank.

    `cases` are those of `cases_of`. `source` is the rank that broadcasts, and enters the barrier last. A sample is a
    row of inputs and the target.
    """
    chance = secrets.SystemRandom()
    row = functools.partial(chance.choices, [number / 4 for number in range(-8, 9)], k=_INPUTS + 1)

    def fraction(least: float, most: float) -> float:
        return round(chance.uniform(least, most), 6)

    return {
        "cases": {check: cases_of(check, gpu=gpu) for check in ("allreduce", "collectives")},
        "source": chance.randrange(world),
        # Products of more than 8 ranks change only their sign: float16 ends at 65504.
        "values": [chance.choices((-2, -1, 1, 2) if rank < 8 else (-1, 1), k=_PERIOD) for rank in range(world)],
        "sampler": {"size": 40 * world + 1, "epochs": [0, 3, 0], "seed": chance.randrange(1 << 31)},
        "optimizer": {
            # Neither the training's settings nor torch's defaults.
            "SGD": {"lr": fraction(0.02, 0.1), "momentum": 0.9, "weight_decay": fraction(0.02, 0.2)},
            "AdamW": {
                "lr": fraction(0.02, 0.1),
                "betas": [fraction(0.7, 0.85), fraction(0.9, 0.98)],
                "eps": fraction(0.001, 0.01),
                "weight_decay": fraction(0.2, 0.6),
            },
            "start": row(),
            "data": [[[row() for _ in range(_SAMPLES)] for _ in range(world)] for _ in range(_STEPS)],
        },
        "operations": make_operations(chance, gpu=gpu),
    }


def expected_digest(request: Request, case: Case, rank: int) -> str:
    """Return the SHA-256 (hex) of the bytes that `case` must leave on `rank`."""
    op, dtype, numel = case
    values: Sequence[Sequence[int]] = request["values"]
    if op == "broadcast":
        content = _tiled(values[request["source"]], dtype, 0, numel)
    elif op == "all_gather":
        content = b"".join(_tiled(one, dtype, 0, numel) for one in values)
    else:
        reduced = [_REDUCERS[op](column) for column in zip(*values, strict=True)]
        content = _tiled(reduced, dtype, rank * numel if op == "reduce_scatter" else 0, numel)
    return hashlib.sha256(content).hexdigest()


def _tiled(values: Sequence[int], dtype: str, start: int, numel: int) -> bytes:
    """Return the bytes of elements `start` to `start + numel` of the repeated `values`."""
    # Little-endian, as the processors of all targets are.
    one = struct.pack(f"<{len(values)}{_FORMATS[dtype]}", *values)
    if dtype == "bfloat16":  # the upper half of a float32
        one = b"".join(one[at + 2 : at + 4] for at in range(0, len(one), 4))
    size, skip = len(one) // len(values), start % len(values)
    return (one * (numel // len(values) + 2))[skip * size : (skip + numel) * size]


def expected_parameters(request: Request, name: str) -> list[float]:
    """Return the weights and the bias of a linear model after each step of `name` on the mean squared error.

    Gradients are averaged over the ranks. Source of the formulas: the documentation of torch.optim.
    """
    optimizer = request["optimizer"]
    model, state = optimizer["start"], [(0.0, 0.0)] * len(optimizer["start"])
    found: list[float] = []
    for step, ranks in enumerate(optimizer["data"], 1):
        rows = [row for rank in ranks for row in rank]
        gradient = [0.0] * len(model)
        for *inputs, target in rows:
            inputs = [*inputs, 1.0]
            error = sum(map(operator.mul, model, inputs)) - target
            gradient = [g + 2 * error * x / len(rows) for g, x in zip(gradient, inputs, strict=True)]
        stepped = [OPTIMIZERS[name](step, *one, **optimizer[name]) for one in zip(model, gradient, state, strict=True)]
        model, state = [value for value, _ in stepped], [kept for _, kept in stepped]
        found += model
    return found


def _sgd(
    _: int, value: float, gradient: float, state: _State, *, lr: float, momentum: float, weight_decay: float
) -> tuple[float, _State]:
    velocity = momentum * state[0] + gradient + weight_decay * value
    return value - lr * velocity, (velocity, 0.0)


def _adamw(
    step: int,
    value: float,
    gradient: float,
    state: _State,
    *,
    lr: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
) -> tuple[float, _State]:
    first = betas[0] * state[0] + (1 - betas[0]) * gradient
    second = betas[1] * state[1] + (1 - betas[1]) * gradient**2
    size = math.sqrt(second / (1 - betas[1] ** step)) + eps
    return value * (1 - lr * weight_decay) - lr * first / (1 - betas[0] ** step) / size, (first, second)


OPTIMIZERS: Mapping[str, Callable[..., tuple[float, _State]]] = {"SGD": _sgd, "AdamW": _adamw}
