"""Checks on the results of the probes in a trainer's report, against the results that envbuild computes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from envbuild.verify.model import Check, Report, judge
from envbuild.verify.probes import Case, Request, expected_digest, expected_parameters, probe_table

# float64 rounds at 1e-16, and the order of sums is free.
_TOLERANCE = 1e-9
_SHOWN = 5


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
            if result.startswith("error: ") and _may_lack(case, report["backend"], rank["torch_version"]):
                lacking.add(name)
            elif result != expected(case, rank["rank"] if case[0] == "reduce_scatter" else 0):
                wrong.append(f"rank {rank['rank']}: {name} {result if ' ' in result else 'is wrong'}")
    number = len(cases) - len(lacking)
    good = f"{number} results exact on {len(report['ranks'])} ranks"
    more = f"; {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return judge(
        check,
        not wrong,
        seen="; ".join(wrong[:_SHOWN]) + more or good + (f"; {len(lacking)} that this torch lacks" if lacking else ""),
        expected=f"on all ranks the {number} results that envbuild computes",
        evidence={"cases": cases, "unsupported": sorted(lacking), "wrong": wrong[:50]},
    )


def _may_lack(case: Case, backend: str, torch: str) -> bool:
    """Return whether a row of data/probes.toml says that this version of torch may not support `case`."""
    facts = {"backend": backend, "op": case[0], "dtype": case[1]}
    rows = [row for row in probe_table()["unsupported"] if {**facts, **row} == {**row, **facts}]
    return any(_release(torch) < _release(row["before"]) for row in rows)


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
    """Check that every rank's steps of SGD equal those that envbuild computes."""
    expected = expected_parameters(request)
    found: list[list[float]] = [rank["probes"]["optimizer"] for rank in report["ranks"]]
    pairs = [pair for values in found for pair in zip(values, expected, strict=True)]
    worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
    return judge(
        "optimizer",
        worst <= _TOLERANCE,
        seen=f"{len(request['optimizer']['data'])} steps of SGD, largest difference {worst:.3g}",
        expected=f"the parameters that envbuild computes, within {_TOLERANCE:g}",
        evidence={"lr": request["optimizer"]["lr"], "expected": expected, "seen": found[0]},
    )
