"""Compatibility of a stack: whether its parts work together, by which sources, and what to change."""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.compat.accelerator import driver_links, glibc_links, nccl_links, torch_links
from envbuild.compat.finding import CompatFinding, Status
from envbuild.compat.network import libfabric_links, net_api_links, provider_links
from envbuild.compat.rocm import rocm_links
from envbuild.compat.rows import CompatRule, Rows, load_rows
from envbuild.compat.stack import EXACT, Stack
from envbuild.compat.versions import matches


def judge(stack: Stack, rows: Rows | None = None) -> list[CompatFinding]:
    """Judge `stack` by `rows` (default: data/compatibility.toml), from glibc up to the network.

    Malformed versions do not raise; they give "unknown".
    """
    rows = rows or load_rows()
    links = (
        glibc_links, driver_links, torch_links, rocm_links, nccl_links, net_api_links, libfabric_links,
        provider_links, rule_links,
    )  # fmt: skip
    return [finding for link in links for finding in link(stack, rows)]


def rule_links(stack: Stack, rows: Rows) -> Iterator[CompatFinding]:
    for rule in rows.rules:
        if applies(rule, stack):
            status: Status = "unknown" if rule.status == "unknown" else "bad"
            has = ", ".join(_said(name, stack) for name in rule.when)
            yield CompatFinding(status, rule.subject, f"{rule.reason} ({has})", rule.fix, rule.source, rule.date)


def applies(rule: CompatRule, stack: Stack) -> bool:
    """Return whether `rule` applies to `stack`: every value that the rule names is known and matches."""
    for name, wanted in rule.when.items():
        found = stack.value(name)
        if found is None:
            return False
        if found != wanted if name in EXACT else not matches(found, wanted):
            return False
    return True


def _said(name: str, stack: Stack) -> str:
    names = {"plugin": "aws-ofi-nccl", "cuda": "CUDA", "rocm": "ROCm", "python": "Python", "nccl": "NCCL"}
    words = {
        "provider": f"provider {stack.provider}",
        "plugin_aws": "built for AWS",
        "libfabric_origin": f"libfabric from {stack.libfabric_origin}",
        "nccl_origin": "NCCL from the recipe's wheel",
        "nccl_in": f"torch's NCCL is {stack.nccl_in}",
        "fabric": f"fabric {stack.fabric}",
        "arch": stack.arch,
    }
    return words.get(name) or f"{names.get(name, name)} {stack.value(name)}"


__all__ = ["CompatFinding", "judge"]
