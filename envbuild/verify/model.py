"""The outcome of one check, as the receipt keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
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
