"""One link of the chain of reasons."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["good", "bad", "unknown", "note"]


@dataclass(frozen=True, slots=True)
class CompatFinding:
    """One link: "good" and "bad" rest on `source`, "unknown" is what no row says, a "note" is for the reader.

    `fix` says what to change, `date` (ISO 8601) when the source was read.
    """

    status: Status
    subject: str
    text: str
    fix: str = ""
    source: str = ""
    date: str = ""

    def as_json(self) -> dict[str, str]:
        """As `envbuild explain --json` prints it."""
        return asdict(self)


LOOK_IT_UP = "look it up with the project; docs/reference/compatibility.md says how to add a row"
