"""Result of one compatibility check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["good", "bad", "unknown", "note"]


@dataclass(frozen=True, slots=True)
class CompatFinding:
    """Result for one link of the stack.

    "good" and "bad" rest on `source`, "unknown" means that the data have no row for it, a "note" informs the
    reader. `fix` is the advised change, `date` (ISO 8601) the day when the source was read.
    """

    status: Status
    subject: str
    text: str
    fix: str = ""
    source: str = ""
    date: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the finding as `envbuild explain --json` prints it."""
        return asdict(self)


LOOK_IT_UP = "look it up with the project; docs/reference/compatibility.md says how to add a row"
