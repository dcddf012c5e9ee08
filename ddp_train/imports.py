"""The import of modules by every rank, or by a process of its own without torch."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

# `envbuild verify` sets it to the names of modules, separated by spaces.
IMPORTS = "DDP_TRAIN_IMPORTS"
_LONGEST = 500


def import_modules(environ: Mapping[str, str]) -> dict[str, str]:
    """Import every module in IMPORTS; return its name → "", or the error of its import.

    Modules may print, exit or fail in any way. One that ends the process by a signal is the last in the log.
    """
    failures = {}
    for name in environ.get(IMPORTS, "").split():
        print(f"importing {name}", file=sys.stderr, flush=True)
        try:
            importlib.import_module(name)
            failures[name] = ""
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an import may raise anything
            failures[name] = f"{type(error).__name__}: {error}"[:_LONGEST]
    return failures


def main(report: str) -> None:
    """Write the report of one process that only imports, in the form of a training's, as far as it goes."""
    rank = {"rank": int(os.environ.get("GROUP_RANK", "0")), "imports": import_modules(os.environ)}
    Path(report).write_text(json.dumps({"ranks": [rank]}), encoding="utf-8")
