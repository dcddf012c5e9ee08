"""The receipt: the verified artifact, the checks and their evidence. Its JSON Schema is docs/receipt.schema.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from envbuild.base.atomic import write_beside
from envbuild.base.errors import VerificationError
from envbuild.base.files import MISSING, parse_json, read_regular
from envbuild.gpus import Containers

FORMAT = 1
# The status of a check.
PASS, FAIL, BLOCKED, NOT_TRIED = "pass", "fail", "blocked", "not tried"
# The parts of a receipt that are read, and their types; those with ? may be missing.
_PARTS = {
    "format?": int,
    "passed": bool,
    "verified_at?": str,
    "artifact.digest": str,
    "artifact.path?": str,
    "artifact.pushed?": str,
    "recipe.name?": str,
    "plan.digest?": str,
    "target?": str,
    "fabric?": str,
    "settings?": dict,
    "project?": dict,
    "versions.nccl?": str,
    "packages?": list,
    "layers?": list,
    "slim?": dict,
    "performance?": dict,
    "artifact.kind?": str,
    "lock?": dict,
    "host?": dict,
    "checks?": list,
}
_MARKS = {"pass": "ok", "fail": "FAILED", "blocked": "--", "not tried": "--"}


def receipt_path(artifact: Path) -> Path:
    """Return the path of the receipt of `artifact`, which lies beside it."""
    return artifact.with_name(f"{artifact.name}.receipt.json")


def write_receipt(receipt: dict[str, Any], path: Path) -> None:
    """Write the receipt of the artifact at `path` atomically. Raises OSError."""
    write_beside(receipt_path(path), json.dumps(receipt, indent=1) + "\n")


def read_receipt(path: Path) -> dict[str, Any]:
    """Return the receipt in the file `path`. Raises OSError, and ValueError if a part that is used is malformed."""
    receipt = parse_json(read_regular(path))
    for place, kind in _PARTS.items():
        *above, name = place.removesuffix("?").split(".")
        part: Any = receipt
        for key in above:
            part = part.get(key, {}) if isinstance(part, dict) else None
        if not isinstance(part, dict):
            raise ValueError(f"`{'.'.join(above) or 'the receipt'}` is no object")
        value = part.get(name)
        if not isinstance(value, kind) and not (place.endswith("?") and value is None):
            raise ValueError(f"`{'.'.join([*above, name])}` is {'missing' if value is None else f'{value!r:.100}'}")
    for row in receipt.get("layers") or ():
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("name", "version")):
            raise ValueError(f"`layers` has {row!r:.100}")
    loaded: dict[str, Any] = receipt
    return loaded


def passing_receipt(path: Path, digest: str) -> dict[str, Any] | None:
    """Return the receipt beside `path` if it passed and is for the artifact with `digest`, else None.

    Raises OSError for a receipt that cannot be read.
    """
    try:
        receipt = read_receipt(receipt_path(path))
    except (*MISSING, ValueError):
        return None
    good = receipt.get("format") == FORMAT and receipt["passed"] and receipt["artifact"]["digest"] == digest
    return receipt if good else None


def is_quick(receipt: Mapping[str, Any]) -> bool:
    """Return whether the verification was one short launch (--verify quick)."""
    return bool((receipt.get("settings") or {}).get("quick"))


def manifest_of(path: Path, digest: str = "") -> str:
    """Return the sha256 of the manifest that the receipt beside `path` names, passing or not; "" without one.

    Raises VerificationError for the receipt of an artifact with another digest than `digest` ("" for any), and OSError.
    """
    with suppress(*MISSING, ValueError, KeyError, TypeError, AttributeError):
        artifact = parse_json(read_regular(receipt_path(path)))["artifact"]
        manifest = str(artifact.get("manifest", ""))
        if manifest and digest not in ("", artifact["digest"]):
            raise VerificationError(
                f"{receipt_path(path)} is not the receipt of {path}",
                "if you replaced the artifact yourself, remove the receipt; else build the artifact again",
            )
        return manifest
    return ""


def pushed_as(path: Path, digest: str) -> str | None:
    """Return the registry reference (NAME@sha256:…) of image `digest` in the receipt beside `path`, if there is one."""
    receipt = passing_receipt(path, digest)
    return receipt["artifact"].get("pushed") if receipt else None


def record_push(path: Path, digest: str, reference: str, *places: Path) -> None:
    """Record the registry `reference` of image `digest` in its passing receipt, if any, beside `path` and `places`."""
    receipt = passing_receipt(path, digest)
    if receipt is None:
        return
    for place in {path, *places}:
        own = passing_receipt(place, digest) or receipt
        write_receipt({**own, "artifact": {**own["artifact"], "pushed": reference}}, place)


def recorded_gpu_code(receipt: Mapping[str, Any]) -> dict[str, Containers]:
    """Return the containers of each library from the check `gpus` of a receipt; {} for a receipt without this check."""
    try:
        libraries: Mapping[str, Any] = next(
            (check["evidence"]["libraries"] for check in receipt["checks"] if check["name"] == "gpus"), {}
        )
        return {
            path: Containers({tuple(codes.split()): int(count) for codes, count in counts.items()})
            for path, counts in libraries.items()
        }
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}


def check_lines(receipt: Mapping[str, Any]) -> list[str]:
    """Return one line for each check of a receipt."""
    return [f"  {_MARKS[c['status']]:<6}  {c['title']}: {c['seen'].splitlines()[0]}" for c in receipt["checks"]]


def passed_line(receipt: Mapping[str, Any]) -> str:
    """Return the numbers of checks that passed and that were not tried: "22 checks passed, 2 not tried"."""
    states = [check["status"] for check in receipt["checks"]]
    skipped = f", {states.count('not tried')} not tried" if "not tried" in states else ""
    return f"{states.count('pass')} checks passed{skipped}{' (--verify quick)' if is_quick(receipt) else ''}"


def failures(receipt: Mapping[str, Any]) -> str:
    """Describe the failed checks of a receipt: the finding, the expectation, the usual cause."""
    checks = [check for check in receipt["checks"] if check["status"] != NOT_TRIED]
    failed = [check for check in checks if check["status"] == FAIL]
    parts = [
        f"{check['name']} ({check['title']})\n    seen:     {check['seen']}\n"
        f"    expected: {check['expected']}\n    usually:  {check['cause']}"
        for check in failed
    ]
    return "\n  ".join([f"{len(failed)} of {len(checks)} checks failed", *parts])
