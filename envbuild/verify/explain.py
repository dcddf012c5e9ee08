"""Checks in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from envbuild.verify.model import FAIL, Check

_MARKS = {"pass": "ok", "fail": "FAILED", "blocked": "--"}


def lines(checks: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line a check, of a receipt's checks."""
    return [
        f"  {_MARKS[c['status']]:<6}  {c['title']}: {c['seen'].splitlines()[0]}" for c in checks
    ]


def failures(checks: Sequence[Check]) -> str:
    """What failed: what was seen, what was expected, what usually causes it."""
    failed = [asdict(check) for check in checks if check.status == FAIL]
    return failures_in(failed, len(checks))


def failures_in(failed: Sequence[Mapping[str, Any]], total: int) -> str:
    """The same for checks as a receipt holds them; `failed` are those that failed of `total`."""
    parts = [f"{len(failed)} of {total} checks failed"]
    for check in failed:
        parts.append(
            f"{check['name']} ({check['title']})\n    seen:     {check['seen']}\n"
            f"    expected: {check['expected']}\n    usually:  {check['cause']}"
        )
    return "\n  ".join(parts)
