"""What differs between two receipts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envbuild.inspect.compare import Change
from envbuild.report.data import WORDS, Changes, checks_of, number_of, packages_of, step_seconds, text_of

_FACTS = {
    "lock": "lock.digest",
    "recipe": "recipe.digest",
    "artifact": "artifact.digest",
    "fabric": "fabric",
    "runtime": "runtime",
    "envbuild": "versions.envbuild",
    "Python": "versions.python",
    "torch": "versions.torch",
    "NCCL": "versions.nccl",
    "host": "host.name",
    "kernel": "host.kernel",
    "processors": "host.cpus",
}


def receipt_changes(before: Mapping[str, Any], now: Mapping[str, Any], title: str) -> Changes:
    """Return the differences between two receipts."""
    statuses = [
        {
            text_of(check, "name"): WORDS.get(text_of(check, "status"), text_of(check, "status"))
            for check in checks_of(one)
        }
        for one in (before, now)
    ]

    def measured(receipt: Mapping[str, Any]) -> dict[str, str]:
        step, whole = step_seconds(receipt), number_of(receipt, "seconds")
        return ({"training step": f"{step * 1000:.3g} ms"} if step is not None else {}) | (
            {"verification": f"{whole:.1f} s"} if whole is not None else {}
        )

    def facts(receipt: Mapping[str, Any]) -> dict[str, str]:
        return {name: _short(text) for name, place in _FACTS.items() if (text := text_of(receipt, place))}

    groups = {
        "Checks": _differing(*statuses),
        "Packages": _differing(packages_of(before), packages_of(now)),
        "Facts": _differing(facts(before), facts(now)),
        "Measurements": _differing(measured(before), measured(now)),
    }
    return Changes(title, groups)


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [Change(name, before.get(name), now.get(name)) for name in names]


def _short(text: str) -> str:
    """Return a digest as far as people compare it."""
    return f"{text[:19]}…" if text.startswith("sha256:") else text
