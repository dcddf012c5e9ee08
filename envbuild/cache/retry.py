"""Failed requests: whether another try may help, and when."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Answers after which another try may help.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 60.0


class RequestFailed(Exception):
    """A request that was not served; the text says why, without credentials.

    `status` is None when there was no answer; `passing` when another try may help, after `wait_s`
    seconds if the server said so. `is_down` when no request to this server can succeed: there is no connection
    (unless the server has `answered` before something else failed), or it accepts no credentials of ours.
    """

    def __init__(
        self,
        reason: str,
        *,
        status: int | None = None,
        passing: bool = False,
        wait_s: float | None = None,
        answered: bool = False,
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.passing = passing
        self.wait_s = wait_s
        self.is_down = not answered and status in (None, 401, 407)


class NotFound(RequestFailed):
    """The server answers, and does not have it."""


class Mismatch(RequestFailed):
    """Content that is not the expected one; `sha256` is its digest. The server answers, so that it is not down."""

    def __init__(self, sha256: str, what: str = "content") -> None:
        super().__init__(f"it sent {what} with digest sha256:{sha256}", status=200)
        self.sha256 = sha256


class Stopped(Exception):
    """Another thread failed, or the user pressed Ctrl-C: this one leaves off."""


def patiently(action: Callable[[], T], retries: int, stop: threading.Event) -> T:
    """`action()`, tried again up to `retries` times while its failures are passing ones."""
    attempt = 0
    while True:
        try:
            return action()
        except RequestFailed as error:
            if not error.passing or attempt >= retries:
                raise
            pause(attempt, error, stop)
            attempt += 1


def pause(attempt: int, error: RequestFailed, stop: threading.Event) -> None:
    """Wait before another try: as the server said, else twice as long each time, less some chance."""
    wait = error.wait_s
    if wait is None:
        wait = _FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.0)
    if stop.wait(min(wait, _LONGEST_WAIT_S)):
        raise Stopped


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header (RFC 9110 §10.2.3), given as seconds or as a date."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
