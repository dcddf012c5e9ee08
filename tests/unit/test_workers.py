"""Threads beside a reader: order, errors, and a Ctrl-C at any point of the caller's code."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from types import FrameType
from typing import Any

import pytest

from envbuild.base.workers import Answer, Workers


def test_calls_of_one_worker_are_made_in_order_and_their_results_and_errors_are_the_callers() -> None:
    workers = Workers(1)
    made: list[int] = []
    answers = [workers.submit(made.append, n) for n in range(100)]
    failing = workers.submit(int, "x")
    added = workers.submit(sum, [1, 2], start=3)
    assert [answer.result() for answer in answers] == [None] * 100 and made == list(range(100))
    with pytest.raises(ValueError, match="'x'"):
        failing.result()
    assert added.result() == 6
    workers.close()


def test_at_most_so_many_calls_are_made_at_once() -> None:
    workers, gate = Workers(2), threading.Barrier(2)
    # Two meet at the gate; a third would make the fourth wait for ever, and one alone too.
    answers = [workers.submit(gate.wait, 5) for _ in range(4)]
    assert sorted(answer.result() for answer in answers) == [0, 0, 1, 1]
    workers.close()


def test_close_waits_for_the_calls_under_way_and_drops_the_others() -> None:
    workers, began, ended = Workers(1), threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        time.sleep(0.2)
        ended.set()

    first, second = workers.submit(slow), workers.submit(slow)
    began.wait(5)
    workers.close()
    assert ended.is_set() and first.ready() and not second.ready()


class CtrlC:
    """Raises KeyboardInterrupt at the `at`-th line that the traced thread runs."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> CtrlC | None:
        if self.left == 0:
            sys.settrace(None)
            self.left = -1
            raise KeyboardInterrupt
        self.left -= 1
        return self


def test_a_ctrl_c_at_any_line_leaves_threads_that_end() -> None:
    at, reached = 0, True
    while reached:  # until the work is done before its turn comes
        workers, interrupt = Workers(2), CtrlC(at)
        waiting: deque[Answer[int]] = deque()
        try:
            sys.settrace(interrupt)
            for n in range(4):
                waiting.append(workers.submit(abs, n))
                while waiting and (len(waiting) > 2 or waiting[0].ready()):
                    waiting.popleft().result()
            sys.settrace(None)
        except KeyboardInterrupt:
            pass
        reached = interrupt.left < 0
        closing = threading.Thread(target=workers.close, daemon=True)
        closing.start()
        closing.join(5)
        assert not closing.is_alive(), f"interrupted at line {at}"
        at += 1
    assert at > 30
