"""`envbuild` in a process forked from the test's, which has imported most modules: that is half of a short run.

For tests that start a command many times. Tests of a start itself run `python -m envbuild`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NoReturn

from envbuild.cli import main


def run_forked(*arguments: str, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `envbuild ARGUMENTS` in the folder `cwd` with exactly the variables `env`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _become_command(arguments, cwd, env, out, err)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(["envbuild", *arguments], code, out.read().decode(), err.read().decode())


def _become_command(
    arguments: tuple[str, ...], cwd: Path, env: Mapping[str, str], out: BinaryIO, err: BinaryIO
) -> NoReturn:
    code: object = 1
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 - until the exit
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None  # TMPDIR of `env` counts
        sys.argv = ["envbuild", *arguments]
        main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:  # noqa: BLE001 - the test sees it in stderr
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
