"""Entry point: `torchrun … -m ddp_train …` or `python -m ddp_train …`; under mpirun with `--strategy horovod`."""

from __future__ import annotations

import gc
import os
import sys
import time

from .args import parse_arguments
from .ending import leave
from .errors import RUNTIME, TrainError, one_line
from .output import print_error
from .place import die_with_parent


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code. Raises SystemExit(2) for an invalid command line."""
    started = time.perf_counter()
    die_with_parent(os.environ)
    arguments = parse_arguments(argv)
    before = time.perf_counter()
    try:
        import torch  # noqa: F401 - here, to measure its time, and to report wrong arguments quickly
    except (ImportError, OSError) as error:
        print_error(f"torch cannot be imported by {sys.executable}: {one_line(error)}")
        return RUNTIME
    gc.freeze()  # these objects live until exit: closing the group need not scan them
    imported = time.perf_counter()
    from .loop import Clock, run

    try:
        run(arguments, os.environ, Clock(started, imported - before))
    except TrainError as error:
        if not error.reported:
            print_error(error.message)
        return error.exit_code
    return 0


if __name__ == "__main__":
    # Garbage collection during the import of torch takes a sixth of the start-up. loop.py enables it again.
    gc.disable()
    leave(main)
