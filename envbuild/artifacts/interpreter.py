"""The Python interpreter for an environment, and the error when there is none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from envbuild import process
from envbuild.atomic import write_atomically
from envbuild.environment import Environment
from envbuild.errors import HostError


def known_interpreter(version: str, environment: Environment) -> str:
    """Return what to ask uv for: the path of the interpreter that it chose last time, or else the version.

    The path is used for the same version and PATH, as long as the file is unchanged. It saves a tenth of a
    second, which uv needs to look through version managers' shims.
    """
    with contextlib.suppress(OSError, ValueError):
        path, size, time = json.loads(_note(version, environment).read_text(encoding="utf-8"))
        stat = os.stat(path)
        if (stat.st_size, stat.st_mtime_ns) == (size, time):
            return str(path)
    return version


def remember_interpreter(version: str, chosen: Path, environment: Environment) -> None:
    """Record the real path of `chosen`, a venv's python."""
    note = _note(version, environment)
    with contextlib.suppress(OSError):
        path = os.path.realpath(chosen)
        stat = os.stat(path)
        text = json.dumps([path, stat.st_size, stat.st_mtime_ns])
        if not note.is_file() or note.read_text(encoding="utf-8") != text:
            write_atomically(note, text)


def _note(version: str, environment: Environment) -> Path:
    names = ("PATH", "PYENV_VERSION", "UV_PYTHON_PREFERENCE", "UV_PYTHON_INSTALL_DIR")
    key = json.dumps([version, *(environment.variables.get(name) for name in names)])
    return environment.store.root / "pythons" / hashlib.sha256(key.encode()).hexdigest()


def explain_missing(wanted: str, environment: Environment, said: str) -> HostError:
    """Return the error for an interpreter that uv did not find, with a list of those that it did."""
    found = installed_pythons(environment)
    listing = "".join(f"\n  {version:<10} {path}" for version, path in found) or "\n  none"
    return HostError(
        f"no Python {wanted} on this host; found:{listing}\n  ({said.splitlines()[0]})",
        f"install Python {wanted} (your distribution's package, `uv python install`, a conda environment) or "
        "load its module, then run again; or name one with --python PATH",
    )


def installed_pythons(environment: Environment) -> list[tuple[str, str]]:
    """Return (version, path) of every interpreter that uv finds, newest first; [] when uv fails."""
    done = process.run(
        [environment.uv, "python", "list", "--only-installed", "--output-format", "json", "--no-config"],
        env=environment.uv_environment(),
        check=False,
    )
    if done.returncode != 0:
        return []
    return [(str(row["version"]), str(row["path"])) for row in json.loads(done.stdout)]
