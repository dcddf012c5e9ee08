"""Messages of Open MPI and of PRRTE, which are blocks of lines: each is read as one line of text.

A block begins and ends with a line of 74 dashes (opal/util/show_help.c, "dash_line"); a line may have a prefix that
names its process (`[1,0]<stderr>:`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from envbuild.jobcheck.diagnose.exception import Line

RULE = "-" * 74
# Longer ones are no message, but lines between two tables.
_LONGEST = 60
_SHOWN = 1000


@dataclass(slots=True)
class HelpBlock:
    """The block that is read; `open` while its end is missing, and each line counts."""

    open: bool = False
    _prefix: str = ""
    _lines: list[Line] = field(default_factory=list)

    def read(self, line: Line) -> tuple[Line, str] | None:
        """Read a line; return the first line of a block and its text if this line ends it."""
        prefix, ruled, rest = line.text.partition(RULE)
        if not ruled or rest.strip("- "):
            self._go_on(line)
            return None
        found = self._lines
        # Two rules without text between them: the second one begins a block.
        self.open, self._prefix, self._lines = not self.open or not found, prefix, []
        texts = (one.text.removeprefix(prefix) for one in found)
        text = " ".join(" ".join(texts).split())
        return (found[0], text[:_SHOWN]) if text else None

    def _go_on(self, line: Line) -> None:
        if self.open and line.text.removeprefix(self._prefix).strip():
            self._lines.append(line)
            if len(self._lines) > _LONGEST:
                self.open, self._lines = False, []
