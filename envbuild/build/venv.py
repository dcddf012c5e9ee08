"""A virtual environment from a plan: built by uv from wheels in the store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from envbuild.base import atomic, process
from envbuild.base.errors import BuildError
from envbuild.build import installing as folder
from envbuild.build.installing import FolderBuild, interpreter
from envbuild.contract.installed import names_and_versions
from envbuild.contract.state import State, has_packages, site_packages
from envbuild.environment import uv_hint
from envbuild.layers.wheels import locate
from envbuild.pythons import keep_python, provide_python

TITLE = "venv"


def is_current(path: Path, state: State, python: str | None = None) -> bool:
    """Return whether the environment matches its `state` and uses the interpreter `python`, by a quick check."""
    if not interpreter(path).exists():
        return False
    if python is not None and os.sep in python and os.path.realpath(python) != os.path.realpath(state.interpreter):
        return False
    try:
        return has_packages(path, state, names_and_versions(site_packages(path, state.python)).items())
    except OSError:
        return False


def build(folder_build: FolderBuild) -> State:
    """Build the environment, which can be moved anywhere, and return its state. Raises BuildError and HostError."""
    plan, environment, staged = folder_build.plan, folder_build.environment, folder_build.staged
    python = provide_python(folder_build.python or plan.python, environment, offline=folder_build.offline)
    # --relocatable: the folder is built beside its final path and moved, so that no script may contain its path.
    line: list[str | Path] = [environment.uv, "venv", "--relocatable", "--allow-existing", "--no-project"]
    line += ["--no-config", "--quiet", "--python", python.path, staged]
    creating = process.start(line, env=environment.uv_environment())
    try:
        with atomic.writing(environment.store.root):
            located, own = locate(plan, folder_build.trainer, environment, folder_build.offline)
        _, stderr = creating.communicate()
    except BaseException:
        process.stop([creating])
        raise
    if creating.returncode != 0:
        status, output = creating.returncode, stderr.decode(errors="replace").strip()
        raise BuildError(
            f"{folder_build.final}: uv venv failed ({process.ending(status)}):\n  {output}", uv_hint(output, status)
        )
    options = ["--compile-bytecode"] if plan.compile_bytecode else []
    folder.install_wheels(folder_build, located, own, *options)
    locked = folder.locked_files([*located, *own], plan.python, staged)
    keep_python(python.build, folder_build.final, environment.store)
    path = os.path.realpath(interpreter(staged))
    return folder.finish(folder_build, own, python.version, path, locked, python_build=python.build)


def command(path: Path, program: str, *arguments: str) -> list[str]:
    """Return the command line that runs `program` (torchrun, python) in the venv at `path`."""
    return [folder.program_file(path, program), *arguments]


def launch_environment(path: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program in the venv, as after `activate`, without a caller's Python settings."""
    result = process.of_caller(env)
    result["VIRTUAL_ENV"] = os.fspath(path.absolute())
    result["PATH"] = f"{path.absolute() / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    return result
