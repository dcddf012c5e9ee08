"""Locations of the locked conda packages of a plan on this host."""

from __future__ import annotations

from pathlib import Path

from envbuild.environment import Environment
from envbuild.lock.conda import CondaPackage
from envbuild.plan.plan import Plan


def locate_conda(plan: Plan, environment: Environment, *, offline: bool) -> list[tuple[CondaPackage, Path]]:
    """Return the file of each conda package of `plan`, in order, each with its locked sha256.

    Raises BuildError for packages that no source has.
    """
    from envbuild.store.fetch import CondaArchive, fetch_archives

    wanted = [CondaArchive(package.url, package.sha256) for package in plan.conda]
    found = fetch_archives(
        wanted, environment.store, environment.pip, environment.site,
        offline=offline, env=environment.variables,
    )  # fmt: skip
    return [(package, found[archive]) for package, archive in zip(plan.conda, wanted, strict=True)]
