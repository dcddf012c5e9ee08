"""External tools as child processes: captured output, clear errors, and nothing left running after Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from envbuild.base.errors import BuildError, EnvbuildError, HostError
from envbuild.base.masking import masked_words, redact
from envbuild.base.progress import clean, detail
from envbuild.data import load_table

# The hint for a child that a signal ended.
KILLED = "run it again; if the system had no memory left (dmesg), with more memory or fewer CPUs"
# How many lines of a failed tool's output an error message shows.
TAIL_LINES = 30
_GRACE_S, _POLL_S = 5.0, 0.002
_NICE = 5
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def of_caller(variables: Mapping[str, str], *, verifying: bool = False) -> dict[str, str]:
    """Return the caller's `variables` that are passed to a program of an artifact (data/caller.toml).

    With `verifying`, variables that would affect the result of a verification are also left out.
    """
    table = load_table("caller")
    kept = () if verifying else table["python"]["kept"]
    dropped = tuple(table["verification"]["prefixes"]) if verifying else ()
    return {
        name: value
        for name, value in variables.items()
        if (name in kept or not name.startswith(("PYTHON", "__PYVENV_LAUNCHER__")))
        and (name in table["verification"]["names"] or not name.startswith(dropped))
    }


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Return a `preexec_fn` that makes Linux send `sig` to the child when envbuild itself dies (prctl(2))."""
    return functools.partial(_libc.prctl, _PR_SET_PDEATHSIG, int(sig))


def start(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | None = subprocess.PIPE,
    stderr: int | None = subprocess.PIPE,
    death_signal: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start `command` in a new session, so that one signal reaches it and all its children.

    Raises HostError when the program does not exist or may not be executed.
    """
    detail(f"$ {shlex.join(masked_words([str(part) for part in command]))}")
    try:
        return subprocess.Popen(
            [str(part) for part in command],
            env=dict(env) if env is not None else None,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=die_with_parent(death_signal),
        )
    except (FileNotFoundError, PermissionError) as error:
        raise HostError(f"cannot run {command[0]}: {error.strerror}") from error


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[None]:
    """Run `work` in a silent fork of this process, for the files that it writes. The fork ends with the block.

    It has a low priority. It has none of this process's threads, so `work` must not need locks that they hold.
    If the system cannot start another process, nothing is run.
    """
    try:
        child = os.fork()
    except OSError:
        child = -1
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            die_with_parent(signal.SIGTERM)()
            os.nice(_NICE)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until it ends
            work()
        finally:
            os._exit(0)  # without the exit handlers, which are this process's
    try:
        yield
    finally:
        if child > 0:
            _end(child)


def _end(child: int) -> None:
    """End a fork: SIGTERM, then SIGKILL after the grace period."""
    os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_S)


def stop(children: Sequence[subprocess.Popen[bytes]], grace_s: float = _GRACE_S) -> None:
    """Stop each child and its session: SIGTERM, then SIGKILL after `grace_s`."""
    for child in children:
        _signal_session(child, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
    for child in children:
        _signal_session(child, signal.SIGKILL)
        child.wait()


def finish(child: subprocess.Popen[bytes]) -> int:
    """Return the exit status of `child` when it ends. An interrupt stops it and all its children."""
    try:
        return child.wait()
    except BaseException:
        stop([child])
        raise


def _signal_session(child: subprocess.Popen[bytes], sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(child.pid, sig)
        except PermissionError:  # a process of the session changed its user; its leader did not
            child.send_signal(sig)


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    failure: type[EnvbuildError] = BuildError,
    step: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end and capture both streams.

    With `check`, a non-zero exit raises `failure` with the end of the tool's output; `step` names the step in
    the message. An interrupt stops the child and all its children.
    """
    child = start(command, env=env, cwd=cwd)
    try:
        out, err = child.communicate()
    except BaseException:
        stop([child])
        raise
    texts = (stream.decode(errors="replace") for stream in (out, err))
    done = subprocess.CompletedProcess([str(part) for part in command], child.returncode, *texts)
    if check and done.returncode != 0:
        raise failure(f"{step or Path(command[0]).name} failed ({ending(child.returncode)}):\n{tail(done)}")
    return done


def follow(command: Sequence[str | Path], env: Mapping[str, str], on_line: Callable[[str], None]) -> int:
    """Run `command`, call `on_line` with each line of both its streams as it comes, and return its exit status.

    An interrupt, or an error of `on_line`, stops the child and all its children.
    """
    child = start(command, env=env, stderr=subprocess.STDOUT)
    assert child.stdout is not None
    try:
        with child.stdout:
            for line in child.stdout:
                on_line(line.decode(errors="replace").rstrip())
        return child.wait()
    except BaseException:
        stop([child])
        raise


def ending(status: int) -> str:
    """Return how a child with this exit status ended: "exit 2", "killed by SIGKILL"."""
    if status >= 0:
        return f"exit {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines of a tool's output, indented, without passwords and terminal control sequences.

    The output is stderr, or stdout if stderr is empty.
    """
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return redact("\n".join(f"  {clean(line)}" for line in lines[-TAIL_LINES:]))
