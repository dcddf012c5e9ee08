"""Threads for work in parallel to the reader of a stream, and on several items; Ctrl-C ends them at any moment.

concurrent.futures is not used: its locks are Python code, and a Ctrl-C inside them leaves them locked, so that its
threads and its `shutdown` wait forever. `queue.SimpleQueue` is C code.
"""

from __future__ import annotations

import _thread
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, ParamSpec, TypeVar

from envbuild.base import host

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
# A signal that arrives just before a wait does not interrupt that wait: no wait is longer than this.
_POLL_S = 0.5
# How long `each` waits for threads that may be blocked by a silent server.
_GRACE_S = 0.5
_FEW = 2  # processors


class Answer(Generic[T]):
    """Result or error of one call in a thread. It can be taken once."""

    def __init__(self) -> None:
        self._found: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

    def ready(self) -> bool:
        """Return whether `result` would return at once."""
        return not self._found.empty()

    def result(self) -> T:
        """Wait for the call to end, then return its result or raise its error."""
        while True:
            try:
                value, error = self._found.get(timeout=_POLL_S)
            except Empty:
                continue
            if error is not None:
                raise error
            return value  # type: ignore[return-value]

    def give(self, call: Callable[[], T]) -> None:
        """Make the call and keep its result or error."""
        try:
            self._found.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._found.put((None, error))


class Workers:
    """Up to `count` threads that run calls in the order of `submit`; `close` ends them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._started = 0
        self._closed = False

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Answer[T]:
        """Queue a call of `function` for a thread, and return its Answer."""
        answer: Answer[T] = Answer()
        self._calls.put(lambda: answer.give(lambda: function(*args, **kwargs)))
        if self._started < self._count:
            # threading.Thread waits for its start with a lock in Python code. The interpreter does not wait for
            # these threads when it exits.
            _thread.start_new_thread(self._work, ())
            self._started += 1
        return answer

    def close(self, wait_s: float = math.inf) -> None:
        """Wait up to `wait_s` seconds for running calls; drop those that have not begun."""
        self._closed = True
        for _ in range(self._started):
            self._calls.put(None)
        end = time.monotonic() + wait_s
        while self._started and (left := end - time.monotonic()) > 0:
            with suppress(Empty):
                self._ended.get(timeout=min(left, _POLL_S))
                self._started -= 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._closed:
                call()
        self._ended.put(None)


class Behind:
    """Thread that runs calls in the order of `submit`; at most `most` calls are waiting.

    With a `most` of 0, the calls run in the caller's thread.
    """

    def __init__(self, most: int) -> None:
        self._most, self._thread = most, Workers(1)
        self._pending: deque[Answer[object]] = deque()

    def submit(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue a call of `function`; wait while too many are queued. Raises the error of an earlier call."""
        if not self._most:
            function(*args, **kwargs)
            return
        while len(self._pending) >= self._most or (self._pending and self._pending[0].ready()):
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(function, *args, **kwargs))

    def finish(self) -> None:
        """Wait for all calls. Raises the error of the first that failed."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """End the thread; calls that it has not begun are dropped."""
        self._thread.close()


def beside_reader(most: int) -> Behind:
    """Return a Behind for work on the bytes that a reader has just read.

    With one or two processors, the reader's thread does this work: its processor has the bytes in its cache, and the
    other processor is busy.
    """
    return Behind(most if host.workers(os.environ) > _FEW else 0)


def each(
    items: Sequence[T],
    work: Callable[[T, threading.Event], R],
    count: int,
    stop: threading.Event | None = None,
    *,
    timeout_s: float = math.inf,
) -> list[R]:
    """Call `work(item, stop)` for each of `items` in `count` threads; return the results in the order of `items`.

    The first error, Ctrl-C, or TimeoutError after `timeout_s` seconds sets `stop` and is raised; the threads then get
    half a second to react to `stop`.
    """
    stop, end = stop or threading.Event(), time.monotonic() + timeout_s
    done: SimpleQueue[tuple[int, Answer[R]]] = SimpleQueue()

    def run(number: int) -> None:
        answer: Answer[R] = Answer()
        answer.give(lambda: work(items[number], stop))
        done.put((number, answer))

    pool, results = Workers(count), dict[int, R]()
    try:
        for number in range(len(items)):
            pool.submit(run, number)
        while len(results) < len(items):
            if time.monotonic() > end:
                raise TimeoutError
            with suppress(Empty):
                number, answer = done.get(timeout=_POLL_S)
                results[number] = answer.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.close(_GRACE_S)
    return [results[number] for number in range(len(items))]


def run_parallel(jobs: Sequence[Callable[[], None]], deadline_s: float) -> None:
    """Run all of `jobs` in parallel; return when they are done, or after `deadline_s` seconds.

    The threads are daemons: a thread that hangs in a system call must not prevent the process from exiting. Exceptions
    of jobs are suppressed; a missing result shows the failure.
    """
    end = time.monotonic() + deadline_s

    def quietly(job: Callable[[], None]) -> None:
        with suppress(Exception):
            job()

    threads = [threading.Thread(target=quietly, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
