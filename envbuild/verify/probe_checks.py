"""Checks on the results of the probes in a trainer's report, against the results that envbuild computes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envbuild.verify.model import Check, Report, judge
from envbuild.verify.operations import SHUFFLED, expected_parts, operation_cases
from envbuild.verify.probes import OPTIMIZERS, Case, Request, expected_digest, expected_parameters, probe_table

# float64 rounds at 1e-16, and the order of sums is free.
_TOLERANCE = 1e-9
_SHOWN = 5
_LARGEST = 1e300  # JSON has no infinity
# How the trainer's reason begins if not torch, but this host makes a probe impossible (ddp_train/operations.py).
_HOST = "host: "


def check_allreduce(request: Request, report: Report) -> Check:
    """Check that all-reduces of known tensors leave the exact bytes on every rank."""
    return _check_cases("allreduce", request, report, [])


def check_collectives(request: Request, report: Report) -> Check:
    """Check the bytes of broadcast, all-gather and reduce-scatter, and that no rank left the barrier early."""
    times = [rank["probes"]["barrier"] for rank in report["ranks"]]
    last = max(one["entered"] for one in times)
    early = [rank for rank, one in enumerate(times) if one["left"] < last]
    wrong = [f"ranks {early} left the barrier before another rank entered"] if early else []
    return _check_cases("collectives", request, report, wrong)


def _check_cases(check: str, request: Request, report: Report, wrong: list[str]) -> Check:
    cases: list[Case] = [tuple(case) for case in request["cases"][check]]  # lists, if it comes from JSON
    expected = functools.cache(functools.partial(expected_digest, request))
    lacking: set[str] = set()
    for rank in report["ranks"]:
        results: Mapping[str, str] = rank.get("probes", {}).get(check, {})
        for case in cases:
            name = "{} {} × {}".format(*case)
            result = results.get(name, "is missing")
            facts = {"backend": report["backend"], "op": case[0], "dtype": case[1]}
            if result.startswith("error: ") and _may_lack(facts, rank):
                lacking.add(name)
            elif result != expected(case, rank["rank"] if case[0] == "reduce_scatter" else 0):
                wrong.append(f"rank {rank['rank']}: {name} {result if ' ' in result else 'is wrong'}")
    number = len(cases) - len(lacking)
    good = f"{number} results exact on {len(report['ranks'])} ranks"
    return judge(
        check,
        not wrong,
        seen=(_some(wrong) or good) + (f"; {len(lacking)} that this torch lacks" if lacking else ""),
        expected=f"on all ranks the {number} results that envbuild computes",
        evidence={"cases": cases, "unsupported": sorted(lacking), "wrong": wrong[:50]},
    )


def _some(wrong: Sequence[str]) -> str:
    return "; ".join(wrong[:_SHOWN]) + (f"; {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")


def _may_lack(facts: Mapping[str, Any], rank: Mapping[str, Any]) -> bool:
    """Return whether a row of data/probes.toml says that torch may not support a probe on this rank.

    `facts` are those of the probe, under the names of a row's keys.
    """
    facts = {**facts, "device": rank["device"].partition(":")[0]}
    return any(
        all(facts.get(name) == value for name, value in row.items() if name != "before")
        and _release(rank["torch_version"]) < _release(row["before"])
        for row in probe_table()["unsupported"]
    )


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def check_sampler(request: Request, report: Report) -> Check:
    """Check that the ranks' shares are complete and equally large, in an order that the epoch alone decides."""
    size, epochs, world = request["sampler"]["size"], request["sampler"]["epochs"], len(request["values"])
    each = -(-size // world)  # shares are filled up with samples that another rank has, too
    # By epoch, the shares of all ranks
    orders = list(zip(*(rank["probes"]["sampler"] for rank in report["ranks"]), strict=True))
    wrong = []
    for epoch, shares in zip(epochs, orders, strict=True):
        sizes, seen = [len(share) for share in shares], set().union(*shares)
        if seen != set(range(size)) or sizes != [each] * world:
            wrong.append(f"epoch {epoch}: {len(seen)} of {size} samples, in shares of {sizes}")
    if orders[0] == orders[1]:
        wrong.append(f"epochs {epochs[0]} and {epochs[1]} have one order: set_epoch has no effect")
    if orders[0] != orders[2]:
        wrong.append(f"epoch {epochs[0]} has two orders")
    good = f"{size} samples in {world} shares of {each}, in another order in another epoch"
    evidence = {"samples": size, "epochs": epochs, "wrong": wrong}
    return judge("sampler", not wrong, seen="; ".join(wrong) or good, expected=good, evidence=evidence)


def check_optimizer(request: Request, report: Report) -> Check:
    """Check that every rank's steps of each optimizer equal those that envbuild computes."""
    expected = {name: expected_parameters(request, name) for name in OPTIMIZERS}
    ranks: list[Mapping[str, list[float]]] = [rank["probes"]["optimizer"] for rank in report["ranks"]]
    worst = {name: max(_difference(rank[name], expected[name]) for rank in ranks) for name in OPTIMIZERS}
    return judge(
        "optimizer",
        all(one <= _TOLERANCE for one in worst.values()),
        seen=f"{len(request['optimizer']['data'])} steps, largest difference "
        + ", ".join(f"of {name} {one:.3g}" for name, one in worst.items()),
        expected=f"the parameters that envbuild computes, within {_TOLERANCE:g}",
        evidence={
            "settings": {name: request["optimizer"][name] for name in OPTIMIZERS},
            "expected": expected,
            "seen": {name: ranks[0][name] for name in OPTIMIZERS},
        },
    )


def _difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference, relative to the expected value, or to 1 if that is smaller."""
    found = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(values, expected, strict=True)]
    return math.inf if any(map(math.isnan, found)) else max(found)


def check_operations(request: Request, report: Report) -> Check:
    """Check the results of the operations that one process probed."""
    rank, tolerances = report["ranks"][0], {(op, dtype): one for op, dtype, one in operation_cases(gpu=True)}
    results: Mapping[str, Mapping[str, list[float]] | str] = rank["probes"]["operations"]
    expected = functools.cache(functools.partial(expected_parts, request["operations"]))
    wrong: list[str] = []
    worst: dict[str, float] = {}
    lacking: dict[str, str] = {}
    for op, dtype in request["operations"]["cases"]:
        name = f"{op} {dtype}"
        result = results.get(name, "no result")
        if isinstance(result, str):
            known = result.startswith("error: ") and _may_lack({"op": op, "dtype": dtype}, rank)
            if known or (result.startswith(_HOST) and (op == "DataLoader" or dtype == "bfloat16")):
                lacking[name] = result
            else:
                wrong.append(f"{name}: {result}")
            continue
        found = [_part(part, result.get(part), values, tolerances[op, dtype]) for part, values in expected(op).items()]
        worst[name] = min(_LARGEST, max(one for one, _ in found))
        if faults := [fault for _, fault in found if fault]:
            more = f"; {len(faults) - 1} other parts are wrong, too" if len(faults) > 1 else ""
            wrong.append(f"{name}: {faults[0]}{more}")
    number = len(worst)
    return judge(
        "operations",
        not wrong,
        seen=(_some(wrong) or f"{number} results of {len({op for op, _ in request['operations']['cases']})} operations")
        + "".join(f"; not probed: {name} ({why})" for name, why in lacking.items()),
        expected="the results that envbuild computes, within the tolerance of each operation and type",
        evidence={"differences": worst, "unsupported": lacking, "wrong": wrong[:50]},
    )


def _part(part: str, values: Sequence[float] | None, expected: Sequence[float], tolerance: float) -> tuple[float, str]:
    """Return the largest difference of a part of a result, and the fault in words, "" for none."""
    if values is None:
        return math.inf, f"{part} is missing"
    if len(values) != len(expected):
        return math.inf, f"{part} has {len(values)} values instead of {len(expected)}"
    if part == SHUFFLED:
        if list(values) == list(expected):
            return math.inf, f"{part} has the order of the samples"
        values, expected = sorted(values), sorted(expected)
    worst = _difference(values, expected)
    if worst <= tolerance:
        return worst, ""
    number = sum(not _difference([a], [b]) <= tolerance for a, b in zip(values, expected, strict=True))
    return worst, f"{part} differs in {number} of {len(values)} values, by up to {worst:.3g}"
