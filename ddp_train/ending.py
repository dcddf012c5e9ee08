"""The end of a program that must not hang or abort while Python winds down."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from .errors import RUNTIME


def leave(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end the process with its exit code at once, its output written.

    Not by sys.exit(): a look-up that hangs in a thread would keep the process, and threads that torch's gloo backend
    has left behind sometimes abort it (SIGABRT), so that a finished training would count as failed.
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
