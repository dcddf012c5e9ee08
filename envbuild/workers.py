"""Threads for work beside the reader of a stream, which a Ctrl-C at any moment ends.

Not concurrent.futures: its locks are Python code, and a Ctrl-C within them leaves them locked, so that its threads,
and its `shutdown`, wait without end. `queue.SimpleQueue` is C code.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
# A signal that arrives just before a wait does not end it, but the next one.
_POLL_S = 0.5


class Answer(Generic[T]):
    """The result of one call that a thread makes, or its error. It is taken once."""

    def __init__(self) -> None:
        self._found: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

    def ready(self) -> bool:
        """Whether `result` returns at once."""
        return not self._found.empty()

    def result(self) -> T:
        """Wait for the call to end, and return what it returned or raise what it raised."""
        while True:
            try:
                value, error = self._found.get(timeout=_POLL_S)
            except Empty:
                continue
            if error is not None:
                raise error
            return value  # type: ignore[return-value]

    def give(self, call: Callable[[], T]) -> None:
        """Make the call."""
        try:
            self._found.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._found.put((None, error))


class Workers:
    """Up to `count` threads. They take calls in the order of `submit`; `close` ends them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._started = 0
        self._closed = False

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Answer[T]:
        """Have a thread call `function`."""
        answer: Answer[T] = Answer()
        self._calls.put(lambda: answer.give(lambda: function(*args, **kwargs)))
        if self._started < self._count:
            # threading.Thread waits for its start by a lock in Python. Python's end does not wait for these.
            _thread.start_new_thread(self._work, ())
            self._started += 1
        return answer

    def close(self) -> None:
        """Wait for the calls under way; those that have not begun are dropped."""
        self._closed = True
        for _ in range(self._started):
            self._calls.put(None)
        while self._started:
            with suppress(Empty):
                self._ended.get(timeout=_POLL_S)
                self._started -= 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._closed:
                call()
        self._ended.put(None)
