"""Readers of untrusted receipts: every part may be missing, of another type, or forged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

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
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def text_of(value: Any, place: str = "") -> str:
    """Return a text or number, "" for anything else."""
    found = part(value, place) if place else value
    return str(found) if isinstance(found, (str, int, float)) and not isinstance(found, bool) else ""


def number_of(value: Any, place: str = "") -> float | None:
    """Return a finite number of a size that can be drawn, None for anything else."""
    found = part(value, place) if place else value
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return None
    # An integer of JSON may be larger than any float.
    return float(found) if -_MOST < found < _MOST and math.isfinite(found) else None


def numbers_of(value: Any) -> list[float]:
    """Return the numbers of a list up to the first value that is not a number."""
    found: list[float] = []
    for one in value if isinstance(value, list) else ():
        number = number_of(one)
        if number is None:
            break
        found.append(number)
    return found


def objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects in a list."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


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
    found = next((one.get("evidence") for one in checks_of(receipt) if one.get("name") == name), None)
    return found if isinstance(found, Mapping) else {}


def counts(receipt: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of checks by status."""
    told = [one.get("status") for one in checks_of(receipt)]
    return {status: told.count(status) for status in (PASSED, FAILED, BLOCKED, OPEN)}


def has_passed(receipt: Mapping[str, Any]) -> bool:
    """Return whether the receipt and all of its checks passed."""
    found = counts(receipt)
    return receipt.get("passed") is True and not found[FAILED] and not found[BLOCKED]


def moment(receipt: Mapping[str, Any]) -> datetime | None:
    """Return the time of the verification."""
    try:
        found = datetime.fromisoformat(text_of(receipt, "verified_at"))
        return found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def packages_of(receipt: Mapping[str, Any]) -> dict[str, str]:
    """Return name → version of the packages in a receipt; the version is "" if the receipt has only names."""
    named = receipt.get("packages")
    found = {name: "" for name in named if isinstance(name, str)} if isinstance(named, list) else {}
    versions = evidence(receipt, "installed").get("packages")
    return found | {
        str(name): text_of(one) for name, one in (versions if isinstance(versions, Mapping) else {}).items()
    }


def step_seconds(receipt: Mapping[str, Any]) -> float | None:
    """Return the average seconds of a training step, None if it was not measured."""
    measured = number_of(receipt, "performance.step_s")  # of receipts before `performance`, evidence of the launch
    return measured if measured is not None else number_of(evidence(receipt, "launch"), "step_s")
