"""Readers of untrusted receipts: every part may be missing, of another type, or forged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from envbuild.base.toml import list_at, table_at, value_at
from envbuild.compat.rows import CompatFinding
from envbuild.inspect.compare import Change

PASSED, FAILED, BLOCKED, OPEN = "pass", "fail", "blocked", "not tried"
WORDS = {PASSED: "passed", FAILED: "failed", BLOCKED: "blocked", OPEN: "not tried"}
_MOST = 1e300


@dataclass(frozen=True, slots=True)
class SizedPackage:
    """A package of an artifact; `size` is in bytes, 0 if unknown."""

    name: str
    version: str
    kind: str
    size: int = 0


@dataclass(frozen=True, slots=True)
class Changes:
    """The differences to `before`, under titles; `notes` name the parts that were not compared."""

    before: str
    groups: Mapping[str, Sequence[Change]]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """A receipt, and the data of its artifact.

    `files` is the number of the artifact's files, None if it was not read, `size` their bytes. `sbom` is its CycloneDX
    document. `chain` are the findings of `envbuild check`, None if its recipe is missing, and `basis` describes the
    judged stack. `notes` are for the reader.
    """

    receipt: Mapping[str, Any]
    path: str
    packages: Sequence[SizedPackage] = ()
    files: int | None = None
    size: int = 0
    sbom: str = ""
    chain: Sequence[CompatFinding] | None = None
    basis: str = ""
    changes: Changes | None = None
    notes: Sequence[str] = field(default=())


def part(value: Any, place: str) -> Any:
    """Return the part `a.b` of an object, None if it is missing."""
    return value_at(value, *place.split("."))


def text_of(value: Any, place: str = "") -> str:
    """Return a text or number, "" for anything else."""
    inner = part(value, place) if place else value
    return str(inner) if isinstance(inner, (str, int, float)) and not isinstance(inner, bool) else ""


def number_of(value: Any, place: str = "") -> float | None:
    """Return a finite number of a size that can be drawn, None for anything else."""
    inner = part(value, place) if place else value
    if isinstance(inner, bool) or not isinstance(inner, (int, float)):
        return None
    # An integer of JSON may be larger than any float.
    return float(inner) if -_MOST < inner < _MOST and math.isfinite(inner) else None


def numbers_of(value: Any) -> list[float]:
    """Return the numbers of a list up to the first value that is not a number."""
    numbers: list[float] = []
    for item in value if isinstance(value, list) else ():
        number = number_of(item)
        if number is None:
            break
        numbers.append(number)
    return numbers


def objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects in a list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def is_receipt(value: object) -> bool:
    """Return whether a JSON document is a receipt, complete or not."""
    return (
        isinstance(value, Mapping) and isinstance(value.get("passed"), bool) and isinstance(value.get("checks"), list)
    )


def checks_of(receipt: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the checks of a receipt."""
    return objects(receipt.get("checks"))


def evidence(receipt: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the evidence of a check, {} without it."""
    return table_at(next((row for row in checks_of(receipt) if row.get("name") == name), {}), "evidence")


def counts(receipt: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of checks by status."""
    statuses = [row.get("status") for row in checks_of(receipt)]
    return {status: statuses.count(status) for status in (PASSED, FAILED, BLOCKED, OPEN)}


def has_passed(receipt: Mapping[str, Any]) -> bool:
    """Return whether the receipt and all of its checks passed."""
    numbers = counts(receipt)
    return receipt.get("passed") is True and not numbers[FAILED] and not numbers[BLOCKED]


def moment(receipt: Mapping[str, Any]) -> datetime | None:
    """Return the time of the verification."""
    try:
        time = datetime.fromisoformat(text_of(receipt, "verified_at"))
        return time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def packages_of(receipt: Mapping[str, Any]) -> dict[str, str]:
    """Return name → version of the packages in a receipt; the version is "" if the receipt has only names."""
    packages = {name: "" for name in list_at(receipt, "packages") if isinstance(name, str)}
    versions = table_at(evidence(receipt, "installed"), "packages")
    return packages | {str(name): text_of(version) for name, version in versions.items()}


def step_seconds(receipt: Mapping[str, Any]) -> float | None:
    """Return the average seconds of a training step, None if it was not measured."""
    measured = number_of(receipt, "performance.step_s")  # of receipts before `performance`, evidence of the launch
    return measured if measured is not None else number_of(evidence(receipt, "launch"), "step_s")
