"""What a check is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envbuild.environment import Environment

Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One thing that was found. `status`: fine, worth knowing, a nuisance to some, or in the way. `what` is one line;
    `remedy` what to change, "" where nothing is to be; `facts` the same for programs (JSON)."""

    name: str
    status: Status
    what: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "name": self.name,
            "status": self.status,
            "what": self.what,
            "remedy": self.remedy,
            "facts": dict(self.facts),
        }


@dataclass(frozen=True, slots=True)
class Host:
    """The host as checks see it: `variables` of the caller, `environment` (None where site.toml or pip's configuration
    cannot be read; `problem` then says why, `hint` what to change); /proc, /sys and /etc lie below `root`."""

    variables: Mapping[str, str]
    environment: Environment | None = None
    problem: str = ""
    hint: str = ""
    offline: bool = False
    root: Path = Path("/")


@dataclass(frozen=True, slots=True)
class HostProbe:
    """One check. Its function may yield several findings, and may raise or hang: see `run`."""

    area: str
    name: str
    run: Callable[[Host], Iterable[HostFinding]]
