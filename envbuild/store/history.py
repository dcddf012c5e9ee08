"""Measurements of each recipe's verifications over time: a bounded record in the store for each recipe.

Every build replaces the receipt beside its artifact. Its figures for comparison over time are kept in this record,
without the checks and their evidence: a few hundred bytes each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from envbuild.base.atomic import folder_lock
from envbuild.base.errors import BuildError
from envbuild.base.text import human_size
from envbuild.cache.hashed import read_note, write_note
from envbuild.store.store import Store

# Rows that are kept of each artifact kind and target of a recipe, and the names that may be those of files.
KEPT = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SETTINGS = ("nodes", "nproc_per_node", "model", "batch_size")
# A change below this part of the largest value is not drawn as one.
_FLAT = 0.2
_BLOCKS = "▁▂▃▄▅▆▇█"
# No figure is as large: the others in a receipt of another origin are none.
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of `performance` in a receipt: its title, and the function that writes a value with its unit."""

    title: str
    show: Callable[[float], str]


def _time(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


METRICS = {
    "step_s": Metric("one step", _time),
    "import_s": Metric("import of torch", _time),
    "startup_s": Metric("start-up", _time),
    "peak_memory_bytes": Metric("peak memory", human_size),
    "peak_gpu_memory_bytes": Metric("peak GPU memory", human_size),
    "busbw_gbs": Metric("all-reduce bandwidth", lambda value: f"{value:.2f} GB/s"),
}


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < _MOST


def row_of(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a receipt that are compared over time."""

    def digest(part: str) -> str:
        return str((receipt.get(part) or {}).get("digest", ""))

    artifact, settings = receipt["artifact"], receipt.get("settings") or {}
    checks = [check for check in receipt.get("checks") or () if isinstance(check, dict)]
    figures = {k: v for k, v in (receipt.get("performance") or {}).items() if k not in METRICS or _is_figure(v)}
    return {
        "verified_at": receipt.get("verified_at") or "",
        "passed": receipt["passed"],
        "failed": [check.get("name") for check in checks if check.get("status") == "fail"],
        "target": receipt.get("target", ""),
        "kind": artifact.get("kind", ""),
        "path": artifact.get("path", ""),
        "digest": artifact["digest"],
        "lock": digest("lock"),
        "plan": digest("plan"),
        "runtime": receipt.get("runtime", ""),
        "host": receipt.get("host") or {},
        "versions": receipt.get("versions") or {},
        "settings": {name: settings.get(name) for name in _SETTINGS},
        "performance": figures,
    }


def record(store: Store, receipt: Mapping[str, Any]) -> None:
    """Keep the facts of a receipt in place of the oldest of its series. Does nothing if the store cannot be written."""
    recipe = receipt["recipe"]["name"]
    if not _NAME.fullmatch(recipe):  # an image of a foreign origin has none
        return
    with suppress(OSError, BuildError):
        folder, row = store.folder("history"), row_of(receipt)
        with folder_lock(folder):  # two builds at a time: each reads what the other has written
            rows = [*recorded(store, recipe), row]
            series = [other for other in rows if (other["target"], other["kind"]) == (row["target"], row["kind"])]
            gone = {id(other) for other in series[:-KEPT]}
            kept = [row for row in rows if id(row) not in gone]
            write_note(folder / f"{recipe}.json", {"rows": kept}, durable=True)


def recorded(store: Store, recipe: str) -> list[dict[str, Any]]:
    """Return the recorded rows of a recipe, oldest first; [] without any."""
    with suppress(OSError, ValueError, KeyError):
        if _NAME.fullmatch(recipe):
            return list(read_note(store.root / "history" / f"{recipe}.json")["rows"])
    return []


def merged(*parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of all `parts` in the order of their time, each once."""
    rows = {(row["verified_at"], row["digest"], row["target"], row["kind"]): row for part in parts for row in part}
    return [rows[key] for key in sorted(rows, key=str)]


def sparkline(values: Sequence[float | None]) -> str:
    """Return one character for each value, higher for a larger one, a space for None."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = max(high - low, _FLAT * high) or 1.0
    last = len(_BLOCKS) - 1
    return "".join(" " if value is None else _BLOCKS[round((value - low) / span * last)] for value in values)
