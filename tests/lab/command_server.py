"""A process that has imported envbuild and forks for each command, which then takes no time for imports.

This file is its program, too. Each line of its standard input is a JSON object with the arguments of
`CommandServer.run`, each line of its standard output the list that this method returns.
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
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class CommandServer:
    """The running server. It runs one command at a time. `known` is for callers: commands that they ran before."""

    process: subprocess.Popen[str]
    known: set[str] = field(default_factory=set)

    def run(
        self,
        arguments: Sequence[str | Path],
        folder: Path,
        env: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        timeout_s: float | None = None,
    ) -> tuple[int, int | None]:
        """Run `envbuild ARGUMENTS` in `folder` with exactly the variables `env`; output is appended to the files.

        Returns its process id and exit status, negative for a signal. With `timeout_s`, the command has ended when all
        its children have; the status is None if that took longer, and they were killed.
        """
        request = {
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder),
            "env": dict(env),
            "stdout": str(stdout),
            "stderr": str(stderr),
            "timeout_s": timeout_s,
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the server ended with {self.process.wait()}"
        child, status = json.loads(answer)
        return child, status

    def stop(self) -> None:
        """Stop the server."""
        self.process.kill()
        self.process.communicate()


def start_server(variables: Mapping[str, str]) -> CommandServer:
    """Start a server with `variables`."""
    line = [sys.executable, __file__]
    pipe = subprocess.PIPE
    return CommandServer(subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, env=dict(variables)))


def main() -> None:
    """Serve until standard input ends."""
    _import_all()
    gc.freeze()  # a collection in a child would copy all pages of this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        if request["timeout_s"]:
            # Children of a killed command become this process's.
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
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
    import envbuild
    from envbuild.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["timeout_s"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    streams = [os.open(os.devnull, os.O_RDONLY)]
    streams += [os.open(request[name], os.O_WRONLY | os.O_APPEND | os.O_CREAT) for name in ("stdout", "stderr")]
    for target, source in enumerate(streams):
        os.dup2(source, target)
    # As `python -m envbuild` has them.
    sys.path[0] = request["folder"]
    sys.argv = [os.path.join(envbuild.__path__[0], "__main__.py"), *request["arguments"]]
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


def _wait(child: int, timeout_s: float | None) -> int | None:
    """Return the exit status of `child`; with a time limit, after all its children ended, or None if it was reached."""
    if not timeout_s:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
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
