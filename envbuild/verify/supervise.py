"""Supervision of a program of an image: it gets the signals of its caller, and leaves no processes behind.

Two processes stand between the caller and the program, each a subreaper of the orphans below it (prctl(2),
PR_SET_CHILD_SUBREAPER): the launcher, whose process ID the caller knows, and the keeper, which holds the namespace and
is the program's parent. If either is killed, the other ends the remaining processes.

A scheduler signals a whole job step at once, a terminal its foreground process group, a person one process. The program
must get each signal once: the launcher reports the signals that it got to the keeper (by a real-time signal, which
nobody else sends), and the keeper passes on those that it did not get itself at about the same time.

Needs only the standard library. Source: signal(7), prctl(2), proc(5).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any, NoReturn

_PDEATHSIG, _SET_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Signal → the real-time signal by which the launcher reports it to the keeper.
_TOLD = {number: signal.SIGRTMIN + place for place, number in enumerate(PASSED_ON, start=2)}
_HEARD = {word: number for number, word in _TOLD.items()}
# Two signals of one number within this time count as one that was sent to both processes.
_SAME_S = 2.0
_LATER_S = 0.1
_POLL_S = 1.0
# Time for the program to end after SIGTERM if its launcher was killed, and for its children after the program ended.
_GRACE_S = 10.0
_REST_S = 2.0
_KILLED_S = 10.0
_SI_KERNEL = 0x80


def hold_signals() -> set[int]:
    """Block the signals of launcher and keeper until `launcher_waits` or `keep_program` handles them. Return the set.

    Signals that the caller ignores (nohup, a background job of a shell) are not in the set. Child processes inherit it.
    """
    watched = {number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}
    held = watched | set(_HEARD) | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    return held


def inherit_orphans() -> None:
    """Make this process the subreaper, the new parent of every descendant whose parent ends."""
    call("prctl", _SET_SUBREAPER, 1, 0, 0, 0)


def launcher_waits(keeper: int, held: set[int]) -> None:
    """Wait for process `keeper` to end, and pass signals on to it."""
    while not os.waitpid(keeper, os.WNOHANG)[0]:
        got = signal.sigtimedwait(held, _POLL_S)
        # The terminal sends its signals to the whole foreground process group, which includes the program.
        if got is not None and got.si_signo in _TOLD and got.si_code != _SI_KERNEL:
            with suppress(ProcessLookupError):
                os.kill(keeper, _TOLD[signal.Signals(got.si_signo)])


def keep_program(become: Callable[[], NoReturn], held: set[int], launcher: int, ended: Callable[[int], None]) -> None:
    """Fork a child that becomes the program, and wait until it and all its descendants have ended.

    `ended` gets the program's wait status. If `launcher` ends, the program gets SIGTERM, later SIGKILL.
    """
    inherit_orphans()
    spare = descendants()
    keeper = os.getpid()
    waits, go = os.pipe()
    program = os.fork()
    if program == 0:
        die_with(keeper, signal.SIGKILL)
        os.close(go)
        os.read(waits, 1)  # until the keeper closes its end
        for number in (*held & set(PASSED_ON), signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        become()
    # Signals that came before there was a program. It still holds its own, so one that came to both counts once.
    for number in signal.sigpending() & held & set(PASSED_ON):
        os.kill(program, number)
    os.close(waits)
    os.close(go)
    status = _wait_for(program, held, launcher)
    if status is not None:
        ended(status)
    end_rest(spare, _REST_S)


def _wait_for(program: int, held: set[int], launcher: int) -> int | None:
    """Return the wait status of `program`; None if it did not end in time after its launcher ended."""
    own: dict[int, float] = {}
    due: dict[int, float] = {}
    deadline = None
    while True:
        now = time.monotonic()
        for number in [number for number, when in due.items() if when <= now]:
            del due[number]
            os.kill(program, number)
        while (ended := _reaped()) is not None:
            if ended[0] == program:
                return ended[1]
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
    """Return the process ID and wait status of one ended child, None if there is none."""
    try:
        status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if status[0] else None


def end_rest(spare: Set[int], grace_s: float = 0.0) -> None:
    """End every descendant except `spare`: SIGTERM at once, and SIGKILL after `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while time.monotonic() < deadline + _KILLED_S:
        while _reaped() is not None:
            pass
        rest = descendants() - spare
        if not rest:
            return
        late = time.monotonic() >= deadline
        for pid in rest if late else rest - asked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= rest
        time.sleep(0.01)


def descendants() -> set[int]:
    """Return the process IDs of all descendants that have not ended."""
    parents: dict[int, int] = {}
    ended = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The program's name is in parentheses and may contain any character.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                parents[int(name)] = int(parent)
                if state in (b"Z", b"X"):
                    ended.add(int(name))
    pids: set[int] = set()
    above = {os.getpid()}
    while above:
        above = {pid for pid, parent in parents.items() if parent in above}
        pids |= above
    return pids - ended


def die_with(parent: int, sig: signal.Signals) -> None:
    """Have the kernel send this process `sig` when process `parent` ends; exit if it has ended (prctl(2))."""
    call("prctl", _PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library that returns 0 on success. Raises OSError when it does not."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
