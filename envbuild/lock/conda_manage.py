"""Conda locks: check whether they are current, and update them.

A target's lock consists of two files: its conda packages in `<accelerator>.conda-lock.yml`, together with those of
the accelerator's other targets, and the packages that pip adds in `<target>.conda.requirements.txt`. The first file
holds the digest of the second, so that a run killed between the two writes is detected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.compat.check import check_stack
from envbuild.environment import Environment
from envbuild.errors import LockError, UsageError
from envbuild.file_lock import folder_lock
from envbuild.lock import format as pip_format
from envbuild.lock.conda import (
    CondaLock,
    CondaPackage,
    conda_lock_name,
    no_pip,
    pip_lock_name,
)
from envbuild.lock.conda_accelerator import check_conda_accelerator
from envbuild.lock.conda_format import CondaPart, part_of, read, render
from envbuild.lock.format import Lock, changes
from envbuild.lock.manage import say_warnings
from envbuild.lock.resolve import Resolution
from envbuild.lock.state import (
    LockState,
    how_to_make,
    inspect_lock_file,
    lock_folders,
    package_changes,
    write_lock_file,
)
from envbuild.names import normalise
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

Log = Callable[[str], None]
Solver = Callable[..., tuple[CondaPackage, ...]]


@dataclass(frozen=True, slots=True)
class CondaResolution:
    """New lock, and the resolution of the packages that pip adds (None when the recipe requests none)."""

    lock: CondaLock
    pip: Resolution | None


def inspect_conda_lock(recipe: LoadedRecipe, target: Target) -> LockState[CondaLock]:
    """Read the target's conda lock without changing anything. Raises LockError when it is not readable."""

    def read_target(path: Path) -> CondaLock | None:
        part = (read(path) or {}).get(target.name)
        if part is None:
            return None
        pip = pip_format.read(path.with_name(pip_lock_name(target)))
        return CondaLock(
            part.recipe,
            part.target,
            # A pip lock for other conda packages makes the whole lock stale.
            part.recipe_digest if _goes_with(part, pip, recipe) else "",
            part.packages,
            pip or _without_pip(recipe, target),
        )

    return inspect_lock_file(
        recipe, target, conda_lock_name(target), read_target, recipe.conda_digest(target),
        part="conda", what="conda lock", subject="the recipe or what pip adds",
    )  # fmt: skip


def _goes_with(part: CondaPart, pip: Lock | None, recipe: LoadedRecipe) -> bool:
    if not recipe.recipe.conda.requirements:
        return pip is None and not part.pip_digest
    return pip is not None and pip.digest == part.pip_digest


def _without_pip(recipe: LoadedRecipe, target: Target) -> Lock:
    table = recipe.recipe.targets[target.name]
    return no_pip(
        recipe.recipe.name,
        target.name,
        recipe.recipe.python,
        target.platform(table.glibc),
        recipe.conda_digest(target),
    )


def check_has_conda(recipe: LoadedRecipe) -> None:
    """Raise UsageError for a recipe without conda packages."""
    if not recipe.recipe.conda.dependencies:
        raise UsageError(
            f"recipe {recipe.recipe.name} has no [conda] packages",
            'add a table to it: [conda] with dependencies = ["numpy 2.2.*"]',
        )


def ensure_conda_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    locked: bool,
    offline: bool,
    log: Log,
    write: bool = True,
) -> CondaLock:
    """Return the current conda lock of `target`; solve a missing or stale one.

    Each solve is reported through `log`. Without `write` no file is written. Raises UsageError for a recipe without
    conda packages, and LockError when `locked` and the lock is missing or stale, or when it cannot be solved.
    """
    check_has_conda(recipe)
    state = inspect_conda_lock(recipe, target)
    if state.fault is None and state.lock is not None:
        check_conda_lock(recipe, target, state.lock, str(state.path), log)
        say_warnings(state.lock.pip, log)
        return state.lock
    if locked:
        raise LockError(f"{state.path}: {state.fault}", how_to_make(recipe, target, "conda"))
    log(f"{state.path}: {state.fault}; solving {target.name} …")
    return update_conda_lock(
        recipe, target, environment, upgrade=(), offline=offline, log=log, write=write
    ).lock


def check_conda_lock(
    recipe: LoadedRecipe, target: Target, lock: CondaLock, source: str, log: Log
) -> None:
    """Raise LockError when `lock` has a PyTorch for another accelerator, or a combination known not to work.

    `source` is the file that `lock` was read from.
    """
    check_conda_accelerator(target, lock.packages, source)
    check_stack(recipe, target, conda_versions(lock), log, conda=True)


def update_conda_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    upgrade: Collection[str] | None,
    offline: bool,
    log: Log,
    write: bool = True,
    solver: Solver | None = None,
) -> CondaResolution:
    """Solve again and write the lock. With `upgrade` None every package may change, otherwise only the named ones.

    The file is replaced atomically and keeps other targets' packages. Each change is reported through `log`, one
    line each. `solver` is `conda_solve.solve` or a function with its signature.
    """
    from envbuild.lock import conda_pip, conda_solve

    check_has_conda(recipe)
    old = inspect_conda_lock(recipe, target).lock
    kept = None if upgrade is None or old is None else without_conda(old, upgrade)
    packages = (solver or conda_solve.solve)(
        recipe, target, environment, keep=kept.packages if kept else (), offline=offline
    )
    check_conda_accelerator(target, packages, str(recipe.path))
    pip = None
    if recipe.recipe.conda.requirements:
        pip = conda_pip.resolve_pip(
            recipe, target, environment, packages, keep=kept.pip if kept else None, offline=offline
        )
        for note in pip.notes:
            log(f"note: {note}")
        say_warnings(pip.lock, log)
    lock = CondaLock(
        recipe.recipe.name,
        target.name,
        recipe.conda_digest(target),
        packages,
        pip.lock if pip else _without_pip(recipe, target),
    )
    check_stack(recipe, target, conda_versions(lock), log, conda=True)
    path = lock_folders(recipe, target)[-1] / conda_lock_name(target)
    differences = conda_changes(old, lock)
    for line in differences:
        log(f"  {line}")
    if not write:
        log(f"{path}: not written (dry run), {len(differences)} packages would change")
        return CondaResolution(lock, pip)
    _write(path, recipe, target, lock, pip is not None)
    count = len(lock.packages) + len(lock.pip.packages)
    log(f"{path}: {count} packages for {target.name}, {len(differences)} changed")
    return CondaResolution(lock, pip)


def _write(
    path: Path, recipe: LoadedRecipe, target: Target, lock: CondaLock, with_pip: bool
) -> None:
    part = part_of(lock, recipe.recipe.conda.channels, lock.pip.digest if with_pip else "")
    beside = path.with_name(pip_lock_name(target))
    with contextlib.ExitStack() as held:
        # Another target's run may write the same file at the same time.
        with contextlib.suppress(OSError):
            held.enter_context(folder_lock(path.parent))
        others = read(path) or {}
        parts = {
            name: other
            for name, other in others.items()
            if other.recipe == lock.recipe and name in recipe.recipe.targets
        }
        if with_pip:
            write_lock_file(beside, pip_format.render(lock.pip))
        write_lock_file(path, render(list({**parts, target.name: part}.values())))
        if not with_pip:
            with contextlib.suppress(OSError):
                beside.unlink()


def without_conda(lock: CondaLock, names: Collection[str]) -> CondaLock:
    """Return `lock` without the conda and pip packages in `names`.

    A solve prefers the remaining versions; the named packages may change. Raises LockError when a name is not in
    the lock.
    """
    known = lock_names(lock)
    unknown = sorted(name for name in names if not _is_known(name, known))
    if unknown:
        raise LockError(
            f"--upgrade: {', '.join(unknown)} is not in the conda lock of {lock.recipe} ({lock.target})",
            f"locked are: {', '.join(sorted(known))}",
        )
    conda = {name.lower() for name in names}
    pip = {normalise(name) for name in names}
    packages = tuple(p for p in lock.packages if p.name not in conda)
    added = replace(lock.pip, packages=tuple(p for p in lock.pip.packages if p.name not in pip))
    return replace(lock, packages=packages, pip=added)


def conda_versions(lock: CondaLock) -> dict[str, str]:
    """Return the versions of all packages of `lock` by name; a conda package overrides pip's of the same name."""
    added = {package.name: package.version for package in lock.pip.packages}
    return added | {package.name: package.version for package in lock.packages}


def lock_names(lock: CondaLock) -> set[str]:
    """Return the names of all packages of `lock`, conda's and pip's."""
    return {p.name for p in lock.packages} | {p.name for p in lock.pip.packages}


def _is_known(name: str, known: set[str]) -> bool:
    return name.lower() in known or normalise(name) in known


def knows(lock: CondaLock, name: str) -> bool:
    """Return whether `name` is a package of `lock`, conda's or pip's."""
    return _is_known(name, lock_names(lock))


def conda_changes(old: CondaLock | None, new: CondaLock) -> list[str]:
    """Return the changes of an update, one line per package: conda packages sorted by name, then pip's."""
    lines = package_changes(
        {p.name: p for p in old.packages} if old else {},
        {p.name: p for p in new.packages},
        lambda p: f"{p.version} {p.build}",
        lambda was, now: "" if was.sha256 == now.sha256 else "another file",
    )
    return lines + [f"{line} (pip)" for line in changes(old.pip if old else None, new.pip)]
