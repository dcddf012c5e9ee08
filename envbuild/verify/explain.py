"""Text for the results of checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from envbuild.verify.model import FAIL, Check

_MARKS = {"pass": "ok", "fail": "FAILED", "blocked": "--"}


def lines(checks: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line for each of a receipt's checks."""
    return [f"  {_MARKS[c['status']]:<6}  {c['title']}: {c['seen'].splitlines()[0]}" for c in checks]


def failures(checks: Sequence[Check]) -> str:
    """Describe the failed checks: what was seen, what was expected, the usual cause."""
    failed = [asdict(check) for check in checks if check.status == FAIL]
    return failures_in(failed, len(checks))


def failures_in(failed: Sequence[Mapping[str, Any]], total: int) -> str:
    """Describe failed checks in a receipt's form; `total` is the number of all checks."""
    parts = [f"{len(failed)} of {total} checks failed"]
    for check in failed:
        parts.append(
            f"{check['name']} ({check['title']})\n    seen:     {check['seen']}\n"
            f"    expected: {check['expected']}\n    usually:  {check['cause']}"
        )
    return "\n  ".join(parts)
