"""A virtual environment from a plan: built by uv from wheels in the store."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild import atomic, process
from envbuild.artifacts import installed
from envbuild.artifacts.folder import check_installed, interpreter, site_packages
from envbuild.artifacts.interpreter import explain_missing, known_interpreter, remember_interpreter
from envbuild.artifacts.state import FILE, State, has_layers, packages_of, state_of
from envbuild.artifacts.uv_install import install_wheels, tool_hint
from envbuild.environment import Environment
from envbuild.errors import BuildError, HostError
from envbuild.layers.trainer import Trainer
from envbuild.layers.wheels import locate
from envbuild.plan.plan import Plan

if TYPE_CHECKING:
    from envbuild.artifacts.layers_in import LayerFolder

TITLE = "venv"


def is_current(path: Path, state: State, python: str | None = None) -> bool:
    """Return whether the environment at `path` matches its `state` and `python`, by a quick check.

    The check compares names and versions of packages, and the interpreter if `python` is a path.
    """
    if not interpreter(path).exists():
        return False
    if python is not None and _home(python) not in (None, _home(state.interpreter)):
        return False
    try:
        found = installed.names_and_versions(site_packages(path, state.python))
    except OSError:
        return False
    return found == {name: version for name, version, _ in state.packages} and has_layers(path, state)


def build(
    plan: Plan,
    trainer: Trainer,
    environment: Environment,
    staged: Path,
    final: Path,
    *,
    offline: bool,
    layers: Callable[[Path], Sequence[LayerFolder]] = lambda _python: (),
    python: str | None = None,
) -> State:
    """Build the environment of `plan` in the empty folder `staged`, which can be moved anywhere; return its state.

    `python` is an interpreter's path or version (default: the plan's version). `layers` returns the plan's
    source layers; it is called with the environment's interpreter after all wheels are installed. Raises
    BuildError, LockError (a wheel that no source has), HostError (no suitable interpreter), and the errors of
    `layers`.
    """
    from envbuild.artifacts.layers_in import install_layers

    env = environment.uv_environment()
    # --relocatable: the folder is built beside its final path and moved, so that no script may contain its
    # path.
    creating = process.start(
        [environment.uv, "venv", "--relocatable", "--allow-existing", "--no-project", "--no-config",
         "--quiet", "--python", python or known_interpreter(plan.python, environment), staged],
        env=env,
    )  # fmt: skip
    try:
        with atomic.writing(environment.store.root):
            located, own = locate(plan, trainer, environment, offline)
    except BaseException:
        process.stop([creating])
        raise
    _finish_venv(creating, plan, python, environment)
    _check_version(staged, plan, python)
    if python is None:
        remember_interpreter(plan.python, interpreter(staged), environment)
    wheels = [wheel.path for wheel in [*located, own]]
    install_wheels(
        plan, trainer, wheels, environment, staged, interpreter(staged),
        "--compile-bytecode" if plan.compile_bytecode else None,
    )  # fmt: skip
    folders = layers(interpreter(staged))
    with atomic.writing(staged):
        built = install_layers(folders, staged)
        found = installed.distributions(site_packages(staged, plan.python))
        check_installed(plan, trainer, folders, {d.name: d.version for d in found.values()})
        state = state_of(
            plan,
            python_version=_config(staged).get("version_info", plan.python),
            interpreter=os.path.realpath(interpreter(staged)),
            packages=packages_of(found.values()),
            layers=built,
        )
        (staged / FILE).write_text(state.render(), encoding="utf-8")
    return state


def command(path: Path, program: str, *arguments: str) -> list[str]:
    """Return the command line that runs `program` (torchrun, python) in the venv at `path`."""
    return [os.fspath(path.absolute() / "bin" / program), *arguments]


def launch_environment(path: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program in the venv, as after `activate`, without a caller's Python settings."""
    dropped = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONDONTWRITEBYTECODE", "__PYVENV_LAUNCHER__")
    result = {name: value for name, value in env.items() if name not in dropped}
    result["VIRTUAL_ENV"] = os.fspath(path.absolute())
    result["PATH"] = f"{path.absolute() / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    return result


def _finish_venv(creating: subprocess.Popen[bytes], plan: Plan, python: str | None, environment: Environment) -> None:
    try:
        _, stderr = creating.communicate()
    except BaseException:
        process.stop([creating])
        raise
    if creating.returncode == 0:
        return
    text = stderr.decode(errors="replace").strip()
    if "interpreter" in text.lower():
        raise explain_missing(python or plan.python, environment, text)
    raise BuildError(f"uv venv failed (exit {creating.returncode}):\n  {text}", tool_hint(text))


def _check_version(staged: Path, plan: Plan, python: str | None) -> None:
    version = _config(staged).get("version_info", "")
    if ".".join(version.split(".")[:2]) != plan.python:
        raise HostError(
            f"--python {python} is Python {version}; recipe {plan.recipe} wants Python {plan.python}",
            f"give a Python {plan.python}, or change `python` in the recipe and lock it again",
        )


def _config(path: Path) -> dict[str, str]:
    """Return pyvenv.cfg (PEP 405) as a dictionary."""
    lines = (path / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _home(python: str) -> str | None:
    """Return the real path of an interpreter given by path, None for one given by version."""
    return os.path.realpath(python) if os.sep in python else None
