"""Probes of torch's operations in one process; envbuild computes the same results itself (verify/operations.py).

Each operation is called as a training calls it: by its public name, a module where there is one, on the process's
device. This module judges nothing.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .errors import one_line

_WORKERS, _TIMEOUT_S = 2, 120
# By operation and type, the results as flat lists of numbers, or the reason why there are none.
Results = dict[str, "dict[str, list[float]] | str"]


class _HostError(Exception):
    """The reason why this host, and not torch, makes a probe impossible."""


def run_operations(device: Any, request: Mapping[str, Any]) -> Results:
    """Return the results of each of the request's `cases` on `device`, with the `inputs` of their operation."""
    results: Results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, dtype in request["cases"]:
            given = _Inputs(request["inputs"][_INPUTS.get(op, op)], getattr(torch, dtype), device)
            try:
                parts = _OPERATIONS[op](given)
            except _HostError as error:
                results[f"{op} {dtype}"] = f"host: {error}"
            except Exception as error:  # noqa: BLE001 - a changed operation can fail in any way
                cause = "host" if dtype == "bfloat16" and _lacks_bfloat16(device) else "error"
                results[f"{op} {dtype}"] = f"{cause}: {type(error).__name__}: {one_line(error)}"
            else:
                results[f"{op} {dtype}"] = {part: _flat(value) for part, value in parts.items()}
    return results


def _lacks_bfloat16(device: Any) -> bool:
    """Return whether `device` is a GPU of NVIDIA before Ampere, whose libraries may refuse bfloat16."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0)


class _Inputs:
    """The inputs of one operation; tensors are made anew for each use."""

    def __init__(self, values: Mapping[str, Any], dtype: Any, device: Any) -> None:
        self.values, self.dtype, self.device = values, dtype, device

    def tensor(self, name: str) -> Any:
        """Return the input `name` as a tensor of the operation's type; indices are int64."""
        whole = name in ("indices", "targets")
        return torch.tensor(self.values[name], dtype=torch.int64 if whole else self.dtype, device=self.device)

    def leaf(self, name: str) -> Any:
        """Return the input `name` as a tensor that gets a gradient."""
        return self.tensor(name).requires_grad_()

    def fill(self, module: Any) -> Any:
        """Return `module` on the device, with the inputs as its parameters and buffers of the same names."""
        module = module.to(self.device, self.dtype)
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if name in self.values:
                    tensor.copy_(self.tensor(name))
        return module


def _flat(value: Any) -> list[float]:
    if isinstance(value, torch.Tensor):
        value = value.detach().to(torch.float64).cpu().flatten().tolist()
    return [number if math.isfinite(number) else 1e300 for number in value]  # JSON has no NaN


def _gradients(output: Any, upstream: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    output.backward(upstream)
    return {"output": output, **{f"gradient of {name}": tensor.grad for name, tensor in tensors.items()}}


def _matmul(given: _Inputs) -> dict[str, Any]:
    return {"output": torch.matmul(given.tensor("left"), given.tensor("right"))}


def _through(module: Any, given: _Inputs) -> dict[str, Any]:
    rows = given.leaf("input")
    return _gradients(module(rows), given.tensor("upstream"), {"input": rows, **dict(module.named_parameters())})


def _linear(given: _Inputs) -> dict[str, Any]:
    outputs, inputs = len(given.values["weight"]), len(given.values["weight"][0])
    return _through(given.fill(torch.nn.Linear(inputs, outputs)), given)


def _layer_norm(given: _Inputs) -> dict[str, Any]:
    return _through(given.fill(torch.nn.LayerNorm(len(given.values["weight"]), eps=given.values["eps"])), given)


def _batch_norm(given: _Inputs) -> dict[str, Any]:
    values = given.values
    norm = torch.nn.BatchNorm2d(len(values["weight"]), eps=values["eps"], momentum=values["momentum"])
    outputs = _through(given.fill(norm), given)
    outputs.update((name, buffer.clone()) for name, buffer in norm.named_buffers())
    with torch.no_grad():
        return {**outputs, "output in evaluation": norm.eval()(given.tensor("input"))}


def _attention(given: _Inputs, **options: Any) -> dict[str, Any]:
    leaves = {name: given.leaf(name) for name in ("query", "key", "value")}
    output = torch.nn.functional.scaled_dot_product_attention(*leaves.values(), **options)
    return _gradients(output, given.tensor("upstream"), leaves)


def _causal_attention(given: _Inputs) -> dict[str, Any]:
    return _attention(given, is_causal=True)


def _embedding(given: _Inputs) -> dict[str, Any]:
    weight = given.values["weight"]
    table = given.fill(torch.nn.Embedding(len(weight), len(weight[0]), padding_idx=given.values["padding"]))
    return _gradients(table(given.tensor("indices")), given.tensor("upstream"), {"weight": table.weight})


def _cross_entropy(given: _Inputs) -> dict[str, Any]:
    logits = given.leaf("logits")
    loss = torch.nn.CrossEntropyLoss()(logits, given.tensor("targets"))
    return _gradients(loss, None, {"logits": logits})


def _clip_grad_norm(given: _Inputs) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for limit in ("below", "above"):
        parameters = []
        for name in ("first", "second"):
            parameters.append(torch.nn.Parameter(torch.zeros_like(given.tensor(name))))
            parameters[-1].grad = given.tensor(name)
        norm = torch.nn.utils.clip_grad_norm_(parameters, given.values[limit])
        clipped = torch.cat([parameter.grad.flatten() for parameter in parameters])
        results.update({f"norm, limit {limit} it": norm.reshape(1), f"gradients, limit {limit} their norm": clipped})
    return results


class _Samples:
    def __init__(self, values: Sequence[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> int:
        return self.values[index]


def _data_loader(given: _Inputs) -> dict[str, Any]:
    try:
        multiprocessing.get_context("fork").Semaphore()
    except OSError as error:
        raise _HostError(f"no semaphores for worker processes: {one_line(error)}") from None
    samples = _Samples(given.values["samples"])
    # Workers return plain numbers: torch shares tensors by sockets in TMPDIR, whose path may be too long for them.
    options: dict[str, Any] = {
        "batch_size": given.values["batch"],
        "num_workers": _WORKERS,
        "timeout": _TIMEOUT_S,
        "collate_fn": list,
        "multiprocessing_context": "fork",  # other methods import torch in each worker
    }
    loaders = {"shuffled": torch.utils.data.DataLoader(samples, shuffle=True, **options)}
    for rank in range(2):
        sampler = torch.utils.data.distributed.DistributedSampler(samples, num_replicas=2, rank=rank, shuffle=False)
        loaders[f"share {rank} of 2"] = torch.utils.data.DataLoader(samples, sampler=sampler, **options)
    batches = {name: list(loader) for name, loader in loaders.items()}
    return {
        **{name: [sample for batch in batch_list for sample in batch] for name, batch_list in batches.items()},
        "sizes of batches": [len(batch) for batch_list in batches.values() for batch in batch_list],
    }


def _state_dict(given: _Inputs) -> dict[str, Any]:
    def build() -> tuple[Any, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(given.device, given.dtype)
        return model, torch.optim.AdamW(model.parameters(), lr=1.0)

    model, optimizer = build()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(torch.tensor(given.values[name]))
    groups = optimizer.state_dict()["param_groups"]
    for group in groups:
        group["lr"] = given.values["lr"][0]
    moments = {name: torch.tensor(given.values[name], dtype=given.dtype) for name in ("exp_avg", "exp_avg_sq", "step")}
    others = {name: torch.tensor(given.values[name], dtype=getattr(torch, name)) for name in given.values["others"]}
    stream = io.BytesIO()
    state = {0: {**moments, "step": moments["step"].reshape(())}}
    saved = {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}, "others": others}
    torch.save(saved, stream)
    stream.seek(0)
    loaded = torch.load(stream, map_location=given.device, weights_only=True)
    model, optimizer = build()
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    restored = optimizer.state_dict()
    tensors = {**model.state_dict(), **restored["state"][0]}
    # Another type is another name.
    typed = {str(tensor.dtype).replace("torch.", ""): tensor for tensor in loaded["others"].values()}
    return {**tensors, "lr": [restored["param_groups"][0]["lr"]], **typed}


_OPERATIONS: Mapping[str, Callable[[_Inputs], dict[str, Any]]] = {
    "matmul": _matmul,
    "linear": _linear,
    "attention": _attention,
    "causal attention": _causal_attention,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "clip_grad_norm_": _clip_grad_norm,
    "DataLoader": _data_loader,
    "state_dict": _state_dict,
}
_INPUTS = {"causal attention": "attention"}
