"""The result of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envbuild.diagnose.rules import Kind


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line of a log, shortened, without passwords."""

    file: str
    line: int
    text: str

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {"file": self.file, "line": self.line, "text": self.text}


@dataclass(frozen=True, slots=True)
class DiagnosisFinding:
    """A rule that holds: its cause and hint filled in, and the lines that show it."""

    id: str
    kind: Kind
    cause: str
    hint: str
    source: str
    evidence: tuple[Evidence, ...]

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "id": self.id,
            "kind": self.kind,
            "cause": self.cause,
            "remedy": self.hint,
            "source": self.source,
            "evidence": [one.as_json() for one in self.evidence],
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings, causes first; `last` are the last lines that speak of an error, `lines` how many were read;
    `exception` is the program's first exception and where it was, told where no finding says as much."""

    findings: tuple[DiagnosisFinding, ...]
    last: tuple[Evidence, ...]
    lines: int
    exception: tuple[Evidence, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "lines": self.lines,
            "findings": [one.as_json() for one in self.findings],
            "exception": [one.as_json() for one in self.exception],
            "last": [one.as_json() for one in self.last],
        }
