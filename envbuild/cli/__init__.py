"""The command line. This module imports little, so that a signal during the other imports is handled."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Run the `envbuild` command. Every failure is one message and its exit code."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # registered first, so that it runs last
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.unraisablehook = _unraisable
    # Trees of 100,000 paths are built once and kept: garbage collection over them costs a tenth of the run time.
    gc.set_threshold(100_000, 50, 100)
    try:
        from envbuild.terminal import guard_streams

        guard_streams()
        if "_ENVBUILD_COMPLETE" in os.environ:  # the scripts of `envbuild completion`
            from envbuild.cli.complete import answer

            code = answer()
        else:
            from envbuild.cli.commands import run

            code = run()
    except KeyboardInterrupt:
        print("envbuild: interrupted", file=sys.stderr)
        code = 130
    except SystemExit:
        raise
    except BaseException as fault:  # noqa: BLE001 - of Python and of extension modules, whose panics are no Exceptions
        from envbuild.cli.crash import report

        code = report(fault)
    # The work is done and reported: a Ctrl-C during Python's shutdown must not turn it into a failure.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    codes.append(code)
    sys.exit(code)


def _leave(codes: list[int]) -> None:
    """Exit with the code in `codes`, if any, after all other exit handlers have run, without Python's own end.

    That would free large trees object by object. And if a Ctrl-C arrives in code that Python compiled from text (that
    of a dataclass or a named tuple, during an import), Python kills itself with SIGINT at its end although the
    exception was handled (CPython, run_eval_code_obj in pythonrun.c).
    """
    if codes:
        flushed = True
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by who started it
            try:
                stream.flush()
            except (OSError, ValueError):
                flushed = False
        if flushed or codes[0] == 130:
            os._exit(codes[0])  # else Python says what was lost, and exits with another code


def _unraisable(found: Any) -> None:
    """Resend a Ctrl-C that arrived where Python drops exceptions (finalizers, the import system's callbacks)."""
    if issubclass(found.exc_type, KeyboardInterrupt):
        # With a delay: now, the signal would be handled inside this hook and be dropped again. Not by a thread: its
        # start waits, on a busy machine until the signal is there.
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
    else:
        sys.__unraisablehook__(found)
