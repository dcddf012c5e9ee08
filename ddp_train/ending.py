"""Process exit that does not hang or abort in Python's shutdown."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from .errors import RUNTIME


def leave(main: Callable[[], int]) -> NoReturn:
    """Run `main`, flush the output, and exit at once with its exit code.

    sys.exit() is not safe here: a thread with a hanging look-up would block the exit, and threads left by
    torch's gloo backend sometimes abort the process (SIGABRT), so that a finished training would count as
    failed.
    """
    code = RUNTIME
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else RUNTIME
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - any exception is printed, and the process exits
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
