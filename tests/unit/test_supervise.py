"""Signals of a program in an image: the keeper alone, without an image."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The keeper gets SIGNAL before there is a program, as during the mount of the image, and so does the launcher, which
# reports it. The program tells its wait status.
_EARLY = """
import os, signal
from envbuild.verify import supervise

held = supervise.hold_signals()
os.kill(os.getpid(), signal.SIGNAL)
os.kill(os.getpid(), supervise._TOLD[signal.SIGNAL])
become = lambda: os.execvp("sleep", ["sleep", "30"])
supervise.keep_program(become, held, os.getppid(), lambda status: print(os.waitstatus_to_exitcode(status), flush=True))
"""


@pytest.mark.parametrize(("name", "number"), [("SIGTERM", 15), ("SIGINT", 2)])
def test_a_signal_that_comes_before_the_program_started_reaches_it(name: str, number: int) -> None:
    script = _EARLY.replace("SIGNAL", name)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == (f"-{number}\n", "")
