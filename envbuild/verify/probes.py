"""The probes of a verification: inputs for the trainer (ddp_train/probes.py) and expected results, without torch.

The inputs are random for each verification, so that a report cannot be prepared. Inputs of collectives are small
integers, for which the bytes of each result are known in every type. Operations have a tolerance.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from envbuild.data import load_table

Row = Sequence[float]
Matrix = Sequence[Row]
Inputs = Mapping[str, Any]
Parts = dict[str, list[float]]

# Sums of these many products of two numbers up to 2 stay below 256, the last integer that bfloat16 counts to.
_ROWS, _INPUTS, _OUTPUTS = 16, 48, 24
_HEADS, _LENGTH, _WIDTH = 2, 13, 16
_NORM_ROWS, _NORM_WIDTH = 8, 40
_BATCH, _CHANNELS, _HEIGHT, _LINE = 4, 3, 2, 5
_WORDS, _EMBEDDED, _INDICES = 11, 8, 24
_LOGITS, _CLASSES, _IGNORED = 9, 13, -100
_SAMPLES, _SAMPLES_OF_A_BATCH = 24, 4
# The part of DataLoader's result whose order is random
SHUFFLED = "shuffled"
_WHOLE = range(-2, 3)
_QUARTERS = [number / 4 for number in range(-8, 9)]
_HALVES = [number / 2 for number in _WHOLE]
_PERIOD = 251  # a prime: a buffer that is shifted by a power of two differs
_STEPS, _OPTIMIZER_SAMPLES, _OPTIMIZER_INPUTS = 3, 4, 3
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


def operation_cases(*, gpu: bool = False) -> list[tuple[str, str, float]]:
    """Return operation, type and tolerance of each probe of data/probes.toml, with those for GPUs if `gpu`."""
    rows = [row for row in load_table("probes")["operations"] if gpu or not row.get("gpu")]
    return [(op, dtype, row["tolerance"]) for row in rows for op in row["ops"] for dtype in row["dtypes"]]


def make_operations(chance: Random, *, gpu: bool = False) -> dict[str, Any]:
    """Return the `cases` (operation, type) and the random `inputs` of each operation, as JSON values."""

    def numbers(values: Sequence[float], *shape: int) -> Any:
        """Return nested lists of this shape."""
        if len(shape) == 1:
            return chance.choices(values, k=shape[0])
        return [numbers(values, *shape[1:]) for _ in range(shape[0])]

    heads = (1, _HEADS, _LENGTH, _WIDTH)
    image = (_BATCH, _CHANNELS, _HEIGHT, _LINE)
    factors = [number / 4 for number in (-6, -5, -3, 3, 5, 6)]
    targets = [*chance.choices(range(_CLASSES), k=_LOGITS - 1), _IGNORED]
    inputs = {
        "matmul": {"left": numbers(_WHOLE, _ROWS, _INPUTS), "right": numbers(_WHOLE, _INPUTS, _OUTPUTS)},
        "linear": {
            "input": numbers(_WHOLE, _ROWS, _INPUTS),
            "weight": numbers(_WHOLE, _OUTPUTS, _INPUTS),
            "bias": numbers(_WHOLE, _OUTPUTS),
            "upstream": numbers(_WHOLE, _ROWS, _OUTPUTS),
        },
        # With 16 products of halves, scaled by 1/4, bfloat16 has the exact scores.
        "attention": {name: numbers(_HALVES, *heads) for name in ("query", "key", "value", "upstream")},
        "layer_norm": {
            "input": numbers(_QUARTERS, _NORM_ROWS, _NORM_WIDTH),
            "weight": numbers(factors, _NORM_WIDTH),
            "bias": numbers(_QUARTERS, _NORM_WIDTH),
            "upstream": numbers(_HALVES, _NORM_ROWS, _NORM_WIDTH),
            "eps": 2.0 ** -chance.randrange(4, 10),
        },
        "batch_norm": {
            "input": numbers(_QUARTERS, *image),
            "weight": numbers(factors, _CHANNELS),
            "bias": numbers(_QUARTERS, _CHANNELS),
            "upstream": numbers(_HALVES, *image),
            "running_mean": numbers(factors, _CHANNELS),
            "running_var": numbers([0.5, 3.0, 5.0], _CHANNELS),
            "eps": 2.0 ** -chance.randrange(4, 10),
            "momentum": chance.choice([0.25, 0.375, 0.625]),
        },
        "embedding": {
            "weight": numbers(_WHOLE, _WORDS, _EMBEDDED),
            "padding": chance.randrange(_WORDS),
            "indices": chance.sample(range(_WORDS), _WORDS) + numbers(range(_WORDS), _INDICES - _WORDS),
            "upstream": numbers(_WHOLE, _INDICES, _EMBEDDED),
        },
        "cross_entropy": {
            "logits": numbers(_QUARTERS, _LOGITS, _CLASSES),
            "targets": chance.sample(targets, len(targets)),
        },
        "clip_grad_norm_": {
            "first": numbers([1, 2, -3], 3, 5),
            "second": numbers([2, -1], 7),
            "below": round(chance.uniform(0.5, 2.0), 6),
            "above": round(chance.uniform(40, 60), 6),
        },
        "DataLoader": {"samples": chance.sample(range(1 << 20), _SAMPLES), "batch": _SAMPLES_OF_A_BATCH},
        "state_dict": {
            "0.weight": numbers(_QUARTERS, 2, 3),
            "0.bias": numbers(_QUARTERS, 2),
            "1.weight": numbers(factors, 2),
            "1.bias": numbers(factors, 2),
            "1.running_mean": numbers(factors, 2),
            "1.running_var": numbers([0.5, 3.0, 5.0], 2),
            "1.num_batches_tracked": chance.randrange(3, 1000),
            "exp_avg": numbers(_QUARTERS, 2, 3),
            "exp_avg_sq": numbers([0.25, 2.0], 2, 3),
            "step": [chance.randrange(3, 1000)],
            "lr": [chance.randrange(1, 64) / 64],
            **{dtype: numbers(range(1, 100), 5) for dtype in ("bfloat16", "float16", "float64", "int64")},
            "others": ["bfloat16", "float16", "float64", "int64"],
        },
    }
    return {"cases": [(op, dtype) for op, dtype, _ in operation_cases(gpu=gpu)], "inputs": inputs}


def expected_parts(operations: Mapping[str, Any], op: str) -> Parts:
    """Return the parts of the result of `op`, such as its output and gradients, as flat lists."""
    inputs = operations["inputs"]
    if op == "causal attention":
        return _attention(inputs["attention"], causal=True)
    return _EXPECTED[op](inputs[op])


def _product(left: Matrix, right: Matrix) -> list[list[float]]:
    columns = _transposed(right)
    return [[sum(map(operator.mul, row, column)) for column in columns] for row in left]


def _transposed(matrix: Matrix) -> list[Row]:
    return list(zip(*matrix, strict=True))


def _dot(left: Row, right: Row) -> float:
    return math.fsum(map(operator.mul, left, right))


def _sums(matrix: Matrix) -> list[float]:
    """Return the sum of each column."""
    return [math.fsum(column) for column in _transposed(matrix)]


def _flat(values: Any) -> list[float]:
    if not isinstance(values, Sequence):
        return [float(values)]
    return [number for value in values for number in _flat(value)]


def _matmul(inputs: Inputs) -> Parts:
    return {"output": _flat(_product(inputs["left"], inputs["right"]))}


def _linear(inputs: Inputs) -> Parts:
    rows, weight, upstream = inputs["input"], inputs["weight"], inputs["upstream"]
    output = [list(map(operator.add, row, inputs["bias"])) for row in _product(rows, _transposed(weight))]
    return {
        "output": _flat(output),
        "gradient of input": _flat(_product(upstream, weight)),
        "gradient of weight": _flat(_product(_transposed(upstream), rows)),
        "gradient of bias": _sums(upstream),
    }


def _attention(inputs: Inputs, *, causal: bool = False) -> Parts:
    """Compute softmax(Q·Kᵀ / √width)·V; a causal position sees itself and the positions before it."""
    gradients: dict[str, list[float]] = {}
    scale = 1 / math.sqrt(_WIDTH)
    heads = zip(*(inputs[name][0] for name in ("query", "key", "value", "upstream")), strict=True)
    for query, key, value, upstream in heads:
        weights = []
        for at, row in enumerate(_product(query, _transposed(key))):
            powers = [math.exp(scale * score) if at >= other or not causal else 0.0 for other, score in enumerate(row)]
            weights.append([power / math.fsum(powers) for power in powers])
        change = []
        for shares, row in zip(weights, _product(upstream, _transposed(value)), strict=True):
            mean = _dot(shares, row)
            change.append([scale * share * (value - mean) for share, value in zip(shares, row, strict=True)])
        parts = {
            "output": _product(weights, value),
            "gradient of query": _product(change, key),
            "gradient of key": _product(_transposed(change), query),
            "gradient of value": _product(_transposed(weights), upstream),
        }
        for part, matrix in parts.items():
            gradients.setdefault(part, []).extend(_flat(matrix))
    return gradients


def _normalised(row: Row, eps: float) -> tuple[list[float], float, float, float]:
    """Return (x - mean) / √(variance + eps), 1 / √(variance + eps), the mean and the variance."""
    mean = math.fsum(row) / len(row)
    variance = math.fsum((value - mean) ** 2 for value in row) / len(row)
    factor = 1 / math.sqrt(variance + eps)
    return [(value - mean) * factor for value in row], factor, mean, variance


def _norm_gradient(normal: Row, factor: float, upstream: Row) -> list[float]:
    """Return the gradient of the input of a normalisation, from the gradient of the normalised values."""
    mean, along = math.fsum(upstream) / len(upstream), _dot(upstream, normal) / len(normal)
    return [factor * (gradient - mean - along * value) for gradient, value in zip(upstream, normal, strict=True)]


def _layer_norm(inputs: Inputs) -> Parts:
    weight, bias, upstream = inputs["weight"], inputs["bias"], inputs["upstream"]
    rows = [_normalised(row, inputs["eps"]) for row in inputs["input"]]
    return {
        "output": [n * w + b for normal, *_ in rows for n, w, b in zip(normal, weight, bias, strict=True)],
        "gradient of input": [
            value
            for (normal, factor, *_), row in zip(rows, upstream, strict=True)
            for value in _norm_gradient(normal, factor, list(map(operator.mul, row, weight)))
        ],
        "gradient of weight": _sums(
            [list(map(operator.mul, normal, row)) for (normal, *_), row in zip(rows, upstream, strict=True)]
        ),
        "gradient of bias": _sums(upstream),
    }


def _channels(images: Any) -> list[list[float]]:
    """Return the values of each channel."""
    return [_flat([image[channel] for image in images]) for channel in range(_CHANNELS)]


def _images(channels: Matrix) -> list[float]:
    """Return the values of `_channels` in the order of the images."""
    size = _HEIGHT * _LINE
    return [value for at in range(_BATCH) for row in channels for value in row[at * size : (at + 1) * size]]


def _batch_norm(inputs: Inputs) -> Parts:
    weight, bias, momentum, eps = inputs["weight"], inputs["bias"], inputs["momentum"], inputs["eps"]
    values, upstream = _channels(inputs["input"]), _channels(inputs["upstream"])
    channels = [_normalised(row, eps) for row in values]
    number = _BATCH * _HEIGHT * _LINE
    means = [old + momentum * (channel[2] - old) for channel, old in zip(channels, inputs["running_mean"], strict=True)]
    # The running variance is that of a sample: n - 1.
    variances = [
        old + momentum * (channel[3] * number / (number - 1) - old)
        for channel, old in zip(channels, inputs["running_var"], strict=True)
    ]
    evaluated = [
        [(value - mean) / math.sqrt(variance + eps) * w + b for value in row]
        for row, mean, variance, w, b in zip(values, means, variances, weight, bias, strict=True)
    ]
    gradients = [
        _norm_gradient(normal, factor, [value * w for value in row])
        for (normal, factor, *_), row, w in zip(channels, upstream, weight, strict=True)
    ]
    return {
        "output": _images(
            [[n * w + b for n in channel[0]] for channel, w, b in zip(channels, weight, bias, strict=True)]
        ),
        "gradient of input": _images(gradients),
        "gradient of weight": [_dot(channel[0], row) for channel, row in zip(channels, upstream, strict=True)],
        "gradient of bias": [math.fsum(row) for row in upstream],
        "running_mean": means,
        "running_var": variances,
        "num_batches_tracked": [1.0],
        "output in evaluation": _images(evaluated),
    }


def _embedding(inputs: Inputs) -> Parts:
    gradient = [[0.0] * _EMBEDDED for _ in range(_WORDS)]
    for index, row in zip(inputs["indices"], inputs["upstream"], strict=True):
        if index != inputs["padding"]:
            gradient[index] = list(map(operator.add, gradient[index], row))
    output = [inputs["weight"][index] for index in inputs["indices"]]
    return {"output": _flat(output), "gradient of weight": _flat(gradient)}


def _cross_entropy(inputs: Inputs) -> Parts:
    counted = [target for target in inputs["targets"] if target != _IGNORED]
    losses, gradient = [], []
    for row, target in zip(inputs["logits"], inputs["targets"], strict=True):
        powers = [math.exp(value) for value in row]
        total = math.fsum(powers)
        if target == _IGNORED:
            gradient += [0.0] * len(row)
            continue
        losses.append(math.log(total) - row[target])
        gradient += [(power / total - (at == target)) / len(counted) for at, power in enumerate(powers)]
    return {"output": [math.fsum(losses) / len(counted)], "gradient of logits": gradient}


def _clip_grad_norm(inputs: Inputs) -> Parts:
    gradients = _flat([inputs["first"], inputs["second"]])
    norm = math.sqrt(_dot(gradients, gradients))
    return {
        "norm, limit below it": [norm],
        "gradients, limit below their norm": [gradient * inputs["below"] / (norm + 1e-6) for gradient in gradients],
        "norm, limit above it": [norm],
        "gradients, limit above their norm": gradients,
    }


def _data_loader(inputs: Inputs) -> Parts:
    samples, batch = inputs["samples"], inputs["batch"]
    sizes = [batch] * (2 * len(samples) // batch)
    return {SHUFFLED: samples, "share 0 of 2": samples[0::2], "share 1 of 2": samples[1::2], "sizes of batches": sizes}


def _state_dict(inputs: Inputs) -> Parts:
    return {name: _flat(values) for name, values in inputs.items() if name != "others"}


_EXPECTED: Mapping[str, Callable[[Inputs], Parts]] = {
    "matmul": _matmul,
    "linear": _linear,
    "attention": _attention,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "clip_grad_norm_": _clip_grad_norm,
    "DataLoader": _data_loader,
    "state_dict": _state_dict,
}


def cases_of(check: str, *, gpu: bool = False) -> list[Case]:
    """Return the probes of the check `allreduce` or `collectives`, with those for GPUs if `gpu`."""
    rows = [row for row in load_table("probes")[check] if gpu or not row.get("gpu")]
    return [(op, dtype, size) for row in rows for op in row["ops"] for dtype in row["dtypes"] for size in row["sizes"]]


def make_request(world: int, *, gpu: bool = False) -> dict[str, Any]:
    """Return random probes for `world` ranks, as JSON values: `values` by rank, the optimizer's `data` by step, rank.

    `cases` come from `cases_of`. `source` is the rank that broadcasts, and enters the barrier last. A sample is a row
    of inputs and the target.
    """
    chance = secrets.SystemRandom()
    row = functools.partial(chance.choices, [number / 4 for number in range(-8, 9)], k=_OPTIMIZER_INPUTS + 1)

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
            "data": [[[row() for _ in range(_OPTIMIZER_SAMPLES)] for _ in range(world)] for _ in range(_STEPS)],
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
        content = b"".join(_tiled(value, dtype, 0, numel) for value in values)
    else:
        reduced = [_REDUCERS[op](column) for column in zip(*values, strict=True)]
        content = _tiled(reduced, dtype, rank * numel if op == "reduce_scatter" else 0, numel)
    return hashlib.sha256(content).hexdigest()


def _tiled(values: Sequence[int], dtype: str, start: int, numel: int) -> bytes:
    """Return the bytes of elements `start` to `start + numel` of the repeated `values`."""
    # Little-endian, as the processors of all targets are.
    data = struct.pack(f"<{len(values)}{_FORMATS[dtype]}", *values)
    if dtype == "bfloat16":  # the upper half of a float32
        data = b"".join(data[at + 2 : at + 4] for at in range(0, len(data), 4))
    size, skip = len(data) // len(values), start % len(values)
    return (data * (numel // len(values) + 2))[skip * size : (skip + numel) * size]


def expected_parameters(request: Request, name: str) -> list[float]:
    """Return the weights and the bias of a linear model after each step of `name` on the mean squared error.

    Gradients are averaged over the ranks. Source of the formulas: the documentation of torch.optim.
    """
    optimizer = request["optimizer"]
    model, state = optimizer["start"], [(0.0, 0.0)] * len(optimizer["start"])
    parameters: list[float] = []
    for step, ranks in enumerate(optimizer["data"], 1):
        rows = [row for rank in ranks for row in rank]
        gradient = [0.0] * len(model)
        for *inputs, target in rows:
            inputs = [*inputs, 1.0]
            error = sum(map(operator.mul, model, inputs)) - target
            gradient = [g + 2 * error * x / len(rows) for g, x in zip(gradient, inputs, strict=True)]
        stepped = [
            OPTIMIZERS[name](step, *values, **optimizer[name]) for values in zip(model, gradient, state, strict=True)
        ]
        model, state = [value for value, _ in stepped], [kept for _, kept in stepped]
        parameters += model
    return parameters


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
