"""The command line. This module imports little, so that a signal during the other imports is handled."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from typing import Any

# The exit code of a program that SIGPIPE ended, as a shell shows it.
CLOSED_PIPE = 128 + signal.SIGPIPE


def main() -> None:
    """Run the `envbuild` command. Every failure is one message and its exit code."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # registered first, so that it runs last
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.unraisablehook = _unraisable
    # Trees of 100,000 paths are built once and kept: garbage collection over them costs a tenth of the run time.
    gc.set_threshold(100_000, 50, 100)
    try:
        code = _reported()
    except Exception as fault:
        from envbuild.base.progress import ClosedPipe

        if not isinstance(fault, ClosedPipe):
            raise
        code = CLOSED_PIPE
    # The work is done and reported: a Ctrl-C during Python's shutdown must not turn it into a failure.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    codes.append(code)
    sys.exit(code)


def _reported() -> int:
    """Return the exit code of the command, after the message about its failure."""
    try:
        from envbuild.base.progress import guard_streams

        guard_streams()
        if "_ENVBUILD_COMPLETE" in os.environ:  # the scripts of `envbuild completion`
            from envbuild.cli.complete import answer

            return answer()
        from envbuild.cli.commands import run

        return run()
    except KeyboardInterrupt:
        print("envbuild: interrupted", file=sys.stderr)
        return 130
    except SystemExit:
        raise
    except BaseException as fault:
        from envbuild.base.progress import ClosedPipe
        from envbuild.cli.crash import report

        if isinstance(fault, ClosedPipe):
            raise
        return report(fault)


def _leave(codes: list[int]) -> None:
    """Exit with the code in `codes`, if any, after all other exit handlers have run, without Python's own end.

    Python's own end would free large trees object by object. And if a Ctrl-C arrives in code that Python compiled from
    text (of a dataclass or a named tuple, during an import), Python kills itself with SIGINT at its end although the
    exception was handled (CPython, run_eval_code_obj in pythonrun.c).
    """
    if not codes:
        return
    if codes[0] == CLOSED_PIPE:  # as the programs end that do not ignore the signal, as Python does
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
        os._exit(CLOSED_PIPE)  # the signal is blocked
    flushed = True
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: no /dev/null
        try:
            stream.flush()
        except Exception:  # noqa: BLE001 - OSError, ClosedPipe, ValueError of a closed stream
            flushed = False
    if flushed or codes[0]:
        os._exit(codes[0])  # else Python says what was lost, and exits with another code


def _unraisable(unraisable: Any) -> None:
    """Resend a Ctrl-C that arrived where Python drops exceptions (finalizers, the import system's callbacks)."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # With a delay: now, the signal would be handled inside this hook and be dropped again. Not by a thread: its
        # start waits, on a busy machine until the signal is there.
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
    else:
        sys.__unraisablehook__(unraisable)
