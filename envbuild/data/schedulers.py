"""Names of schedulers and launchers, from data/schedulers.toml; site files and options accept them."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.data import load_table

_ROWS = load_table("schedulers")
# Display name of each scheduler.
TITLES: Mapping[str, str] = {name: row["title"] for name, row in _ROWS.items()}
# Launchers that start torchrun on every node, by scheduler; the first is the default.
LAUNCHERS: Mapping[str, tuple[str, ...]] = {name: tuple(row["launchers"]) for name, row in _ROWS.items()}
SCHEDULER_NAMES = tuple(LAUNCHERS)
LAUNCHER_NAMES = tuple(dict.fromkeys(launcher for known in LAUNCHERS.values() for launcher in known))


def listed(names: tuple[str, ...], last: str = "or") -> str:
    """Return `names` as a list in a sentence: a, b or c."""
    *first, end = names
    return f"{', '.join(first)} {last} {end}" if first else end
