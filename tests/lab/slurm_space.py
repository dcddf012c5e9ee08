"""Hosts of a lab: namespaces of their own, entered to run commands in them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ISOLATED = (
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation",
    "slave",
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_SECONDS = 20


@dataclass(frozen=True)
class Space:
    """A host: the process that was started for it, and the first process in its namespaces."""

    process: subprocess.Popen[Any]
    init: int

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start `command` on this host, as a login would: with `env` over a plain environment, not this process's.

        It leads a session of its own: a Ctrl-C does not reach it.
        """
        enter = ["nsenter", f"--target={self.init}"]
        enter += ["--net", "--uts", "--mount", "--ipc", "--pid"]
        if cwd is not None:
            enter += ["env", f"--chdir={cwd}"]
        return subprocess.Popen(
            [*enter, *command],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            env={**plain_environment(), **(env or {})},
            start_new_session=True,
        )

    def run(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on this host to its end. Raises TimeoutExpired, after its process group was killed;
        with `check`, RuntimeError with what it printed when it fails."""
        process = self.popen(command, cwd=cwd, env=env)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        if check and process.returncode:
            line = " ".join(map(str, command))
            raise RuntimeError(f"{line}: exit {process.returncode}\n{out}{err}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def kill(self) -> None:
        """Kill the first process, and so all others on this host."""
        if self.process.poll() is None:
            os.kill(self.init, signal.SIGKILL)
        self.process.wait()


def plain_environment() -> dict[str, str]:
    """What a user has after a login, with nothing of the tests' own environment but the language and time zone."""
    own = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TZ") if name in os.environ}
    user = {"HOME": str(Path.home()), "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash"}
    return {**user, "PATH": PATH, **own}


def begin(process: subprocess.Popen[Any], log: Path) -> Space:
    """The host that `process` starts, by way of other processes. Raises RuntimeError with the end of `log`."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        init = _first_process(process.pid)
        if init is not None:
            return Space(process, init)
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RuntimeError(f"a namespace did not come up:\n{tail(log)}")
        time.sleep(0.01)


def tail(log: Path, length: int = 3000) -> str:
    return log.read_text(errors="replace")[-length:] if log.exists() else ""


def _first_process(ancestor: int) -> int | None:
    """The process among `ancestor`'s descendants that is number 1 in its namespace."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # `pid (name) state parent …`; a name may hold anything
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = [ancestor]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        if pid != ancestor and _number_inside(pid) == 1:
            return pid
    return None


def _number_inside(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    numbers = [line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")]
    return int(numbers[0]) if numbers else None
