"""The conda lock of a target.

A target's lock consists of two files: its conda packages in `<accelerator>.conda-lock.yml`, together with those of
the accelerator's other targets, and the packages that pip adds in `<target>.conda.requirements.txt`. The first file
holds the digest of the second, so that a run killed between the two writes is detected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from envbuild.compat.check import check_stack
from envbuild.environment import Environment
from envbuild.errors import LockError, UsageError
from envbuild.file_lock import folder_lock
from envbuild.lock import format as pip_format
from envbuild.lock.conda import CondaLock, CondaPackage, conda_lock_name, no_pip, pip_lock_name
from envbuild.lock.conda_accelerator import check_conda_accelerator
from envbuild.lock.conda_format import CondaPart, part_of, read, render
from envbuild.lock.format import Lock, changes
from envbuild.lock.lifecycle import LockKind, Resolved, Upgrade
from envbuild.lock.state import package_changes, write_lock_file
from envbuild.names import normalise
from envbuild.progress import Log
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

Solver = Callable[..., tuple[CondaPackage, ...]]


def conda_lock(recipe: LoadedRecipe, target: Target, solver: Solver | None = None) -> LockKind[CondaLock]:
    """Return the kind of lock that holds the target's conda packages and the packages that pip adds.

    `solver` is `conda_solve.solve` (the default) or a function with its signature. Raises UsageError for a recipe
    without conda packages.
    """
    check_has_conda(recipe)
    name = recipe.recipe.name

    def read_target(path: Path) -> CondaLock | None:
        part = (read(path) or {}).get(target.name)
        if part is None:
            return None
        pip = pip_format.read(path.with_name(pip_lock_name(target)))
        # A pip lock for other conda packages makes the whole lock stale.
        digest = part.recipe_digest if _goes_with(part, pip, recipe) else ""
        own = pip or _without_pip(recipe, target)
        return CondaLock(part.recipe, part.target, digest, part.packages, own)

    def resolved(
        environment: Environment, old: CondaLock | None, upgrade: Upgrade, offline: bool, log: Log
    ) -> Resolved[CondaLock]:
        from envbuild.lock import conda_pip, conda_solve

        kept = None if upgrade is None or old is None else without_conda(old, upgrade)
        packages = (solver or conda_solve.solve)(
            recipe, target, environment, keep=kept.packages if kept else (), offline=offline
        )
        check_conda_accelerator(target, packages, str(recipe.path))
        pip = _without_pip(recipe, target)
        if recipe.recipe.conda.requirements:
            found = conda_pip.resolve_pip(
                recipe, target, environment, packages, keep=kept.pip if kept else None, offline=offline
            )  # fmt: skip
            for note in found.notes:
                log(f"note: {note}")
            pip = found.lock
        lock = CondaLock(name, target.name, recipe.conda_digest(target), packages, pip)
        check_stack(recipe, target, conda_versions(lock), log, conda=True)
        count = len(packages) + len(pip.packages)
        return Resolved(lock, f"{count} packages for {target.name}")

    def judge(lock: CondaLock, source: str, log: Log) -> None:
        check_conda_accelerator(target, lock.packages, source)
        check_stack(recipe, target, conda_versions(lock), log, conda=True)

    return LockKind(
        recipe, target, part="conda", name="conda", title="conda lock",
        subject="the recipe or what pip adds", task=f"solving {target.name}",
        file=conda_lock_name(target), digest=recipe.conda_digest(target), read=read_target,
        resolve=resolved, changes=conda_changes, judge=judge,
        warnings=lambda lock: lock.pip.warnings,
        write=lambda path, lock: _write(path, recipe, target, lock),
    )  # fmt: skip


def _goes_with(part: CondaPart, pip: Lock | None, recipe: LoadedRecipe) -> bool:
    if not recipe.recipe.conda.requirements:
        return pip is None and not part.pip_digest
    return pip is not None and pip.digest == part.pip_digest


def _without_pip(recipe: LoadedRecipe, target: Target) -> Lock:
    table = recipe.recipe.targets[target.name]
    return no_pip(
        recipe.recipe.name, target.name, recipe.recipe.python, target.platform(table.glibc), recipe.conda_digest(target)
    )


def check_has_conda(recipe: LoadedRecipe) -> None:
    """Raise UsageError for a recipe without conda packages."""
    if not recipe.recipe.conda.dependencies:
        raise UsageError(
            f"recipe {recipe.recipe.name} has no [conda] packages",
            'add a table to it: [conda] with dependencies = ["numpy 2.2.*"]',
        )


def _write(path: Path, recipe: LoadedRecipe, target: Target, lock: CondaLock) -> None:
    """Replace the target's packages in the file, which keeps those of the other targets."""
    with_pip = bool(recipe.recipe.conda.requirements)
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
