"""Removal of unused parts of wheels by `[slim]` and the rules in data/slim.toml; see docs/reference/slim.md."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from envbuild.data import load_table
from envbuild.gpus import NATIVE, PTX, Chip, all_chips, runs

_NUMBER = re.compile(r"(?:sm|compute)_(\d+)([af]?)")


def file_rules() -> tuple[str, ...]:
    """Return the valid values of `files` in [slim]."""
    return tuple(load_table("slim")["files"])


@dataclass(frozen=True, slots=True)
class SlimRules:
    """Parts removed from a target's wheels: code for GPUs other than `chips` (none: all stays), debug sections, files.

    `version` is the version of the rules.
    """

    version: int
    chips: tuple[str, ...] = ()
    debug: bool = False
    files: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the rules as the state, the receipt and slim wheels have them."""
        return {"rules": self.version, "gpus": list(self.chips), "debug": self.debug, "files": list(self.files)}

    def blanks(self, distribution: str, path: str) -> bool:
        """Return whether parts of the library at `path` of a wheel may be blanked; the name is normalised."""
        return (bool(self.chips) or self.debug) and any(
            re.fullmatch(row["distribution"], distribution) and re.fullmatch(row["libraries"], path)
            for row in load_table("slim")["free"]
        )

    def removes(self, path: str) -> bool:
        """Return whether the file at `path` of a wheel is left out."""
        rules = [load_table("slim")["files"][name] for name in self.files]
        return not re.match(r"[^/]+\.dist-info/", path) and any(
            re.fullmatch(rule["paths"], path) and not re.fullmatch(rule["except"], path) for rule in rules
        )


def slim_rules(*, gpus: bool, debug: bool, files: Iterable[str], words: Iterable[str]) -> SlimRules | None:
    """Return the rules of a target whose GPUs are `words` from the keys of [slim]; None if nothing is left out.

    Code of AMD GPUs stays: see docs/reference/slim.md.
    """
    chips = (chip.name for chip in all_chips(words) if chip.accelerator == "cuda") if gpus else ()
    rules = SlimRules(load_table("slim")["version"], tuple(sorted(chips)), debug, tuple(sorted(files)))
    return rules if rules.chips or rules.debug or rules.files else None


def unused(codes: Collection[str], chips: Iterable[Chip]) -> set[str]:
    """Return the `codes` of a container that the driver selects on none of `chips`.

    It selects code of the chip's own major version with the highest minor version, else PTX of the highest version that
    the chip supports; the rest is never read. Code for one architecture or family (sm_90a, sm_100f) that runs is always
    kept.
    """
    kept: set[str] = set()
    for chip in chips:
        fitting = {way: [code for code in codes if runs(code, chip) == way] for way in (NATIVE, PTX)}
        best = fitting[NATIVE] or fitting[PTX]
        most = max((_number(code)[0] for code in best), default=0)
        kept |= {code for code in best if _number(code)[0] == most or _number(code)[1]}
    return {code for code in codes if _NUMBER.fullmatch(code)} - kept


def _number(code: str) -> tuple[int, str]:
    match = _NUMBER.fullmatch(code)
    return (int(match[1]), match[2]) if match else (0, "")
