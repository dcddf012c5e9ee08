"""The conda part of `envbuild lock`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli.common import log
from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.lock.conda import CondaLock
    from envbuild.lock.conda_kind import Solver
    from envbuild.lock.format import Lock

EXPORTS = ("conda-lock", "environment", "explicit")
SOLVERS = ("rattler", "conda-lock")


@dataclass(frozen=True, slots=True)
class Exported:
    """One target's part of an exported file; `pip` are conda-lock.yml's entries for the packages that pip adds."""

    lock: CondaLock
    channels: tuple[str, ...]
    pip: str


@dataclass(frozen=True, slots=True)
class CondaWork:
    """The options of `envbuild lock` for conda locks. `upgrade` is None for every package."""

    upgrade: Collection[str] | None
    offline: bool
    write: bool
    solver: str
    export: str | None
    folder: Path
    with_wheels: bool = True  # `upgrade` also names packages of the wheel locks
    exports: dict[Path, list[Exported]] = field(default_factory=dict)


def upgrades_of_wheels(loaded: LoadedRecipe, target: Target, old: Lock | None, names: Sequence[str]) -> list[str]:
    """Return those of `names` that concern the wheel lock: all except those that only the conda lock contains."""
    from envbuild.locks import has_conda

    if not has_conda(loaded) or not names:
        return list(names)
    from envbuild.lock.conda_kind import conda_lock
    from envbuild.names import normalise

    conda = conda_lock(loaded, target).inspect().lock
    wheels = {package.name for package in old.packages} if old else set()
    return [
        name for name in names
        if normalise(name) in wheels or conda is None or not conda.knows(name)
    ]  # fmt: skip


def lock_conda(loaded: LoadedRecipe, target: Target, environment: Environment, work: CondaWork) -> None:
    """Update the conda lock of `target` if it is missing, stale or to be upgraded, and export it.

    Raises LockError when it cannot be made.
    """
    from envbuild.lock.conda_kind import conda_lock
    from envbuild.lock.lifecycle import update
    from envbuild.locks import has_wheels

    kind = conda_lock(loaded, target, _solver(work.solver))
    state = kind.inspect()
    upgrade = work.upgrade
    if upgrade and state.lock is not None and work.with_wheels and has_wheels(loaded, target):
        # The wheel lock takes the other names.
        upgrade = [name for name in upgrade if state.lock.knows(name)]
    lock = state.lock if state.fault is None else None
    due = upgrade is None or bool(upgrade) or lock is None or work.solver != SOLVERS[0]
    if due:
        log(f"{loaded.recipe.name} {target.name}: solving conda packages …")
        lock = update(kind, environment, upgrade=upgrade, offline=work.offline, log=log, write=work.write).lock
    if work.export and lock is not None:
        _export(loaded, target, environment, lock, work)


def _solver(name: str) -> Solver | None:
    if name == SOLVERS[0]:
        return None
    from envbuild.lock.conda_lock_tool import solve_by_conda_lock

    return solve_by_conda_lock


def _export(loaded: LoadedRecipe, target: Target, environment: Environment, lock: CondaLock, work: CondaWork) -> None:
    """Collect one target's part of the file that `write_exports` writes."""
    from envbuild.lock.conda import export_name, pip_entries
    from envbuild.lock.conda_kind import resolve_pip

    pip = ""
    if lock.pip.packages and work.export == "conda-lock":
        # The lock contains no URLs, so uv resolves the locked packages again.
        again = resolve_pip(loaded, target, environment, lock.packages, keep=lock.pip, offline=work.offline)
        pip = pip_entries(lock, again.pylock)
    path = work.folder / export_name(work.export or "", lock.recipe, target)
    work.exports.setdefault(path, []).append(Exported(lock, loaded.recipe.conda.channels, pip))


def write_exports(work: CondaWork) -> None:
    """Write the exported files and print their paths."""
    from envbuild.atomic import write_atomically, writing
    from envbuild.lock.conda import environment_text, explicit_text
    from envbuild.lock.conda_format import part_of, render

    for path, shares in work.exports.items():
        first = shares[0]
        if work.export == "environment":
            text = environment_text(first.lock, first.channels)
        elif work.export == "explicit":
            text = explicit_text(first.lock)
        else:
            text = render([part_of(share.lock, share.channels) for share in shares])
            text += "".join(share.pip for share in shares)
        with writing(work.folder, LockError):
            write_atomically(path, text)
        click.echo(path)
