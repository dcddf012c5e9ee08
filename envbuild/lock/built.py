"""Packages whose wheels envbuild builds: their lines for uv's resolution, and what a lock holds of them.

uv chooses the version, reads the metadata of the source archive or asks its build back end (PEP 517) for it, and names
the commit or the sha256. envbuild adds the archive's sha256, and locks the wheels that the build runs.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from envbuild.base.errors import EnvbuildError, LockError
from envbuild.base.text import normalise
from envbuild.cache.http import RequestFailed
from envbuild.environment import Environment
from envbuild.lock.format import BuiltPackage, Lock
from envbuild.lock.offers import applicable, tag_set
from envbuild.recipe.checks import DirectReference, references
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import BuildTable
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.store.archives import WantedArchive, adopt_commit, locate_archive
from envbuild.store.fetch import WantedWheel, locate_wheels


@dataclass(frozen=True, slots=True)
class Sources:
    """The direct references among the requirements of a target, and the packages that may be built, by name."""

    recipe: LoadedRecipe
    environment: Environment
    offline: bool
    references: Mapping[str, DirectReference]
    builds: Mapping[str, BuildTable]
    indexes: tuple[str, ...] = ()

    def lines(self, requirements: Iterable[str], python: str, platform: str, kept: Lock | None = None) -> list[str]:
        """Return `requirements` as uv reads them: with verified files instead of URLs, and the commits of `kept`.

        Raises LockError for a file that cannot be fetched.
        """
        from packaging.requirements import Requirement

        commits = {one.name: one for one in kept.built} if kept else {}
        found = []
        for text in requirements:
            parsed = Requirement(text)
            name = normalise(parsed.name)
            if parsed.url:
                if not applicable([text], python, platform):
                    continue
                parsed.url = self._address(self.references[name], commits.get(name))
                text = str(parsed)
            found.append(text)
        return found

    def _address(self, one: DirectReference, kept: BuiltPackage | None) -> str:
        if one.kind == "git":
            commit = kept.commit if kept and kept.ref == one.ref else ""
            url = f"git+{self.environment.site.mirrored(one.url)[0]}" + (
                f"@{commit or one.ref}" if one.ref or commit else ""
            )
            return url + (f"#subdirectory={one.subdirectory}" if one.subdirectory else "")
        if one.kind == "path":
            return one.source(self.recipe.folder)
        return self._file(one).as_uri()

    def published(self, pylock: str) -> str:
        """Return a PEP 751 file with the URLs of direct references instead of this host's files."""
        for one in self.references.values():
            if one.kind == "url":
                pylock = pylock.replace(f"path = {json.dumps(str(self._file(one)))}", f"url = {json.dumps(one.url)}")
        return pylock

    def _file(self, one: DirectReference) -> Path:
        """Return the file that `one` refers to. Raises LockError."""
        if not one.is_wheel:
            return self.archive(WantedArchive(one.name, "", one.url, one.sha256))
        from packaging.utils import parse_wheel_filename

        wanted = WantedWheel(one.name, str(parse_wheel_filename(one.file_name)[1]), frozenset({one.sha256}))
        of, url = self.environment, one.source(self.recipe.folder)
        try:
            return locate_wheels(
                [wanted],
                of.store,
                of.pip,
                of.site,
                (),
                bound={one.name: url},
                offline=self.offline,
                env=of.variables,
                default_index=of.default_index,
            )[wanted]
        except EnvbuildError as error:
            raise LockError(error.message, error.hint) from None

    def archive(self, wanted: WantedArchive) -> Path:
        """Return the source archive `wanted`. Raises LockError."""
        of = self.environment
        try:
            return locate_archive(
                wanted,
                of.store,
                of.pip,
                of.site,
                offline=self.offline,
                env=of.variables,
                default_index=of.default_index,
            )
        except EnvbuildError as error:
            raise LockError(error.message, error.hint) from None

    def locate(self, row: Mapping[str, Any], kept: Lock | None) -> tuple[BuiltPackage, Path]:
        """Return the package of a PEP 751 row, without its build requirements, and its archive. Raises LockError."""
        name, version = normalise(str(row["name"])), str(row["version"])
        known = next((one for one in kept.built if one.name == name), None) if kept else None
        reference = self.references.get(name)
        if reference is not None and reference.kind == "git":
            commit = str(row["vcs"]["commit-id"])
            sha256 = known.sha256 if known and known.commit == commit else self._commit(reference, commit)
            found = BuiltPackage(name, version, sha256, commit, reference.ref)
        else:
            archive = row.get("archive") or row["sdist"]
            found = BuiltPackage(name, version, str(archive["hashes"]["sha256"]))
        url = reference.source(self.recipe.folder, found.commit) if reference else f"index:{name}"
        return found, self.archive(WantedArchive(name, version, url, found.sha256, indexes=self.indexes))

    def _commit(self, one: DirectReference, commit: str) -> str:
        of, answers = self.environment, []
        for url in of.site.mirrored(one.url):
            if self.offline and not url.startswith("file:"):
                continue
            try:
                return adopt_commit(one.name, url, commit, one.subdirectory, of.store, of.variables)
            except RequestFailed as error:
                answers.append(str(error))
        raise LockError(
            f"{one.name}: commit {commit} cannot be fetched" + "".join(f"\n  {answer}" for answer in answers),
            "run it once without --offline" if self.offline else "try `git ls-remote` with the repository's URL",
        )


def sources_of(
    recipe: LoadedRecipe, target: Target, environment: Environment, requirements: Sequence[str], offline: bool
) -> Sources:
    """Return the sources of packages among `requirements` that no index has as wheels, and of those in [build]."""
    direct, builds = references(requirements), recipe.builds(target)
    builds |= {name: recipe.build_table(name) for name, one in direct.items() if not one.is_wheel}
    return Sources(recipe, environment, offline, direct, builds, recipe.recipe.targets[target.name].indexes)


def check_used(recipe: LoadedRecipe, target: Target, built: Iterable[BuiltPackage]) -> None:
    """Raise LockError for a package in [build] of the recipe that nothing requires.

    Of a recipe with conda packages and requirements, each lock has a part of the packages: there is no error.
    """
    if recipe.recipe.conda.dependencies and recipe.requirements(target, conda=False):
        return
    known = {one.name for one in built}
    for name, table in recipe.recipe.build.items():
        if table.for_target(target.name) and normalise(name) not in known:
            raise LockError(
                f"{recipe.where_build(normalise(name))}: nothing requires {name!r} for {target.name}",
                "add it to `requirements`, or take it out of `build` (a table may name `targets`)",
            )


def wheel_files(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the files of a PEP 751 row: the wheels of an index, or the one that a requirement refers to."""
    return [row["archive"]] if "archive" in row else list(row.get("wheels", []))


def locked_wheels(row: Mapping[str, Any], python: str, platform: str, source: str) -> LockedPackage:
    """Return a package of a PEP 751 file with the hashes of its wheels that fit. Raises LockError without one."""
    from packaging.utils import parse_wheel_filename

    hashes: set[str] = set()
    for wheel in wheel_files(row):
        file_name = unquote(str(wheel.get("name") or wheel.get("url") or wheel.get("path")).rpartition("/")[2])
        with contextlib.suppress(ValueError):
            fits = parse_wheel_filename(re.split("[#?]", file_name)[0])[3] & tag_set(python, platform)
            digest = wheel.get("hashes", {}).get("sha256")
            if fits and digest:
                hashes.add(str(digest))
    if not hashes:
        raise LockError(
            f"{source}: {row['name']}=={row.get('version', '?')} has no wheel with a sha256"
            f" for python {python} on {platform}",
            "pin a version that publishes such a wheel, or serve one from your index or find-links",
        )
    return LockedPackage(normalise(row["name"]), str(row["version"]), tuple(sorted(hashes)))
