"""The probed operations: torch's results pass, and of a torch with one wrong operation exactly that operation fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.utils.data.distributed

from ddp_train.operations import run_operations
from ddp_train.probes import _steps
from envbuild.verify.model import Check
from envbuild.verify.probes import make_request, operation_cases
from envbuild.verify.training_checks import check_operations, check_optimizer

functional, optim, data = torch.nn.functional, torch.optim, torch.utils.data
Patch = pytest.MonkeyPatch
OPERATIONS = {op for op, _, _ in operation_cases()}


def probed(request: Mapping[str, Any]) -> list[Check]:
    """The checks on the operations and optimizers of this process, as one process and as the only rank."""
    entry: dict[str, Any] = {"rank": 0, "device": "cpu", "torch_version": str(torch.__version__)}
    asked = json.loads(json.dumps(request))
    alone: Any = SimpleNamespace(
        place=SimpleNamespace(rank=0),
        device=torch.device("cpu"),
        collectives=SimpleNamespace(prepare=lambda model, optimizer, _: (model, optimizer)),
    )
    entry["probes"] = {
        "operations": run_operations(torch.device("cpu"), asked["operations"]),
        "optimizer": _steps(alone, **asked["optimizer"]),
    }
    report = json.loads(json.dumps({"backend": None, "ranks": [entry]}, allow_nan=False))
    return [check_operations(asked, report), check_optimizer(asked, report)]


def wrong(checks: list[Check]) -> set[str]:
    """The names that the failed checks give: of operations, with their types, and of optimizers."""
    operations, optimizer = checks
    found = {fault.partition(":")[0] for fault in operations.evidence["wrong"]}
    assert (operations.status == "fail") == bool(found)
    assert all(fault in operations.seen for fault in operations.evidence["wrong"][:5])
    if optimizer.status == "fail":
        expected, seen = optimizer.evidence["expected"], optimizer.evidence["seen"]
        found |= {name for name in expected if expected[name] != pytest.approx(seen[name], rel=1e-9, abs=1e-9)}
    return found


def types_of(*ops: str) -> set[str]:
    return {f"{op} {dtype}" for op, dtype, _ in operation_cases() if op in ops}


# ---- breaks: each changes one thing of torch
def change_output(place: Any, name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """Replace the function `name`; `change` gets its result, its arguments and its options."""

    def patch(monkeypatch: Patch) -> None:
        original = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, **options: change(original(*given, **options), given, options))

    return patch


def change_options(place: Any, name: str, **changed: Any) -> Callable[[Patch], None]:
    def patch(monkeypatch: Patch) -> None:
        original = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, **options: original(*given, **{**options, **changed}))

    return patch


def replace(place: Any, name: str, function: Callable[..., Any]) -> Callable[[Patch], None]:
    return lambda monkeypatch: monkeypatch.setattr(place, name, function)


def with_gradient(factor: float) -> Callable[..., Any]:
    def change(output: Any, *_: Any) -> Any:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)
        return output

    return change


def of_type(dtype: Any, factor: float) -> Callable[..., Any]:
    return lambda output, *_: output * factor if output.dtype == dtype else output


def without(kept: Any, *_: Any) -> Any:
    del kept["model"]["1.running_var"]
    return kept


def rounded(kept: Any, *_: Any) -> Any:
    weight = kept["optimizer"]["state"][0]["exp_avg_sq"]
    weight.copy_((weight * 1.01).to(torch.bfloat16))
    return kept


def first_only(parameters: Any, limit: float, **_: Any) -> Any:
    """Clip by the norm of the first parameter."""
    norm = parameters[0].grad.norm()
    for one in parameters:
        one.grad.mul_(min(1.0, limit / (float(norm) + 1e-6)))
    return torch.cat([one.grad.flatten() for one in parameters]).norm()


def unclipped(parameters: Any, limit: float, **_: Any) -> Any:
    return torch.cat([one.grad.flatten() for one in parameters]).norm()


def always_clipped(parameters: Any, limit: float, **_: Any) -> Any:
    norm = unclipped(parameters, limit)
    for one in parameters:
        one.grad.mul_(limit / (norm + 1e-6))
    return norm


FETCHER = data._utils.fetch._MapDatasetFetcher
FETCH = FETCHER.fetch
SHARES = data.distributed.DistributedSampler.__iter__
NORM, EMBEDDING, LAYER_NORM = functional.batch_norm, functional.embedding, functional.layer_norm


def repeated(self: Any, index: list[int]) -> Any:
    """A worker reads the first sample of its batch twice."""
    return FETCH(self, [index[0], *index[:-1]] if data.get_worker_info() is not None else index)


def skipping(self: Any, index: list[int]) -> Any:
    """The second worker returns a sample less."""
    worker = data.get_worker_info()
    return FETCH(self, index[1:] if worker is not None and worker.id == 1 else index)


def first_share(self: Any) -> Any:
    self.rank = 0
    return SHARES(self)


def without_statistics(rows: Any, mean: Any, variance: Any, *rest: Any) -> Any:
    return NORM(rows, mean.clone(), variance.clone(), *rest)


def batch_statistics(rows: Any, mean: Any, variance: Any, weight: Any, bias: Any, training: bool, *rest: Any) -> Any:
    return NORM(rows, mean, variance, weight, bias, True, 0.0 if not training else rest[0], *rest[1:])


def embedding_once(indices: Any, weight: Any, *rest: Any) -> Any:
    """Of an index that occurs again, only the first row gives a gradient."""
    first = [indices.tolist().index(one) == at for at, one in enumerate(indices.tolist())]
    output, fixed = EMBEDDING(indices, weight, *rest), EMBEDDING(indices, weight.detach(), *rest)
    return torch.where(torch.tensor(first)[:, None], output, fixed)


BREAKS: Mapping[str, tuple[set[str], Callable[[Patch], None]]] = {
    "nothing": (set(), lambda _: None),
    "AdamW without weight decay": ({"AdamW"}, change_options(optim, "AdamW", weight_decay=0.0)),
    "clip_grad_norm_ that does not clip": (
        types_of("clip_grad_norm_"),
        replace(torch.nn.utils, "clip_grad_norm_", unclipped),
    ),
    "bfloat16 linear 3 % off": (
        {"linear bfloat16"},
        change_output(functional, "linear", of_type(torch.bfloat16, 1.03)),
    ),
    "a worker that repeats a sample": (types_of("DataLoader"), replace(FETCHER, "fetch", repeated)),
    "torch.load drops running_var": (types_of("state_dict"), change_output(torch, "load", without)),
    "causal attention that is not": (
        types_of("causal attention"),
        change_options(functional, "scaled_dot_product_attention", is_causal=False),
    ),
    "layer_norm's gradient doubled": (
        types_of("layer_norm"),
        change_output(functional, "layer_norm", with_gradient(2.0)),
    ),
    "AdamW that is Adam": ({"AdamW"}, lambda patch: patch.setattr(optim, "AdamW", optim.Adam)),
    "AdamW without its second beta": ({"AdamW"}, change_options(optim, "AdamW", betas=(0.8, 0.999))),
    "SGD without weight decay": ({"SGD"}, change_options(optim, "SGD", weight_decay=0.0)),
    "SGD without momentum": ({"SGD"}, change_options(optim, "SGD", momentum=0.0)),
    "float16 matmul 1 % off": ({"matmul float16"}, change_output(torch, "matmul", of_type(torch.float16, 1.01))),
    "bfloat16 matmul 1 % off": ({"matmul bfloat16"}, change_output(torch, "matmul", of_type(torch.bfloat16, 1.01))),
    "float32 matmul 0.1 % off": ({"matmul float32"}, change_output(torch, "matmul", of_type(torch.float32, 1.001))),
    "linear's gradient halved": (
        types_of("linear") | {"SGD", "AdamW"},
        change_output(functional, "linear", with_gradient(0.5)),
    ),
    "attention that is always causal": (
        types_of("attention"),
        change_options(functional, "scaled_dot_product_attention", is_causal=True),
    ),
    "attention without its scale": (
        types_of("attention", "causal attention"),
        change_options(functional, "scaled_dot_product_attention", scale=1.0),
    ),
    "bfloat16 attention 10 % off": (
        {"attention bfloat16", "causal attention bfloat16"},
        change_output(functional, "scaled_dot_product_attention", of_type(torch.bfloat16, 1.1)),
    ),
    "attention's gradient halved": (
        types_of("attention", "causal attention"),
        change_output(functional, "scaled_dot_product_attention", with_gradient(0.5)),
    ),
    "layer_norm with another eps": (
        types_of("layer_norm"),
        replace(
            functional, "layer_norm", lambda rows, shape, weight, bias, _: LAYER_NORM(rows, shape, weight, bias, 1.0)
        ),
    ),
    "batch_norm that updates no statistics": (
        types_of("batch_norm"),
        replace(functional, "batch_norm", without_statistics),
    ),
    "batch_norm that evaluates with the batch": (
        types_of("batch_norm"),
        replace(functional, "batch_norm", batch_statistics),
    ),
    "batch_norm's gradient doubled": (
        types_of("batch_norm"),
        change_output(functional, "batch_norm", with_gradient(2.0)),
    ),
    "embedding that counts an index once": (types_of("embedding"), replace(functional, "embedding", embedding_once)),
    "embedding with a gradient for its padding": (
        types_of("embedding"),
        replace(functional, "embedding", lambda indices, weight, *_: weight[indices]),
    ),
    "cross_entropy that counts ignored targets": (
        types_of("cross_entropy"),
        change_output(functional, "cross_entropy", lambda loss, *_: loss * 8 / 9),
    ),
    "cross_entropy's gradient doubled": (
        types_of("cross_entropy"),
        change_output(functional, "cross_entropy", with_gradient(2.0)),
    ),
    "clip_grad_norm_ by one parameter": (
        types_of("clip_grad_norm_"),
        replace(torch.nn.utils, "clip_grad_norm_", first_only),
    ),
    "clip_grad_norm_ that enlarges": (
        types_of("clip_grad_norm_"),
        replace(torch.nn.utils, "clip_grad_norm_", always_clipped),
    ),
    "a worker that loses a sample": (types_of("DataLoader"), replace(FETCHER, "fetch", skipping)),
    "a DataLoader that does not shuffle": (types_of("DataLoader"), change_options(data, "DataLoader", shuffle=False)),
    "a sampler that gives all ranks one share": (
        types_of("DataLoader"),
        replace(data.distributed.DistributedSampler, "__iter__", first_share),
    ),
    "torch.load loses digits of the optimizer": (types_of("state_dict"), change_output(torch, "load", rounded)),
    "a state_dict that loads no buffers": (
        types_of("state_dict"),
        replace(
            torch.nn.Module,
            "load_state_dict",
            lambda model, state: [one.data.copy_(state[name]) for name, one in model.named_parameters()],
        ),
    ),
    "an operation without results": (
        {"cross_entropy float32"},
        change_output(functional, "cross_entropy", lambda loss, *_: loss * float("nan")),
    ),
    "an operation that fails": (
        {"linear float16"},
        change_output(
            functional,
            "linear",
            lambda output, *_: output if output.dtype != torch.float16 else output.no_such_operation(),
        ),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_exactly_the_broken_operation_fails(name: str, monkeypatch: Patch) -> None:
    expected, patch = BREAKS[name]
    request = make_request(1)
    if expected and not expected & types_of("DataLoader"):  # its worker processes take most of the time
        cases = request["operations"]["cases"]
        request["operations"]["cases"] = [case for case in cases if case[0] != "DataLoader"]
    patch(monkeypatch)
    checks = probed(request)
    monkeypatch.undo()
    assert wrong(checks) == expected, [check.seen for check in checks]
    assert checks[0].status == "pass" or checks[0].cause


def test_every_operation_is_broken_by_a_test() -> None:
    broken = set().union(*(names for names, _ in BREAKS.values()))
    assert broken == types_of(*OPERATIONS) | {"SGD", "AdamW"}
