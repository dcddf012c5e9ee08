"""Entry point: `torchrun … -m ddp_train …` or `python -m ddp_train …`; under mpirun with `--strategy horovod`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback

from .args import parse_arguments
from .errors import RUNTIME, TrainError, one_line
from .output import complain
from .place import die_with_parent


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code; a wrong command line raises SystemExit(2)."""
    started = time.perf_counter()
    die_with_parent(os.environ)
    arguments = parse_arguments(argv)
    before = time.perf_counter()
    try:
        import torch  # noqa: F401 - here, so that its time can be told and wrong arguments are quick
    except (ImportError, OSError) as error:
        complain(f"torch cannot be imported by {sys.executable}: {one_line(error)}")
        return RUNTIME
    imported = time.perf_counter()
    from .loop import Clock, run

    try:
        run(arguments, os.environ, Clock(started, imported - before))
    except TrainError as error:
        if not error.reported:
            complain(error.message)
        return error.exit_code
    return 0


def _leave() -> None:
    """Run main() and end the process at once.

    Not by sys.exit(): threads that torch's gloo backend has left behind sometimes abort the process
    (SIGABRT) while the interpreter winds down, and a finished training would count as failed.
    """
    code = RUNTIME
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else RUNTIME
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - whatever it is, it is shown, and the process ends
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave()
