"""How to verify, the outcome of one check as the receipt keeps it, and of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASS, FAIL, BLOCKED = "pass", "fail", "blocked"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    `status` is "pass", "fail", or "blocked": not judged, because the check named in `seen` failed and
    this one would only repeat it. `cause` says what usually makes the check fail; `evidence` holds
    the figures it was judged by.
    """

    name: str
    title: str
    status: str
    seen: str
    expected: str
    cause: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


def judge(
    name: str,
    title: str,
    good: bool,
    *,
    seen: str,
    expected: str,
    cause: str,
    evidence: dict[str, Any] | None = None,
) -> Check:
    """A check that passes when `good`."""
    return Check(
        name, title, PASS if good else FAIL, seen, expected, "" if good else cause, evidence or {}
    )


def blocked(name: str, title: str, by: str) -> Check:
    """A check that could not be judged because `by` failed."""
    return Check(name, title, BLOCKED, f"not judged: {by} failed", "")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to verify: the recipe's [verify] table, or the command line's word over it."""

    nodes: int = 2
    nproc_per_node: int = 2
    epochs: int = 6
    batch_size: int = 32
    model: str = "mlp"
    timeout_s: float = 600
    loss_tolerance: float = 1e-4
    faults: bool = False
    busbw_floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """All checks, in order. `logs` is the folder of the nodes' logs, kept only after a failure."""

    checks: tuple[Check, ...]
    settings: Settings
    seconds: float
    logs: Path | None

    @property
    def passed(self) -> bool:
        return all(check.status == "pass" for check in self.checks)
