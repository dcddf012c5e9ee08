"""The lower bound on the speed of transfers: a server that sends a byte now and then never times out.

Only time in which a connection is waited for counts: a slow disk is no fault of a server.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from envbuild.cache.retry import RequestFailed

# Bytes per second below which a transfer is given up.
SLOWEST = 10_000


class Body(Protocol):
    """Body of a request: its length is known, and it is read once, in blocks."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[bytes]: ...


class TooSlow(RequestFailed):
    """A transfer that was given up, because it moves fewer bytes than SLOWEST."""

    def __init__(self, seconds: float) -> None:
        text = f"fewer than {SLOWEST / 1000:g} kB a second for {seconds:g} s; a larger `timeout` of pip waits longer"
        super().__init__(text, transient=True, answered=True)


@dataclass(slots=True)
class Pace:
    """The speed of one transfer, in each `period_s` seconds of waiting for it."""

    period_s: float
    waited_s: float = 0.0
    moved: int = 0

    def note(self, moved: int, waited_s: float) -> None:
        """Count bytes that were moved in so many seconds. Raises TooSlow."""
        self.moved += moved
        self.waited_s += waited_s
        if self.waited_s >= self.period_s:
            if self.moved < self.waited_s * SLOWEST:
                raise TooSlow(self.period_s)
            self.moved, self.waited_s = 0, 0.0


class PacedReader(io.RawIOBase):
    """The bytes of a response, from its first line on. The wait for the first ones is not counted.

    `readinto` raises TooSlow.
    """

    def __init__(self, raw: io.RawIOBase, pace: Pace) -> None:
        self._raw, self._pace, self._begun = raw, pace, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int | None:  # type: ignore[override]
        begun = time.monotonic()
        count = self._raw.readinto(buffer)
        if self._begun and count:
            self._pace.note(count, time.monotonic() - begun)
        self._begun = True
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


@dataclass(frozen=True, slots=True)
class PacedBody:
    """The body of a request; iterating raises TooSlow when the server takes it too slowly."""

    body: Body
    period_s: float

    def __len__(self) -> int:
        return len(self.body)

    def __iter__(self) -> Iterator[bytes]:
        pace = Pace(self.period_s)
        for block in self.body:
            begun = time.monotonic()
            yield block
            pace.note(len(block), time.monotonic() - begun)
