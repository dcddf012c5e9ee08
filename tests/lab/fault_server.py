"""A process that has imported envbuild and forks for each command: a command then costs no imports.

It is started as a program, under the fault injector. Each line of its standard input is a JSON object: `arguments`,
`folder`, `env`, `output` (the file for both streams) and `timeout_s`. Each line that it prints is a list: the
command's process id, and its exit status, negative for a signal, or null when it took too long and was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import signal
import sys
import threading
import time
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Serve until standard input ends."""
    _import_all()
    gc.freeze()  # a collection in a child would copy all pages of this process
    # Children of a killed command become this process's: the next command begins when the last of them is gone.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            return _run(request)
        print(json.dumps([child, _wait(child, request["timeout_s"])]), flush=True)


def _import_all() -> None:
    import envbuild

    for module in pkgutil.walk_packages(envbuild.__path__, "envbuild."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of an optional dependency
                importlib.import_module(module.name)
    for name in ("rattler", "rattler.index", "docker", "rich.console", "rich.progress", "zstandard"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _run(request: dict[str, Any]) -> None:
    from envbuild.cli import main

    os.setsid()
    os.chdir(request["folder"])
    os.environ.update(request["env"])
    handle = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (handle, 1), (handle, 2)):
        os.dup2(source, target)
    sys.argv = ["envbuild", *request["arguments"]]
    code: object = 1
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    # As Python ends, but for the release of all that the server imported, which takes longer than many commands.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _wait(child: int, timeout_s: float) -> int | None:
    """Return the exit status of `child` after all its children ended too; None when that took too long."""
    deadline = time.monotonic() + timeout_s
    status: int | None = None
    while True:
        try:
            ended, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if ended == child:
            status = os.waitstatus_to_exitcode(code)
        elif not ended:
            if time.monotonic() > deadline:
                _kill_all()
                return None
            time.sleep(0.002)


def _kill_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as stream:
                for one in stream.read().split():
                    os.kill(int(one), signal.SIGKILL)
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main()
