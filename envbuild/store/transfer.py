"""Transfers between a store and a team's cache: whether a build waits for them, and what of them may be used."""

from __future__ import annotations

import time
from dataclasses import dataclass

# Transfers with fewer bytes per second, after the first seconds, are not waited for.
SLOWEST, _PATIENCE_S = 100_000, 10.0


@dataclass(slots=True)
class Transfer:
    """The speed of a download or of all uploads; `begun` is 0 before it starts, `given_up` if nobody waits for it.

    `described` is whether all files of an entry are in place but the data of a segment. `last` are the bytes of the
    files that come after it, `shown` is whether they were used as they came, and `taken_back` whether some came again.
    """

    begun: float = 0.0
    moved: int = 0
    given_up: bool = False
    described: bool = False
    last: int = 0
    shown: bool = False
    taken_back: bool = False

    def start(self) -> None:
        """Begin to measure."""
        self.begun, self.moved = time.monotonic(), 0

    def count(self, moved: int) -> None:
        """Note bytes that were moved, or, by a negative number, that must be moved again."""
        self.moved += moved
        self.last += moved
        self.taken_back |= moved < 0

    def is_slow(self) -> bool:
        """Return whether it is too slow to wait for; a server that sends a byte now and then never times out."""
        late = time.monotonic() - self.begun - _PATIENCE_S
        return self.begun > 0 and late > 0 and self.moved < late * SLOWEST
