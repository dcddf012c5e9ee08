"""The tables of this folder: versions, sources and rules as data, each explained in its own comments."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


@functools.cache
def load_table(name: str) -> dict[str, Any]:
    """Return the content of NAME.toml, which all callers share and none changes."""
    # Not importlib.resources, which takes ten milliseconds: `--help` and every recipe read a table.
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
