"""A Python interpreter that runs on this host, and the facts that it reports about itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envbuild.base import process
from envbuild.base.errors import HostError

_IDENTITY = """
import sys, importlib.util as u
print(sys.implementation.cache_tag, ".".join(map(str, sys.version_info[:3])), u.MAGIC_NUMBER.hex())
print(getattr(sys, "_base_executable", sys.executable))
"""


@dataclass(frozen=True, slots=True)
class HostPython:
    """A Python that runs on this host: its program, full version, and the tag and magic number of its bytecode.

    `build` is uv's name of a Python in the store, "" for any other.
    """

    path: str
    version: str
    tag: str
    magic: str
    build: str = ""

    @property
    def minor(self) -> str:
        """The version as recipes have it: 3.11."""
        return minor_of(self.version)

    def __str__(self) -> str:
        return f"Python {self.version} ({self.path})"


def read_python(path: str, start: Sequence[str] = (), home: str = "") -> HostPython:
    """Return the Python whose program is `path`; see Compiler for the others. Raises HostError if it does not run."""
    if not start and shutil.which(path) is None:
        raise HostError(f"{path}: no such program", "give the path of a Python with --python, or leave it out")
    done = ask_program([*start, path, "-S", "-c", _IDENTITY], compiling_environment(home))
    lines = done.stdout.splitlines()
    words = lines[0].split() if lines else []
    if done.returncode != 0 or len(words) != 3:
        raise HostError(f"{path} does not run as a Python:\n{process.tail(done)}", "name another one with --python")
    program = lines[1] if os.path.exists(lines[1]) else path
    return HostPython(os.path.realpath(program), words[1], words[0], words[2])


def minor_of(version: str) -> str:
    """Return the first two numbers of a version: 3.11."""
    return ".".join(version.split(".")[:2])


def compiling_environment(home: str = "") -> dict[str, str]:
    """Return the environment of a Python that must give the same output on every host; `home` is as in Compiler."""
    # A Python from a module tree may need this variable to find libpython.
    libraries = {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
    own = {"PYTHONHOME": home} if home else libraries
    return {"PYTHONHASHSEED": "0", "PATH": os.defpath, "LC_ALL": "C.UTF-8", **own}


def ask_program(
    command: Sequence[str], variables: Mapping[str, str], patience_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that prints information, in any thread. Raises HostError when it does not start, or is too slow."""
    try:
        return subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience_s,
            check=False,
        )
    except OSError as error:
        raise HostError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise HostError(f"{' '.join(command[:3])} has not ended after {patience_s:g} s") from None
