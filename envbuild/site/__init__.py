"""The site: the settings of builds and jobs in site.toml, and the user's configuration of pip and uv.

The exceptions of [audit] are here because recipes have them too, and tables.py imports the library for images.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from envbuild.base.toml import required


def _day_problem(text: str) -> str | None:
    try:
        return None if date.fromisoformat(text).isoformat() == text else f"{text!r} is not a day: write YYYY-MM-DD"
    except ValueError:
        return f"{text!r} is not a day: write YYYY-MM-DD"


@dataclass(frozen=True, slots=True)
class AuditException:
    """`[audit.exceptions.ID]` of a site or recipe: a known vulnerability that is accepted until a day."""

    reason: str = required("Why the vulnerability is accepted.", pattern=r"\S.*", example="only trusted files are read")
    expires: str = required("The last day of the exception.", check=_day_problem, example="2027-01-31")
