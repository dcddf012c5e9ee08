"""Names of schedulers and launchers, from data/schedulers.toml: what site files and options accept."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

# Not by importlib.resources: `--help` reads this, and has to be quick.
_ROWS = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "schedulers.toml").read_text(encoding="utf-8")
)
# Each scheduler's name for people.
TITLES: Mapping[str, str] = {name: row["title"] for name, row in _ROWS.items()}
# What starts torchrun on every node, by scheduler, the default first.
LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    name: tuple(row["launchers"]) for name, row in _ROWS.items()
}
SCHEDULER_NAMES = tuple(LAUNCHERS)
LAUNCHER_NAMES = tuple(dict.fromkeys(one for known in LAUNCHERS.values() for one in known))


def listed(names: tuple[str, ...], last: str = "or") -> str:
    """`names` as a sentence lists them: a, b or c."""
    *first, end = names
    return f"{', '.join(first)} {last} {end}" if first else end
