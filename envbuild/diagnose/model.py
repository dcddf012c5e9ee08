"""The result of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envbuild.diagnose.rules import Kind


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line of a log, shortened and without passwords."""

    file: str
    line: int
    text: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields for --json."""
        return {"file": self.file, "line": self.line, "text": self.text}


@dataclass(frozen=True, slots=True)
class DiagnosisFinding:
    """A rule that holds, with its cause and hint filled in, and the lines that are its evidence."""

    id: str
    kind: Kind
    cause: str
    hint: str
    source: str
    evidence: tuple[Evidence, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields for --json."""
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
    """The findings, causes first.

    `last` are the last lines that look like an error, `lines` is the number of lines read. `exception` is the
    program's first exception and its location, if no finding explains it.
    """

    findings: tuple[DiagnosisFinding, ...]
    last: tuple[Evidence, ...]
    lines: int
    exception: tuple[Evidence, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the fields for --json."""
        return {
            "lines": self.lines,
            "findings": [one.as_json() for one in self.findings],
            "exception": [one.as_json() for one in self.exception],
            "last": [one.as_json() for one in self.last],
        }
