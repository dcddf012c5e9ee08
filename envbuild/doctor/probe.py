"""Run a probe program with a time limit, so that a program that hangs does not block envbuild."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Enough time for a healthy batch system or driver to answer.
PATIENCE_S = 3.0


def find(program: str, variables: Mapping[str, str], more: str = "/usr/sbin:/sbin") -> str | None:
    """Return the path of `program` on PATH or in the folders `more`, or None."""
    search = variables.get("PATH") or os.defpath
    return shutil.which(program, path=f"{search}:{more}")


def run_probe(
    command: Sequence[str], variables: Mapping[str, str], patience_s: float = PATIENCE_S, cwd: Path | None = None
) -> tuple[int | None, str]:
    """Return (exit status, stdout and stderr) of `command`.

    The status is None, with the reason as text, when the command cannot be run or does not end in `patience_s`
    seconds.
    """
    # Charliecloud requires $USER, which containers often lack.
    env = {"USER": "user", **variables, "LC_ALL": "C"}
    try:
        child = subprocess.Popen(
            list(command),
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return None, error.strerror or str(error)
    except ValueError:  # a NUL in a variable or an argument
        return None, "cannot be run"
    try:
        out, _ = child.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        return None, f"no answer in {patience_s:g} s"
    finally:
        # Its child processes may keep the pipe open: kill them instead of waiting.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        if child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
        if child.stdout is not None:
            with contextlib.suppress(OSError):
                child.stdout.close()
    return child.returncode, out.decode(errors="replace").strip()


def first_line(text: str, most: int = 160) -> str:
    """Return the first non-empty line of a program's output, without control characters, at most `most` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return "".join(c if c.isprintable() else "?" for c in line)[:most]
