"""The conda lock of a target.

A target's lock consists of two files: its conda packages in `<accelerator>.conda-lock.yml`, together with those of
the accelerator's other targets, and the packages that pip adds in `<target>.conda.requirements.txt`. The first file
holds the digest of the second, so that a run killed between the two writes is detected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from envbuild.base.atomic import folder_lock
from envbuild.base.errors import LockError, UsageError
from envbuild.base.packages import described, pack
from envbuild.base.progress import Log
from envbuild.base.text import normalise
from envbuild.data import load_table
from envbuild.environment import Environment
from envbuild.lock import conda_format
from envbuild.lock import format as pip_format
from envbuild.lock.conda import CondaLock, CondaPackage
from envbuild.lock.format import Lock
from envbuild.lock.judge import check_conda_accelerator, check_stack
from envbuild.lock.lifecycle import (
    LockKind,
    Resolved,
    Upgrade,
    kept_time,
    package_changes,
    read_lock_file,
    write_lock_file,
)
from envbuild.lock.offers import ReleaseAges, release_ages
from envbuild.lock.resolve import resolve
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

# In the local part of a version (PEP 440): no index has such a version, and uv's explanations name conda.
_LOCAL = "conda"
Solver = Callable[..., tuple[CondaPackage, ...]]


def conda_lock(recipe: LoadedRecipe, target: Target, solver: Solver | None = None) -> LockKind[CondaLock]:
    """Return the LockKind of the target's conda packages and of the packages that pip adds.

    `solver` has the signature of `conda_solve.solve`, the default. Raises UsageError without conda packages.
    """
    check_has_conda(recipe)
    name, digest = recipe.recipe.name, recipe.conda_digest(target)
    platform = target.platform(recipe.recipe.targets[target.name].glibc)
    no_pip = Lock(name, target.name, recipe.recipe.python, platform, digest, ())
    with_pip = bool(recipe.recipe.conda.requirements)
    pip_name = f"{target.name}.conda.requirements.txt"

    def read_target(path: Path) -> CondaLock | None:
        part = (read_lock_file(path, conda_format.parse) or {}).get(target.name)
        if part is None:
            return None
        pip = pip_format.read(path.with_name(pip_name))
        # A pip lock for other conda packages makes the whole lock stale.
        fits = (pip is not None) == with_pip and (pip.digest if pip else "") == part.pip_digest
        of_recipe = part.recipe_digest if fits else ""
        return CondaLock(part.recipe, part.target, of_recipe, part.packages, pip or no_pip, part.as_of)

    def resolved(
        environment: Environment, old: CondaLock | None, upgrade: Upgrade, offline: bool, log: Log
    ) -> Resolved[CondaLock]:
        from envbuild.lock import conda_solve

        ages = release_ages(recipe, target, kept_time(old, digest, upgrade))
        for note in ages.notes():
            log(note)
        kept = None if upgrade is None or old is None else without_conda(old, upgrade)
        solve = solver or conda_solve.solve
        keeping = kept.packages if kept else ()
        packages = solve(recipe, target, environment, ages=ages, keep=keeping, offline=offline, log=log)
        check_conda_accelerator(target, packages, str(recipe.path))
        pip = no_pip
        if with_pip:
            keep = kept.pip if kept else None
            of_pip = resolve_pip(recipe, target, environment, packages, ages=ages, keep=keep, offline=offline)
            for note in of_pip.notes:
                log(note)
            pip = of_pip.lock
        lock = CondaLock(name, target.name, digest, packages, pip, ages.kept)
        check_stack(recipe, target, lock.versions, log, conda=True)
        return Resolved(lock, f"{len(packages) + len(pip.packages)} packages for {target.name}", limits=ages.notes())

    def judge(lock: CondaLock, source: str, log: Log) -> None:
        check_conda_accelerator(target, lock.packages, source)
        check_stack(recipe, target, lock.versions, log, conda=True)

    def write(path: Path, lock: CondaLock) -> None:
        """Replace the target's packages in the file, and keep the packages of other targets."""
        part = conda_format.part_of(lock, recipe.recipe.conda.channels, lock.pip.digest if with_pip else "")
        beside = path.with_name(pip_name)
        with contextlib.ExitStack() as held:
            # Another target's run may write the same file at the same time.
            with contextlib.suppress(OSError):
                held.enter_context(folder_lock(path.parent))
            others = read_lock_file(path, conda_format.parse) or {}
            known = recipe.recipe.targets
            parts = {key: other for key, other in others.items() if other.recipe == name and key in known}
            if with_pip:
                write_lock_file(beside, pip_format.render(lock.pip))
            write_lock_file(path, conda_format.render({**parts, target.name: part}.values()))
            if not with_pip:
                with contextlib.suppress(OSError):
                    beside.unlink()

    # conda-lock.yml has one set of packages per platform, so CPU and CUDA targets need separate files. micromamba
    # requires the suffix `conda-lock.yml`.
    return LockKind(
        recipe,
        target,
        "conda",
        f"{target.accelerator}.conda-lock.yml",
        digest,
        read=read_target,
        resolve=resolved,
        changes=conda_changes,
        write=write,
        judge=judge,
        warnings=lambda lock: lock.pip.warnings,
    )


def check_has_conda(recipe: LoadedRecipe) -> None:
    """Raise UsageError for a recipe without conda packages."""
    if not recipe.recipe.conda.dependencies:
        raise UsageError(
            f"recipe {recipe.recipe.name} has no [conda] packages",
            'add a table to it: [conda] with dependencies = ["numpy 2.2.*"]',
        )


def without_conda(lock: CondaLock, names: Collection[str]) -> CondaLock:
    """Return `lock` without the packages `names`, so that they may change. Raises LockError for an unknown package."""
    unknown = sorted(name for name in names if not lock.knows(name))
    if unknown:
        raise LockError(
            f"--upgrade: {', '.join(unknown)} is not in the conda lock of {lock.recipe} ({lock.target})",
            f"locked are: {', '.join(sorted(lock.versions))}",
        )
    conda, pip = {name.lower() for name in names}, {normalise(name) for name in names}
    packages = tuple(p for p in lock.packages if p.name not in conda)
    added = replace(lock.pip, packages=tuple(p for p in lock.pip.packages if p.name not in pip))
    return replace(lock, packages=packages, pip=added)


def conda_changes(old: CondaLock | None, new: CondaLock) -> list[str]:
    """Return the changes of an update, one line per package: conda packages by name, then pip packages by name."""
    lines = package_changes(
        {p.name: p for p in old.packages} if old else {},
        {p.name: p for p in new.packages},
        lambda p: f"{p.version} {p.build}",
        lambda was, now: "" if was.sha256 == now.sha256 else " (another file)",
    )
    return lines + [f"{line} (pip)" for line in pip_format.changes(old.pip if old else None, new.pip)]


def provided(packages: Iterable[CondaPackage]) -> dict[str, str]:
    """Return the Python distributions in conda packages: normalised name → version with `+conda`.

    A package contains a distribution when it depends on Python. The distribution has the package's name, except
    for the names in data/conda.toml. Versions that are invalid under PEP 440 are left out.
    """
    from packaging.version import Version

    names = load_table("conda")["distributions"]
    versions: dict[str, str] = {}
    for package in packages:
        distribution = normalise(names.get(package.name, package.name))
        if distribution and not {"python", "python_abi"}.isdisjoint(package.needs):
            with contextlib.suppress(ValueError):
                version = Version(package.version)
                versions[distribution] = f"{version.public}+{version.local + '.' if version.local else ''}{_LOCAL}"
    return versions


def resolve_pip(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    packages: Iterable[CondaPackage],
    *,
    ages: ReleaseAges,
    keep: Lock | None = None,
    offline: bool = False,
) -> Resolved[Lock]:
    """Return the packages that pip adds to `packages` for the requirements in [conda].

    Files that are newer than `ages` allows are left out. Versions in `keep` are kept while they fit. A distribution in
    a conda package is never taken from an index. Raises LockError with uv's explanation when the requirements conflict
    with the conda packages.
    """
    there = provided(packages)
    with environment.temporary_folder("conda-pip-") as stubs:
        for name, version in there.items():
            _stub(stubs, name, version)
        try:
            return resolve(
                recipe,
                target,
                environment,
                recipe.recipe.conda.requirements,
                recipe.conda_digest(target),
                ages=ages,
                provided=there,
                stubs=stubs,
                keep=keep,
                offline=offline,
            )
        except LockError as error:
            if f"+{_LOCAL}" not in error.message and f".{_LOCAL}" not in error.message:
                raise
            raise LockError(
                error.message + f"\n  note: versions with +{_LOCAL} are those of the conda packages",
                "change the requirement in [conda], or the version of the conda package",
            ) from None


def _stub(folder: Path, name: str, version: str) -> None:
    """Write a wheel that holds only its name and version (wheel format 1.0, core metadata 2.1)."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / f"{stem}-py3-none-any.whl").write_bytes(pack(described((), f"{stem}.dist-info", metadata)))
