"""Data model of the checks: their input and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envbuild.environment import Environment

Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One result of a check.

    `status` is "ok", "info" (worth knowing), "warn" (a problem for some uses) or "fail" (blocks envbuild).
    `what` is one line; `hint` is the advised change, or ""; `facts` holds the same data for programs (JSON).
    """

    name: str
    status: Status
    what: str
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return {
            "name": self.name,
            "status": self.status,
            "what": self.what,
            "remedy": self.hint,
            "facts": dict(self.facts),
        }


@dataclass(frozen=True, slots=True)
class Host:
    """Input of the checks: the host, with /proc, /sys and /etc below `root`.

    `variables` are those of the caller. If site.toml or pip's configuration is unreadable, `problem` is the
    reason, `hint` the advised change, and `environment` has defaults or is None.
    """

    variables: Mapping[str, str]
    environment: Environment | None = None
    problem: str = ""
    hint: str = ""
    offline: bool = False
    root: Path = Path("/")


@dataclass(frozen=True, slots=True)
class HostProbe:
    """One check. Its function may yield several findings, and may raise or hang: `run` handles this."""

    area: str
    name: str
    run: Callable[[Host], Iterable[HostFinding]]
