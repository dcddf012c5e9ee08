"""A virtual environment from a plan: built by uv from wheels in the store."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from envbuild import atomic, process
from envbuild.artifacts import folder
from envbuild.artifacts.folder import FolderBuild, interpreter
from envbuild.artifacts.installed import names_and_versions
from envbuild.artifacts.state import State, has_packages
from envbuild.environment import Environment
from envbuild.errors import BuildError, HostError
from envbuild.files import parse_json
from envbuild.layers.wheels import locate

TITLE = "venv"


def is_current(path: Path, state: State, python: str | None = None) -> bool:
    """Return whether the environment matches its `state`, and its interpreter the path `python`, by a quick check."""
    if not interpreter(path).exists():
        return False
    if python is not None and os.sep in python and os.path.realpath(python) != os.path.realpath(state.interpreter):
        return False
    try:
        return has_packages(path, state, names_and_versions(folder.site_packages(path, state.python)).items())
    except OSError:
        return False


def build(wanted: FolderBuild) -> State:
    """Build the environment, which can be moved anywhere, and return its state. Raises BuildError and HostError."""
    plan, environment, staged = wanted.plan, wanted.environment, wanted.staged
    # --relocatable: the folder is built beside its final path and moved, so that no script may contain its path.
    creating = process.start(
        [environment.uv, "venv", "--relocatable", "--allow-existing", "--no-project", "--no-config",
         "--quiet", "--python", wanted.python or _known_interpreter(plan.python, environment), staged],
        env=environment.uv_environment(),
    )  # fmt: skip
    try:
        with atomic.writing(environment.store.root):
            located, own = locate(plan, wanted.trainer, environment, wanted.offline)
        _, stderr = creating.communicate()
    except BaseException:
        process.stop([creating])
        raise
    if creating.returncode != 0:
        raise _failure(creating, wanted, stderr.decode(errors="replace").strip())
    # pyvenv.cfg (PEP 405)
    pairs = (line.partition("=") for line in (staged / "pyvenv.cfg").read_text(encoding="utf-8").splitlines())
    version = {key.strip(): value.strip() for key, _, value in pairs}.get("version_info", "")
    if ".".join(version.split(".")[:2]) != plan.python:
        raise HostError(
            f"--python {wanted.python} is Python {version}; recipe {plan.recipe} wants Python {plan.python}",
            f"give a Python {plan.python}, or change `python` in the recipe and lock it again",
        )
    if wanted.python is None:
        _remember_interpreter(plan.python, interpreter(staged), environment)
    options = ["--compile-bytecode"] if plan.compile_bytecode else []
    folder.install_wheels(wanted, located, own, *options)
    locked = folder.locked_files([*located, *own], plan.python, staged)
    return folder.finish(wanted, own, version, os.path.realpath(interpreter(staged)), locked)


def command(path: Path, program: str, *arguments: str) -> list[str]:
    """Return the command line that runs `program` (torchrun, python) in the venv at `path`."""
    return [folder.program_file(path, program), *arguments]


def launch_environment(path: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program in the venv, as after `activate`, without a caller's Python settings."""
    result = process.of_caller(env)
    result["VIRTUAL_ENV"] = os.fspath(path.absolute())
    result["PATH"] = f"{path.absolute() / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    return result


def _failure(creating: subprocess.Popen[bytes], wanted: FolderBuild, said: str) -> BuildError | HostError:
    """Return the error of `uv venv`, which printed `said`; without an interpreter, it lists those that uv finds."""
    # uv may fail to inspect an interpreter because its cache cannot be written: any error but ENOENT.
    if "interpreter" not in said.lower() or re.search(r"\(os error (?!2\))", said):
        status = creating.returncode
        text = f"{wanted.final}: uv venv failed ({process.ending(status)}):\n  {said}"
        return BuildError(text, folder.tool_hint(said, status))
    python = wanted.python or wanted.plan.python
    environment = wanted.environment
    done = process.run(
        [environment.uv, "python", "list", "--only-installed", "--output-format", "json", "--no-config"],
        env=environment.uv_environment(),
        check=False,
    )
    rows = json.loads(done.stdout) if done.returncode == 0 else []
    listing = "".join(f"\n  {row['version']:<10} {row['path']}" for row in rows) or "\n  none"
    return HostError(
        f"no Python {python} on this host; found:{listing}\n  ({said.splitlines()[0]})",
        f"install Python {python} (your distribution's package, `uv python install`, a conda environment) or "
        "load its module, then run again; or name one with --python PATH",
    )


def _known_interpreter(version: str, environment: Environment) -> str:
    """Return the interpreter that uv chose last time, which saves 0.1 s, if it is unchanged, or else the version."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        path, size, time = parse_json(_note(version, environment).read_bytes())
        stat = os.stat(path)
        if (stat.st_size, stat.st_mtime_ns) == (size, time):
            return str(path)
    return version


def _remember_interpreter(version: str, chosen: Path, environment: Environment) -> None:
    """Record the real path of `chosen`, a venv's python."""
    note = _note(version, environment)
    with contextlib.suppress(OSError):
        path = os.path.realpath(chosen)
        stat = os.stat(path)
        text = json.dumps([path, stat.st_size, stat.st_mtime_ns])
        if not note.is_file() or note.read_text(encoding="utf-8") != text:
            atomic.write_atomically(note, text)


def _note(version: str, environment: Environment) -> Path:
    names = ("PATH", "PYENV_VERSION", "UV_PYTHON_PREFERENCE", "UV_PYTHON_INSTALL_DIR")
    key = json.dumps([version, *(environment.variables.get(name) for name in names)])
    return environment.store.root / "pythons" / hashlib.sha256(key.encode()).hexdigest()
