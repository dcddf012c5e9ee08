"""A conda environment from a plan: packages from the store, installed by rattler and uv, put in place atomically.

Unlike a venv, its files contain its path: it is built in a folder beside its final path, with the final path in
its files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild import atomic, process, resources
from envbuild.artifacts import installed
from envbuild.artifacts.conda_activate import activated
from envbuild.artifacts.conda_cache import Located
from envbuild.artifacts.conda_survey import conda_packages, owned_dist_infos, quick_names, read_records
from envbuild.artifacts.folder import check_installed, interpreter, site_packages
from envbuild.artifacts.state import FILE, State, has_layers, packages_of, state_of
from envbuild.environment import Environment
from envbuild.errors import BuildError
from envbuild.layers.conda_files import locate_conda
from envbuild.layers.trainer import Trainer
from envbuild.layers.wheels import locate
from envbuild.lock.conda import CondaPackage
from envbuild.plan.plan import Plan

if TYPE_CHECKING:
    from envbuild.artifacts.layers_in import LayerFolder

TITLE = "conda environment"


def is_current(path: Path, state: State, python: str | None = None) -> bool:
    """Return whether the environment at `path` matches its `state`, by a quick check of names, versions and path.

    `python` has no meaning here: the packages contain the interpreter.
    """
    if not interpreter(path).exists() or state.interpreter != os.fspath(interpreter(_place(path))):
        return False
    try:
        found = quick_names(path, site_packages(path, state.python))
    except OSError:
        return False
    wanted = {(name, version) for name, version, _ in state.packages}
    return found == wanted and has_layers(path, state)


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
    """Build the environment of `plan` in the empty folder `staged` for the final path `final`; return its state.

    `layers` returns the plan's source layers; it is called with the interpreter in `staged` after all packages
    are installed. Raises the errors of `layers`, and BuildError for a package or wheel that is damaged or that
    no source has, for a path too long for a package, and for a disk that is full or not writable.
    """
    from envbuild.artifacts.conda_install import install_packages
    from envbuild.artifacts.conda_pip import add_wheels
    from envbuild.artifacts.layers_in import install_layers

    final = _place(final)

    def find(packages: Sequence[CondaPackage]) -> Located:
        return locate_conda(replace(plan, conda=tuple(packages)), environment, offline=offline)

    def add() -> None:
        _check_python(plan, staged)
        add_wheels(plan, trainer, [*wheels, own], environment, staged)

    with atomic.writing(environment.store.root):
        wheels, own = locate(plan, trainer, environment, offline)
        command = f"envbuild conda {plan.recipe} --target {plan.target}"
        install_packages(plan.conda, environment.store, staged, final, command, find, add)
    if plan.compile_bytecode:
        _compile(staged, final, environment)
    folders = layers(interpreter(staged))
    with atomic.writing(staged):
        built = install_layers(folders, staged)
        records = read_records(staged)
        inside = os.fspath(site_packages(Path(), plan.python))
        added = installed.distributions(staged / inside, owned_dist_infos(records, inside)).values()
        check_installed(plan, trainer, folders, {d.name: d.version for d in added})
        state = state_of(
            plan,
            python_version=_python_version(plan),
            interpreter=os.fspath(interpreter(final)),
            packages=packages_of([*conda_packages(records), *added]),
            layers=built,
        )
        (staged / FILE).write_text(state.render(), encoding="utf-8")
    return state


def command(path: Path, program: str, *arguments: str) -> list[str]:
    """Return the command line that runs `program` (torchrun, python) in the environment at `path`.

    Before the environment is moved to its final path, its scripts name an interpreter that does not exist yet:
    they are then run by the interpreter at `path`.
    """
    file = path.absolute() / "bin" / program
    line = [os.fspath(file), *arguments]
    return line if _runs(file, path.absolute()) else [os.fspath(interpreter(path.absolute())), *line]


def launch_environment(path: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program in the environment, as after `conda activate`.

    A caller's Python settings are dropped. Raises HostError when the activation scripts cannot be run.
    """
    return activated(path, env)


def _place(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _runs(file: Path, root: Path) -> bool:
    """Return whether `file` can be started: a program, or a script that names no interpreter outside `root`."""
    try:
        with file.open("rb") as stream:
            head = stream.read(1024)
    except OSError:
        return True  # starting it will report the error
    if not head.startswith(b"#!"):
        return True
    lines = b"\n".join(head.split(b"\n", 2)[:2])
    return b"/bin/python" not in lines or os.fsencode(interpreter(root)) in lines


def _python_version(plan: Plan) -> str:
    return next((p.version for p in plan.conda if p.name == "python"), plan.python)


def _check_python(plan: Plan, staged: Path) -> None:
    version = _python_version(plan)
    if not interpreter(staged).exists() or not version.startswith(f"{plan.python}."):
        raise BuildError(
            f"the locked conda packages bring no Python {plan.python} (bin/python): {version} is locked", "lock again"
        )


def _compile(staged: Path, final: Path, environment: Environment) -> None:
    """Compile modules that have no bytecode yet; modules that do not compile are left, as installers do."""
    jobs = resources.workers(environment.variables)
    process.run(
        [interpreter(staged), "-m", "compileall", "-qq", "-j", str(jobs), "-s", staged, "-p", final,
         staged / "lib"],
        env={**environment.variables, "PYTHONDONTWRITEBYTECODE": ""},
        check=False,
    )  # fmt: skip
