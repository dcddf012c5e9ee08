"""A conda environment from a plan: packages from the store by rattler, then wheels by uv, never over conda's files.

Unlike a venv, its files contain its path: it is built in a folder beside its final path, with the final path in its
files. Sources: conda's documentation "Managing environments" (CONDA_PREFIX, activate.d, env_vars.d, conda-meta/state);
PyPA "Recording installed projects" (RECORD) and "Entry points specification".
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from envbuild.base import atomic, host, process
from envbuild.base.errors import BuildError, HostError
from envbuild.base.files import absolute_path
from envbuild.base.packages import record_row
from envbuild.build.conda_install import Prefix, install_packages
from envbuild.build.installing import FolderBuild, finish, install_wheels, interpreter, locked_files, program_file
from envbuild.contract.conda_meta import (
    META,
    conda_packages,
    owned_dist_infos,
    quick_names,
    read_records,
    recorded_files,
    rewritten_files,
)
from envbuild.contract.installed import names_and_versions
from envbuild.contract.kinds import set_variables
from envbuild.contract.state import State, has_packages, site_packages
from envbuild.layers.conda_package import locate_conda
from envbuild.layers.wheel import RELOCATABLE, Scheme, WheelFile, wheel_paths
from envbuild.layers.wheels import locate
from envbuild.plan import Plan

TITLE = "conda environment"
_DROPPED = frozenset({"VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT"})
# Runs each script, with its output kept apart from the variables. As in conda, a failing script stops nothing.
_SOURCE = """exec 3>&1 1>&2
for script in "$@"; do . "$script"; done
exec "$CONDA_PREFIX/bin/python" -I -S -c 'import os
import time
os.write(3, b"\\0".join(k + b"=" + v for k, v in os.environb.items()))'
"""
# Variables that the shell sets for itself.
_SHELLS = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})


def is_current(path: Path, state: State, python: str | None = None) -> bool:
    """Return whether the environment at `path` matches its `state`, by a quick check of names, versions and path."""
    if not interpreter(path).exists() or state.interpreter != os.fspath(absolute_path(interpreter(path))):
        return False
    try:
        return has_packages(path, state, quick_names(path, site_packages(path, state.python)))
    except OSError:
        return False


def build(folder_build: FolderBuild) -> State:
    """Build the environment, and return its state. Raises BuildError, LockError and the errors of its `layers`."""
    plan, environment, staged, final = (
        folder_build.plan,
        folder_build.environment,
        folder_build.staged,
        folder_build.final,
    )
    find = partial(locate_conda, environment=environment, offline=folder_build.offline)
    version = next((package.version for package in plan.conda if package.name == "python"), plan.python)

    def add() -> None:
        if not interpreter(staged).exists() or not version.startswith(f"{plan.python}."):
            raise BuildError(
                f"the locked conda packages install no Python {plan.python} (bin/python); locked is {version}",
                "lock again",
            )
        with atomic.writing(staged):
            (staged / META / "history").write_text(_history(plan), encoding="utf-8")
        _add_wheels(folder_build, wheels, own)

    with atomic.writing(environment.store.root):
        wheels, own = locate(plan, folder_build.trainer, environment, folder_build.offline)
        read = install_packages(plan.conda, Prefix(staged, os.fspath(final)), environment.store, find, add)
    if plan.compile_bytecode:  # of modules that have none yet; those that do not compile are left, as installers do
        process.run(
            [
                interpreter(staged),
                "-m",
                "compileall",
                "-qq",
                "-j",
                str(host.workers(environment.variables)),
                "-s",
                staged,
                "-p",
                final,
                staged / "lib",
            ],
            env=process.of_caller(environment.variables, verifying=True),
            check=False,
        )
    with atomic.writing(staged):
        records = read_records(staged)
    owned = owned_dist_infos(records, os.fspath(site_packages(Path(), plan.python)))
    locked = {**recorded_files(records), **locked_files([*wheels, *own], plan.python, staged, conda=True)}
    python = os.fspath(interpreter(final))
    return finish(
        folder_build, own, version, python, locked, conda_packages(records), owned, read, rewritten_files(records)
    )


def _history(plan: Plan) -> str:
    """Return the content of conda-meta/history, by which conda recognises an environment: time, command, packages."""
    lines = [f"==> {time.strftime('%Y-%m-%d %H:%M:%S')} <=="]
    lines += [f"# cmd: envbuild conda {plan.recipe} --target {plan.target}"]
    lines += [f"+{p.channel}/{p.subdir}::{p.stem}" for p in plan.conda]
    return "\n".join(lines) + "\n"


def _add_wheels(folder_build: FolderBuild, wheels: Sequence[WheelFile], own: Sequence[WheelFile]) -> None:
    """Install the plan's `wheels` and `own` code. Raises BuildError for a wheel that would replace conda's files."""
    staged, python = folder_build.staged, folder_build.plan.python
    packages = site_packages(staged, python)
    with atomic.writing(staged):
        packages.mkdir(parents=True, exist_ok=True)
    before = names_and_versions(packages)
    for wheel in (*wheels, *own):
        _refuse_over(wheel, python, before, staged)
    install_wheels(folder_build, wheels, own, "--break-system-packages")
    with atomic.writing(staged):
        for installer in packages.glob("*.dist-info/INSTALLER"):
            record = installer.with_name("RECORD")
            if installer.read_text(encoding="utf-8").strip() == "uv" and record.is_file():
                _release_scripts(record, staged)


def _refuse_over(wheel: WheelFile, python: str, before: dict[str, str], staged: Path) -> None:
    if wheel.name in before:
        raise BuildError(
            f"{wheel.path.name}: pip would replace {wheel.name} {before[wheel.name]}, which a conda package installs",
            "remove it from `requirements` of [conda], or the conda package from `dependencies`; then lock again",
        )
    for path in wheel_paths(wheel.path, Scheme("prefix", python, conda=True)):
        relative = path.removeprefix("prefix/")
        if os.path.lexists(staged / relative):
            records = (record for record in read_records(staged) if relative in record["files"])
            owners = [f"conda package {record['name']}-{record['version']}-{record['build']}" for record in records]
            owners += [f"what is in {META}" if relative.startswith(META) else "the environment"]
            raise BuildError(
                f"{wheel.path.name} would replace {relative} of {owners[0]}",
                "remove one of the two from [conda] in the recipe, and lock again",
            )


def _release_scripts(record: Path, staged: Path) -> None:
    """Make scripts with the staging folder in their first line find their interpreter relatively; renew the RECORD."""
    with record.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.reader(stream) if row]
    changed = False
    for row in rows:
        path = Path(os.path.normpath(record.parents[1] / row[0]))
        if path.parent != staged / "bin" or path.is_symlink():
            continue
        data = path.read_bytes()
        body = _without_interpreter(data, os.fsencode(staged / "bin" / "python"))
        if body is None:
            continue
        data = RELOCATABLE + body
        _rewrite(path, data)
        row[1:] = record_row(hashlib.sha256(data).digest(), len(data))
        changed = True
    if changed:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(rows)
        _rewrite(record, out.getvalue().encode())


def _without_interpreter(data: bytes, python: bytes) -> bytes | None:
    """Return a script without the lines that start `python`, None if it does not start that interpreter."""
    lines = data.split(b"\n", 3)
    if lines[0].startswith(b"#!" + python):
        return data[len(lines[0]) + 1 :]
    # The form for interpreter paths that the kernel would not accept.
    if lines[0] == b"#!/bin/sh" and len(lines) == 4 and lines[1].startswith(b"'''exec' "):
        return lines[3] if python in lines[1] else None
    return None


def _rewrite(path: Path, data: bytes) -> None:
    # A new file, because the old one may be a link into uv's cache.
    mode = path.stat().st_mode & 0o7777
    path.unlink()
    path.write_bytes(data)
    path.chmod(mode)


def command(path: Path, program: str, *arguments: str) -> list[str]:
    """Return the command line that runs `program` (torchrun, python) in the environment at `path`.

    Before the environment is moved to its final path, its scripts name an interpreter that does not exist yet: they are
    then run by the interpreter at `path`.
    """
    root, file = path.absolute(), program_file(path, program)
    runs = not os.path.isabs(file) or _runs(Path(file), root)
    return [*([] if runs else [os.fspath(interpreter(root))]), file, *arguments]


def _runs(file: Path, root: Path) -> bool:
    """Return whether `file` can be started: a program, or a script that names no interpreter outside `root`."""
    try:
        with file.open("rb") as stream:
            head = stream.read(1024)
    except OSError:
        return True  # starting it will report the error
    lines = b"\n".join(head.split(b"\n", 2)[:2])
    return not head.startswith(b"#!") or b"/bin/python" not in lines or os.fsencode(interpreter(root)) in lines


def launch_environment(path: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` as after `conda activate` (bash runs its scripts), without Python settings. Raises HostError.

    As in jobs, Python ignores packages in the user's ~/.local, which would otherwise come first.
    """
    root = path.absolute()
    result = {name: value for name, value in process.of_caller(env).items() if name not in _DROPPED}
    result |= {
        "CONDA_PREFIX": os.fspath(root),
        # conda calls an environment in an envs folder by its name, any other by its path.
        "CONDA_DEFAULT_ENV": root.name if root.parent.name == "envs" else os.fspath(root),
        "CONDA_SHLVL": "1",
        "PYTHONNOUSERSITE": "1",
        "PATH": f"{root / 'bin'}{os.pathsep}{env.get('PATH') or os.defpath}",
    }
    result |= set_variables(root)
    scripts = sorted((root / "etc" / "conda" / "activate.d").glob("*.sh"))
    return _sourced(scripts, result) if scripts else result


def _sourced(scripts: list[Path], env: dict[str, str]) -> dict[str, str]:
    done = process.run(
        ["bash", "--noprofile", "--norc", "-c", _SOURCE, "bash", *scripts],
        env=env,
        failure=HostError,
        step="the environment's activation (etc/conda/activate.d)",
    )
    pairs = (line.partition("=") for line in done.stdout.split("\0") if "=" in line)
    variables_set = {name: value for name, _, value in pairs}
    own = {name: env[name] for name in _SHELLS if name in env}
    return {name: value for name, value in variables_set.items() if name not in _SHELLS} | own
