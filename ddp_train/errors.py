"""Expected failures, which users see as one line instead of a traceback."""

from __future__ import annotations

RUNTIME = 1
BAD_INPUT = 2


class TrainError(Exception):
    """An expected failure: `message` is one line, `exit_code` is RUNTIME or BAD_INPUT.

    `reported` is true when rank 0 has already printed the message for all ranks.
    """

    def __init__(self, message: str, exit_code: int = RUNTIME, *, reported: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.reported = reported


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return the first line of an exception's text, or its class name, cut to `limit` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def os_reason(error: OSError) -> str:
    """Return the system's message (`No space left on device`), without errno and without the path."""
    return error.strerror or one_line(error)
