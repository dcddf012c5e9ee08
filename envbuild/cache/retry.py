"""Retries of failed requests: whether and when to try again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Statuses after which a retry may help.
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 60.0


class RequestFailed(Exception):
    """A failed request; the text states the reason, without credentials.

    `status` is None without a response. A retry of a `transient` failure may help, after `wait_s` seconds if the server
    requested a delay. `is_down` means that no request to this server can succeed: it cannot be connected to (and has
    not `answered` before another failure), or it does not accept the credentials.
    """

    wait_s: float | None = None

    def __init__(
        self, reason: str, *, status: int | None = None, transient: bool = False, answered: bool = False
    ) -> None:
        super().__init__(reason)
        self.status, self.transient = status, transient
        self.is_down = not answered and status in (None, 401, 407)


class PlainRedirect(RequestFailed):
    """A redirect from HTTPS to plain HTTP, which was not followed."""

    def __init__(self, host: str) -> None:
        text = f"it redirects from HTTPS to plain HTTP at {host}; pip's trusted-host can allow this host"
        super().__init__(text, answered=True)


class NotFound(RequestFailed):
    """The server answers, and does not have the resource."""


class Mismatch(RequestFailed):
    """Content with an unexpected digest, `sha256`. The server answered, so it is not down."""

    def __init__(self, sha256: str, what: str = "content") -> None:
        super().__init__(f"it sent {what} with digest sha256:{sha256}", status=200)
        self.sha256 = sha256


class Stopped(Exception):
    """Another thread failed, or the user pressed Ctrl-C; this thread stops."""


def with_retries(action: Callable[[], T], retries: int, stop: threading.Event) -> T:
    """Return `action()`; retry it up to `retries` times while its failures are passing."""
    attempt = 0
    while True:
        try:
            return action()
        except RequestFailed as error:
            if not error.transient or attempt >= retries:
                raise
            pause(attempt, error, stop)
            attempt += 1


def pause(attempt: int, error: RequestFailed, stop: threading.Event) -> None:
    """Wait before a retry: as long as the server requested, else with exponential backoff and jitter."""
    backoff = _FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.0)
    if stop.wait(min(backoff if error.wait_s is None else error.wait_s, _LONGEST_WAIT_S)):
        raise Stopped


def retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110 §10.2.3), which is a number of seconds or a date."""
    from email.utils import parsedate_to_datetime

    text = (value or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
