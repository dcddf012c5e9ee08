"""Names of schedulers and launchers, from data/schedulers.toml; site files and options accept them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

# Not importlib.resources: `--help` reads this file and has to be fast.
_ROWS = tomllib.loads((Path(__file__).parents[1] / "data" / "schedulers.toml").read_text(encoding="utf-8"))
# Display name of each scheduler.
TITLES: Mapping[str, str] = {name: row["title"] for name, row in _ROWS.items()}
# Launchers that start torchrun on every node, by scheduler; the first is the default.
LAUNCHERS: Mapping[str, tuple[str, ...]] = {name: tuple(row["launchers"]) for name, row in _ROWS.items()}
SCHEDULER_NAMES = tuple(LAUNCHERS)
LAUNCHER_NAMES = tuple(dict.fromkeys(one for known in LAUNCHERS.values() for one in known))


def listed(names: tuple[str, ...], last: str = "or") -> str:
    """Return `names` as a list in a sentence: a, b or c."""
    *first, end = names
    return f"{', '.join(first)} {last} {end}" if first else end
