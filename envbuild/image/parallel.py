"""Work on several items at once in threads that do not outlive a failure or Ctrl-C."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_GRACE_S = 0.5


def each(
    items: Sequence[T], work: Callable[[T, threading.Event], R], workers: int, name: str
) -> list[R]:
    """`work(item, stop)` for each of `items`, `workers` at a time; the results in the order of `items`.

    The first error, or Ctrl-C, sets `stop` and is raised; what a thread does about `stop` is not waited
    for longer than half a second.
    """
    stop = threading.Event()
    waiting: SimpleQueue[int] = SimpleQueue()
    outcomes: SimpleQueue[tuple[int, R | None, BaseException | None]] = SimpleQueue()
    for number in range(len(items)):
        waiting.put(number)

    def run() -> None:
        while not stop.is_set():
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            try:
                outcomes.put((number, work(items[number], stop), None))
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                outcomes.put((number, None, error))

    # Daemons, not an executor: Python waits for an executor's threads at its end, and one may hang
    # in a silent server's answer after Ctrl-C.
    threads = [
        threading.Thread(target=run, daemon=True, name=f"{name}-{number}")
        for number in range(min(workers, len(items)))
    ]
    results: dict[int, R] = {}
    try:
        for thread in threads:
            thread.start()
        for _ in items:
            number, result, error = outcomes.get()
            if error is not None:
                raise error
            results[number] = result  # type: ignore[assignment]  # no error: there is a result
    finally:
        stop.set()
        deadline = time.monotonic() + _GRACE_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
    return [results[number] for number in range(len(items))]
