"""Hold a program of an image: pass signals on to it, and leave no process of it behind.

Two processes stand between the caller and the program, each an heir of the orphans below it (prctl(2),
PR_SET_CHILD_SUBREAPER): the launcher, which the caller knows, and the keeper, which holds the namespace and is the
program's parent. Whichever of them is killed, the other ends the rest.

A scheduler signals a whole job step at once, a terminal its foreground group, a person one process. The program must
get each signal once: the launcher tells the keeper of those it got (by a real-time signal, which no one else sends),
and the keeper passes on those that it did not get itself at that time.

Needs nothing but Python's own library. Source: signal(7), prctl(2), proc(5).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

from envbuild.verify.mounting import SET_SUBREAPER, call, die_with

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# Signal → the real-time signal by which the launcher tells the keeper of it.
_TOLD = {number: signal.SIGRTMIN + place for place, number in enumerate(PASSED_ON, start=2)}
_HEARD = {told: number for number, told in _TOLD.items()}
# Two signals of one number within this time are one that was sent to both processes.
_SAME_S = 2.0
_LATER_S = 0.1
_POLL_S = 1.0
# How long a program may take to end after SIGTERM, when its launcher was killed; and what it left, when it ended.
_GRACE_S = 10.0
_REST_S = 2.0
_KILLED_S = 10.0
_SI_KERNEL = 0x80


def watched() -> set[int]:
    """The signals to be passed on, those left out that the caller has us ignore (nohup, a shell's background)."""
    return {number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}


def hold_signals() -> set[int]:
    """Keep the signals of launcher and keeper pending, until `launcher_waits` or `keep_program` takes them; children
    inherit this. Returns the set."""
    held = watched() | set(_HEARD) | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    return held


def inherit_orphans() -> None:
    """Become the parent of every process below us that loses its own."""
    call("prctl", SET_SUBREAPER, 1, 0, 0, 0)


def launcher_waits(keeper: int, held: set[int]) -> int:
    """Wait for process `keeper` to end, and pass signals on to it. Returns its wait status."""
    while True:
        done, status = os.waitpid(keeper, os.WNOHANG)
        if done:
            return status
        got = signal.sigtimedwait(held, _POLL_S)
        # The terminal's own come to the whole foreground group, the program among it.
        if got is not None and got.si_signo in _TOLD and got.si_code != _SI_KERNEL:
            with suppress(ProcessLookupError):
                os.kill(keeper, _TOLD[signal.Signals(got.si_signo)])


def keep_program(
    become: Callable[[], NoReturn], held: set[int], launcher: int, ended: Callable[[int], None]
) -> None:
    """Fork a child to `become` the program, and stay until it, and all it started, has ended. `ended` is told its wait
    status. When process `launcher` is gone the program is sent SIGTERM, and killed after a while."""
    inherit_orphans()
    spare = set(descendants())
    keeper = os.getpid()
    program = os.fork()
    if program == 0:
        die_with(keeper, signal.SIGKILL)
        for number in (*held & set(PASSED_ON), signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        become()
    status = _wait_for(program, held, launcher)
    if status is not None:
        ended(status)
    end_rest(spare, _REST_S)


def _wait_for(program: int, held: set[int], launcher: int) -> int | None:
    """The wait status of `program`; None when it did not end in time after its launcher."""
    own: dict[int, float] = {}
    due: dict[int, float] = {}
    deadline = None
    while True:
        now = time.monotonic()
        for number in [number for number, when in due.items() if when <= now]:
            del due[number]
            os.kill(program, number)
        while (found := _reaped()) is not None:
            if found[0] == program:
                return found[1]
        if os.getppid() != launcher and deadline is None:
            deadline = now + _GRACE_S
            os.kill(program, signal.SIGTERM)
        if deadline is not None and now > deadline:
            return None
        got = signal.sigtimedwait(held, min([_POLL_S, *(when - now for when in due.values())]))
        if got is None:
            continue
        number, now = got.si_signo, time.monotonic()
        if number in _HEARD:
            if now - own.get(_HEARD[number], -_SAME_S) >= _SAME_S:
                due[_HEARD[number]] = now + _LATER_S
        elif number != signal.SIGCHLD:
            own[number] = now
            due.pop(number, None)


def _reaped() -> tuple[int, int] | None:
    """One child that has ended, and its wait status."""
    try:
        found = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return found if found[0] else None


def end_rest(spare: Iterable[int] = (), grace_s: float = 0.0) -> None:
    """End every process below us but those of `spare`: SIGTERM, and SIGKILL after `grace_s` seconds."""
    kept = set(spare)
    started = time.monotonic()
    asked: set[int] = set()
    while time.monotonic() < started + grace_s + _KILLED_S:
        while _reaped() is not None:
            pass
        rest = [pid for pid in descendants() if pid not in kept]
        if not rest:
            return
        for pid in rest:
            if time.monotonic() >= started + grace_s:
                _send(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                _send(pid, signal.SIGTERM)
        time.sleep(0.01)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def descendants() -> list[int]:
    """The processes below this one that have not ended."""
    parents: dict[int, int] = {}
    ended = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The program's name stands in parentheses and may hold anything.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                parents[int(name)] = int(parent)
                if state in (b"Z", b"X"):
                    ended.add(int(name))
    found: list[int] = []
    above = {os.getpid()}
    while above:
        above = {pid for pid, parent in parents.items() if parent in above}
        found += above - ended
    return found
