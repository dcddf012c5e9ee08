"""Debian base of an image: the suite and packages that a recipe requests, and their lock."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from envbuild.debian.base import resolve_base
from envbuild.debian.defaults import default_packages, default_without, newest_suite, suites_by_python
from envbuild.debian.lock import DebianLock
from envbuild.debian.sources import DebianSuite, archives, debian_client
from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.recipe.model import Recipe
from envbuild.recipe.targets import Target


def resolve_debian(recipe: Recipe, target: Target, environment: Environment) -> DebianLock:
    """Resolve the Debian packages of `recipe` for `target`. Raises LockError.

    With conda packages, Debian's Python is left out; if no suite has the recipe's Python, the newest suite is used.
    """
    known, conda = suites_by_python(), recipe.environment == "conda"
    suite = recipe.image.suite or known.get(recipe.python, newest_suite() if conda else "")
    if not suite:
        has = ", ".join(f"{python} ({name})" for python, name in known.items())
        raise LockError(
            f"no Debian release with Python {recipe.python} is known; known are {has}",
            "choose one of these as `python`, or build on an existing image (`base` in [image])",
        )
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    keyring = environment.site.debian.keyring
    return resolve_base(
        suite,
        [*default_packages(suite, python=not conda), *recipe.image.packages],
        default_without(),
        target.arch,
        archives=site_archives(suite, now, environment),
        client=debian_client(environment.pip, environment.variables),
        blobs=environment.store.blobs,
        keyring=Path(keyring) if keyring else None,
    )


def site_archives(suite: str, date: str, environment: Environment) -> list[DebianSuite]:
    """Return this site's sources for the packages of `suite`, in order; snapshots of `date` come last."""
    site = environment.site.debian
    return archives(suite, date, mirror=site.mirror or None, security_mirror=site.security_mirror or None)
