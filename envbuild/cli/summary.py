"""The summary that ends a build: what it made, where, and at which cost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from envbuild.base.errors import BuildError
from envbuild.base.progress import display, log
from envbuild.base.text import human_size, human_time
from envbuild.contract.manifest import read_manifest
from envbuild.contract.receipt import passed_line, read_receipt


def summarise(what: str, made: Mapping[str, Any], size: int | None = None) -> None:
    """Print the summary of a build of `what` to stderr, from the object that `--json` prints.

    `size` is in bytes; None for that of the file or folder at the path.
    """
    path = Path(made["path"])
    rows = [
        ("built", f"{what} for {made['target']}"),
        ("path", _near(made["path"])),
        ("size", human_size(found) if (found := size or _size(path)) else ""),
        ("digest", made["digest"]),
        ("checks", _checks(made["receipt"])),
        ("receipt", _near(made["receipt"] or "")),
        ("time", human_time(made["seconds"])),
        ("reused", _reused(display().reused)),
    ]
    # A digest begins in column 9, so that it ends in column 80.
    log("\n".join(["", *(f"{name:<7}  {text}" for name, text in rows if text)]))


def _near(path: str) -> str:
    """Return a path from the current folder, if it is below that."""
    return path.removeprefix(os.path.join(os.getcwd(), ""))


def _size(path: Path) -> int | None:
    if path.is_file():
        return path.stat().st_size
    with suppress(BuildError, OSError):
        if (manifest := read_manifest(path)) is not None:
            return sum(row.size for row in manifest.rows.values())
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())  # an OCI layout
    return None


def _checks(receipt: str | None) -> str:
    """Return the checks that passed, from the receipt at that path; they may be those of an earlier build."""
    if receipt is None:
        return "not verified"
    with suppress(OSError, ValueError, LookupError, TypeError):
        found = read_receipt(Path(receipt))
        return f"{passed_line(found)}, {human_time(found['seconds'])}, {found['verified_at']}"
    return ""


def _reused(parts: Mapping[str, Mapping[str, bool]]) -> str:
    """Return how many parts of each kind were there before: "9 of 10 wheels, 5 of 5 layers"."""
    return ", ".join(f"{sum(there.values())} of {len(there)} {kind}" for kind, there in parts.items())
