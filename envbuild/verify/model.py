"""The settings of a verification, the result of one check as the receipt stores it, and the verdict."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

PASS, FAIL, BLOCKED = "pass", "fail", "blocked"
# A report of the trainer, as it wrote it (ddp_train/report.py).
Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    `status` is "pass", "fail" or "blocked". A blocked check was not judged because the check named in `seen`
    failed and this one would only repeat it. `cause` is the usual cause of a failure; `evidence` holds the
    figures behind the result.
    """

    name: str
    title: str
    status: str
    seen: str
    expected: str
    cause: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


@functools.cache
def check_texts() -> dict[str, dict[str, Any]]:
    """Return data/checks.toml: the title of each check, the usual cause of a failure, and the checks that it needs."""
    return tomllib.loads((resources.files("envbuild.data") / "checks.toml").read_text(encoding="utf-8"))


def judge(
    name: str, good: bool, *, seen: str, expected: str, evidence: dict[str, Any], title: str = "", cause: str = ""
) -> Check:
    """Return a check that passes if `good`. `title` and `cause` override those of data/checks.toml."""
    texts = check_texts()[name.partition(":")[0]]
    if good:
        return Check(name, title or texts["title"], PASS, seen, expected, evidence=evidence)
    return Check(name, title or texts["title"], FAIL, seen, expected, cause or texts["cause"], evidence)


def blocked(name: str, by: str) -> Check:
    """Return a check that could not be judged because `by` failed."""
    return Check(name, check_texts()[name]["title"], BLOCKED, f"not judged: {by} failed", "")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a verification: the recipe's [verify] table, overridden by command-line options."""

    nodes: int = 2
    nproc_per_node: int = 2
    epochs: int = 6
    batch_size: int = 32
    model: str = "mlp"
    timeout_s: float = 600
    loss_tolerance: float = 1e-4
    faults: bool = False
    busbw_floor: float = 0.0

    @property
    def first_epochs(self) -> int:
        """The epochs of the first launch; the second launch continues from its snapshot."""
        return max(1, self.epochs // 2)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results of all checks, in order. `logs` is the folder of the nodes' logs, kept only after a failure."""

    checks: tuple[Check, ...]
    settings: Settings
    seconds: float
    logs: Path | None

    @property
    def passed(self) -> bool:
        return all(check.status == "pass" for check in self.checks)
