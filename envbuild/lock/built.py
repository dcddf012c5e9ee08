"""Resolution of wheels by `uv pip compile`, and packages whose wheels envbuild builds.

uv chooses the version, reads the metadata of the source archive or asks its build back end (PEP 517) for it, and
reports the commit or the sha256. envbuild adds the archive's sha256, and locks the build requirements: those of
[build-system] and those of the build back end (PEP 517, 518).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from envbuild.base import process
from envbuild.base.errors import BuildError, EnvbuildError, LockError
from envbuild.base.text import normalise
from envbuild.base.toml import toml_key, toml_pairs
from envbuild.cache.http import RequestFailed
from envbuild.environment import Environment
from envbuild.lock.format import BuiltPackage, Lock, wheel_files
from envbuild.lock.offers import Offers, ProjectRelease, allowed_releases, tag_set
from envbuild.recipe.checks import DirectReference, applicable, references, requirement_parts
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import PYTHONS, BuildTable
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.site.pip_config import bound_project
from envbuild.store.archives import WantedArchive, adopt_commit, locate_archive, unpack
from envbuild.store.fetch import WantedWheel, locate_wheels

_NAME = r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?"
_SPECIFIER = r"((?:[<>=!~]=|[<>])\S+)?"
# Wording of uv 0.13, after runs of whitespace are collapsed to one space.
_CAUSES = {
    "unknown": re.compile(_NAME + r"() was not found in the (?!cache)"),
    "version": re.compile(r"there (?:is no version|are no versions) of " + _NAME + _SPECIFIER),
    "wheel": re.compile(_NAME + _SPECIFIER + r" (?:has|have) no (?:usable )?wheels"),
    "python": re.compile(r"does not satisfy Python\S+ and " + _NAME + _SPECIFIER + " depends on Python"),
    "range": re.compile(r"only (?:the following versions of )?" + _NAME + _SPECIFIER + " (?:is|are) available"),
}
_NETWORK = re.compile(r"dns error|Connect|timed out|certificate|invalid peer", re.IGNORECASE)
_BUILD = re.compile(r"Failed to (?:download and )?build `([A-Za-z0-9._-]+)")
# uv names the page of one package, and the chain of causes; the last one is the system's.
_UNREACHED = re.compile(r"Failed to fetch: [`']?(\w+://\S+/)[^/\s`']+/?[`']?$")
_CAUSE = re.compile(r"\s*(?:cause|Caused by): (\S.*)")
_OWN_ADVICE = re.compile(
    r"\nhint: (?:This error likely indicates|`[^`]*` was filtered by `exclude-newer`) .*", re.DOTALL
)
_FILTERED = re.compile(r"hint: `([A-Za-z0-9._-]+)` was filtered by `exclude-newer`")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class UvCompile:
    """Runs of uv with the sources of `offers`, one platform and common constraints; `work` is their folder.

    Packages in `builds` (by normalised name) are resolved from their source archives, all others from wheels.
    """

    work: Path
    offers: Offers
    python: str
    platform: str
    constraints: Sequence[str] = ()
    overrides: Sequence[str] = ()
    stubs: Path | None = None
    builds: Mapping[str, BuildTable] = field(default_factory=dict)

    @property
    def pylock(self) -> Path:
        """PEP 751 file of the last successful run."""
        return self.work / "pylock.toml"

    def run(
        self, requirements: Iterable[str], pins: Iterable[str] = (), preferred: Iterable[LockedPackage] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Resolve `requirements` with `pins` as additional constraints; `preferred` versions win if they fit."""
        work, environment = self.work, self.offers.environment
        self.offers.write_settings(work / "uv.toml")
        with (work / "uv.toml").open("a", encoding="utf-8") as stream:
            stream.write(_build_settings(self.builds))
        lines, bound = list(requirements), self.offers.bound
        own = [line for line in lines if requirement_parts(line)[0] in bound]
        (work / "requirements.in").write_text("\n".join(line for line in lines if line not in own) + "\n")
        (work / "constraints.txt").write_text("\n".join([*self.constraints, *pins]) + "\n")
        # uv prefers the versions in its existing output file.
        rows = [f'[[packages]]\nname = "{package.name}"\nversion = "{package.version}"\n' for package in preferred]
        head = 'lock-version = "1.0"\ncreated-by = "envbuild"\n'
        self.pylock.write_text(head + ("\n".join(rows) or "packages = []\n"))
        command: list[str | Path] = [environment.uv, "pip", "compile", work / "requirements.in"]
        command += ["--config-file", work / "uv.toml", "--constraints", work / "constraints.txt"]
        # No wheel is built, so any interpreter will do; otherwise uv searches the host for one of --python-version.
        command += ["--python", sys.executable, "--python-version", self.python, "--python-platform", self.platform]
        command += ["--only-binary", ":all:", "--format", "pylock.toml", "--output-file", self.pylock]
        command += ["--no-header", "--no-annotate", "--quiet"]
        command += [word for name in self.builds for word in ("--no-binary", name)]
        if own:
            (work / "pyproject.toml").write_text(bound_project(own, bound))
            command.append(work / "pyproject.toml")
        if self.stubs is not None:
            command += ["--find-links", self.stubs.absolute().as_uri()]
            # Builds, which uv isolates from the environment, need the packages themselves.
            named = [stub.name.split("-")[:2] for stub in sorted(self.stubs.glob("*.whl"))]
            (work / "builds.txt").write_text("".join(f"{name}!={version}\n" for name, version in named))
            command += ["--build-constraints", work / "builds.txt"]
        if self.overrides:
            (work / "overrides.txt").write_text("\n".join(self.overrides) + "\n")
            command += ["--overrides", work / "overrides.txt"]
        if self.offers.offline:
            command.append("--offline")
        return process.run(command, env=environment.uv_environment(), cwd=work, check=False)

    def hint(
        self, stderr: str, requirements: Sequence[str], of_target: Sequence[str], command: str, *, unreached: bool
    ) -> str:
        """Return the hint for the resolution failure that uv explains in `stderr`.

        `of_target` are the entries of `requirements` from the target's own table, `command` are the recipe and target
        for `envbuild lock`, and `unreached` is whether an unreachable index of the recipe was left out.
        """
        if self.offers.offline:
            return "resolving needs an index: run it once without --offline, or give pip a find-links folder"
        if "`preview-features`" in stderr:
            return "[exclude_newer_index] of the recipe needs uv 0.12 or later: pip install --upgrade uv"
        if failed := _BUILD.search(stderr):
            return (
                f"name missing build requirements in `requires` of [build.{failed[1]}] of the recipe; if its build "
                "needs the environment's packages, name its requirements in `dependencies` there"
            )
        if _NETWORK.search(stderr):
            return (
                "check the network, pip's index-url, proxy and cert (envbuild reads pip's configuration and "
                "SSL_CERT_FILE), or name a mirror in site.toml"
            )
        cause = _cause(stderr, _names(requirements))
        if cause is None:
            return (
                "loosen or correct the requirement that uv names above; if it is that of a package, and wrong, replace "
                "it in `overrides` of the recipe"
            )
        kind, name, specifier = cause
        elsewhere = unreached and (name in _names(of_target) or "+" in specifier)
        if elsewhere and (kind == "unknown" or (kind == "version" and "+" in specifier)):
            return (
                f"run `envbuild lock {command}` where the index in the note is reached, or name a mirror of it in "
                "site.toml, and commit the lock: it holds everywhere. Wheels that only that index has may also lie in "
                "pip's find-links"
            )
        advice = (
            f"check the spelling of {name}; if it is on another index, name that in pip's extra-index-url or in "
            "`indexes` of the target"
        )
        if kind != "unknown":
            advice = self._advice(kind, name, [*requirements, name + specifier])
        return f"{advice}; the index in the note may have more" if elsewhere else advice

    def _advice(self, kind: str, name: str, requirements: Sequence[str]) -> str:
        releases = self.offers.releases([name])[name]
        usable = [str(release.version) for release in releases if release.fits(self.python, self.platform)]
        newest = ", ".join(usable[: -_SHOWN - 1 : -1]) or "none"
        more = f" (the newest of {len(usable)})" if len(usable) > _SHOWN else ""
        change = f"change the requirement of {name}"
        advice = change if kind in ("version", "range") else self._other_python(name, requirements, releases) or change
        return f"{advice}; releases of {name} with a wheel for Python {self.python} on {self.platform}: {newest}{more}"

    def _other_python(self, name: str, requirements: Sequence[str], releases: Sequence[ProjectRelease]) -> str | None:
        """Return a hint with the Pythons for which the newest requested release has wheels; None without a release."""
        from packaging.requirements import Requirement

        lines = [line for line in map(Requirement, requirements) if normalise(line.name) == name]
        asked = [release for python in (self.python, *PYTHONS) for release in allowed_releases(releases, lines, python)]
        if not asked:
            return None
        newest = max(asked, key=lambda file: file.version)
        pythons = [python for python in PYTHONS if newest.fits(python, self.platform)]
        title = f"{name} {newest.version}"
        if pythons:
            return f"{title} has wheels for Python {', '.join(pythons)}: set `python` in the recipe"
        arch = self.platform.partition("-manylinux")[0]
        if any(newest.fits(python, f"{arch}-manylinux_2_99") for python in PYTHONS):
            return f"{title} has no wheel for {self.platform}: set `glibc` in the target, or take another release"
        if any(file.tags for file in newest.files):
            return f"{title} has no wheel for Python {PYTHONS[0]} to {PYTHONS[-1]} on {arch}: take another release"
        return f'{title} has no wheel: let envbuild build it, with `build = ["{name}"]` in the recipe'


def _build_settings(builds: Mapping[str, BuildTable]) -> str:
    """Return the lines of a uv.toml with the build settings that uv needs to read the metadata of `builds`."""
    if not builds:
        return ""
    lines = ["[extra-build-dependencies]"]
    lines += toml_pairs({name: table.requires for name, table in builds.items()})
    for name, table in builds.items():
        if table.environment:
            lines += [f"[extra-build-variables.{toml_key(name)}]", *toml_pairs(table.environment)]
        if table.dependencies is not None:
            lines += ["[[dependency-metadata]]", *toml_pairs({"name": name, "requires-dist": table.dependencies})]
    return "\n".join(["", *lines, ""])


def explanation(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of uv's explanation of a failure, without advice that applies only to uv projects.

    For an unreachable index, return one line: the index's URL and the last cause.
    """
    done.stderr = _OWN_ADVICE.sub("", done.stderr)
    lines = done.stderr.splitlines()
    index = next((match[1] for line in lines if (match := _UNREACHED.search(line))), "")
    causes = [match[1] for line in lines if (match := _CAUSE.match(line))]
    if index and any("error sending request" in line for line in lines):
        return f"  {index} cannot be reached: {causes[-1]}"
    return process.tail(done)


def filtered_names(stderr: str) -> list[str]:
    """Return the normalised names of the packages of which uv left out files as too new."""
    return [normalise(name) for name in _FILTERED.findall(stderr)]


def without_wheel(stderr: str) -> str | None:
    """Return the requirement (name and versions) that has no wheel according to uv, or None for any other cause."""
    match = _CAUSES["wheel"].search(_one_line(stderr))
    return f"{match[1]}{match[2] or ''}" if match else None


def _one_line(stderr: str) -> str:
    """Return uv's explanation on one line, without the markers of names: rich{sys_platform == 'linux'}==13.7."""
    return re.sub(r"(?<=[\w\]])\{[^{}]*\}", "", " ".join(stderr.split()))


def _cause(stderr: str, direct: set[str]) -> tuple[str, str, str] | None:
    """Return (kind, normalised name, specifier) of the first cause; causes about direct requirements come first."""
    text = _one_line(stderr)
    causes = [(kind, normalise(m[1]), m[2] or "") for kind, pattern in _CAUSES.items() for m in pattern.finditer(text)]
    return min(causes, key=lambda cause: cause[1] not in direct, default=None)


def _names(requirements: Sequence[str]) -> set[str]:
    return {requirement_parts(text)[0] for text in requirements}


@dataclass(frozen=True, slots=True)
class Sources:
    """Direct references among the requirements of a target, and the packages that may be built, by name."""

    recipe: LoadedRecipe
    environment: Environment
    offline: bool
    references: Mapping[str, DirectReference]
    builds: Mapping[str, BuildTable]
    indexes: tuple[str, ...] = ()

    def lines(self, requirements: Iterable[str], python: str, platform: str, kept: Lock | None = None) -> list[str]:
        """Return `requirements` for uv: verified local files replace URLs, and the commits in `kept` replace refs.

        Raises LockError for a file that cannot be fetched.
        """
        from packaging.requirements import Requirement

        commits = {package.name: package for package in kept.built} if kept else {}
        texts = []
        for text in requirements:
            parsed = Requirement(text)
            name = normalise(parsed.name)
            if parsed.url:
                if not applicable([text], python, platform):
                    continue
                parsed.url = self._address(self.references[name], commits.get(name))
                text = str(parsed)
            texts.append(text)
        return texts

    def _address(self, reference: DirectReference, kept: BuiltPackage | None) -> str:
        if reference.kind == "git":
            commit = kept.commit if kept and kept.ref == reference.ref else ""
            served = replace(reference, url=self.environment.site.mirrored(reference.url)[0])
            return served.source(self.recipe.folder, commit or reference.ref)
        if reference.kind == "path":
            return reference.source(self.recipe.folder)
        return self._file(reference).as_uri()

    def published(self, pylock: str) -> str:
        """Return a PEP 751 file in which the URLs of direct references replace the paths of local files."""
        for reference in self.references.values():
            if reference.kind == "url":
                pylock = pylock.replace(
                    f"path = {json.dumps(str(self._file(reference)))}", f"url = {json.dumps(reference.url)}"
                )
        return pylock

    def _file(self, reference: DirectReference) -> Path:
        """Return the local file of the direct reference `reference`. Raises LockError."""
        if not reference.is_wheel:
            return self.archive(WantedArchive(reference.name, "", reference.url, reference.sha256))
        from packaging.utils import parse_wheel_filename

        wheel = WantedWheel(
            reference.name, str(parse_wheel_filename(reference.file_name)[1]), frozenset({reference.sha256})
        )
        url = reference.source(self.recipe.folder)
        try:
            return locate_wheels([wheel], self.environment, bound={reference.name: url}, offline=self.offline)[wheel]
        except EnvbuildError as error:
            raise LockError(error.message, error.hint) from None

    def archive(self, archive_wanted: WantedArchive) -> Path:
        """Fetch the source archive `archive_wanted` into the store, and return its file. Raises LockError."""
        try:
            return locate_archive(archive_wanted, self.environment, offline=self.offline)
        except EnvbuildError as error:
            raise LockError(error.message, error.hint) from None

    def locate(self, row: Mapping[str, Any], kept: Lock | None) -> tuple[BuiltPackage, Path]:
        """Return the package of a PEP 751 row, without its build requirements, and its archive. Raises LockError."""
        name, version = normalise(str(row["name"])), str(row["version"])
        known = (
            next((built_package for built_package in kept.built if built_package.name == name), None) if kept else None
        )
        reference = self.references.get(name)
        if reference is not None and reference.kind == "git":
            commit = str(row["vcs"]["commit-id"])
            sha256 = known.sha256 if known and known.commit == commit else self._commit(reference, commit)
            package = BuiltPackage(name, version, sha256, commit, reference.ref)
        else:
            archive = row.get("archive") or row["sdist"]
            package = BuiltPackage(name, version, str(archive["hashes"]["sha256"]))
        url = reference.source(self.recipe.folder, package.commit) if reference else f"index:{name}"
        return package, self.archive(WantedArchive(name, version, url, package.sha256, indexes=self.indexes))

    def _commit(self, reference: DirectReference, commit: str) -> str:
        of, answers = self.environment, []
        for url in of.site.mirrored(reference.url):
            if self.offline and not url.startswith("file:"):
                continue
            try:
                return adopt_commit(reference.name, url, commit, reference.subdirectory, of.store, of.variables)
            except RequestFailed as error:
                answers.append(str(error))
        raise LockError(
            f"{reference.name}: commit {commit} cannot be fetched" + "".join(f"\n  {answer}" for answer in answers),
            "run it once without --offline" if self.offline else "try `git ls-remote` with the repository's URL",
        )


def sources_of(
    recipe: LoadedRecipe, target: Target, environment: Environment, requirements: Sequence[str], offline: bool
) -> Sources:
    """Return the sources of the packages in [build], and of `requirements` that are direct references."""
    direct, builds = references(requirements), recipe.builds(target, requirements)
    return Sources(recipe, environment, offline, direct, builds, recipe.recipe.targets[target.name].indexes)


def check_used(recipe: LoadedRecipe, target: Target, built: Iterable[BuiltPackage]) -> None:
    """Raise LockError for a package in [build] of the recipe that nothing requires.

    A recipe with both conda packages and requirements is not checked: each of its locks has a part of the packages.
    """
    if recipe.recipe.conda.dependencies and recipe.requirements(target, conda=False):
        return
    known = {package.name for package in built}
    for name, table in recipe.recipe.build.items():
        if table.for_target(target.name) and normalise(name) not in known:
            raise LockError(
                f"{recipe.where_build(normalise(name))}: nothing requires {name!r} for {target.name}",
                "add it to `requirements`, or remove it from `build` (a table may name `targets`)",
            )


def locked_wheels(row: Mapping[str, Any], python: str, platform: str, source: str) -> LockedPackage:
    """Return a package of a PEP 751 file with the hashes of its compatible wheels. Raises LockError if it has none."""
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


# A build of a git repository's files has no history to read the version from: PyPA's setuptools-scm (hatch-vcs and
# others use it), PDM, and OpenStack's pbr read it from these variables.
_VERSION = ("SETUPTOOLS_SCM_PRETEND_VERSION", "PDM_BUILD_SCM_VERSION", "PBR_VERSION")


def build_variables(table: BuildTable, version: str, *, git: bool) -> dict[str, str]:
    """Return the environment variables for a package's build: the recipe's, and for `git` sources its version."""
    return {**(dict.fromkeys(_VERSION, version) if git else {}), **table.environment}


def declared_requirements(
    archive: Path, title: str, table: BuildTable, variables: Mapping[str, str], folder: Path, offers: Offers
) -> list[str]:
    """Return the build requirements of the project in `archive`; `folder` is an empty folder for its files.

    For an isolated build, the back end reports further ones, from a virtual environment with those of [build-system].
    Raises LockError when the back end fails.
    """
    from build import BuildException, ProjectBuilder

    source, runs, environment = folder / "source", list[subprocess.CompletedProcess[str]](), offers.environment
    python = folder / "venv" / "bin" / "python"

    def run(cmd: Sequence[str], cwd: str | None = None, extra_environ: Mapping[str, str] | None = None) -> None:
        env = {**environment.uv_environment(), **variables, **(extra_environ or {})}
        runs.append(process.run(cmd, env=env, cwd=Path(cwd) if cwd else None, check=False))
        runs[-1].check_returncode()

    try:
        unpack(archive, source)
        builder = ProjectBuilder(source, python_executable=os.fspath(python), runner=run)
        static = sorted({*builder.build_system_requires, *table.requires})
        if not table.isolation:  # the back end needs the environment's packages
            return static
        offers.write_settings(folder / "uv.toml")
        uv = [environment.uv, "--quiet", "--config-file", os.fspath(folder / "uv.toml"), "--no-progress"]
        run([*uv, "venv", "--python", sys.executable, os.fspath(folder / "venv")])
        more = ["--offline"] if offers.offline else []
        if static:
            run([*uv, "pip", "install", "--python", os.fspath(python), "--only-binary", ":all:", *more, *static])
        return sorted({*static, *builder.get_requires_for_build("wheel")})
    except BuildError as error:
        raise LockError(f"{title}: {error.message}", error.hint) from None
    except (BuildException, subprocess.CalledProcessError) as error:
        text = process.tail(runs[-1]) if runs and runs[-1].returncode else f"  {error}"
        raise LockError(
            f"{title}: its build requirements cannot be found:\n{text}",
            f"name the missing ones in `requires` of [build.{title.partition(' ')[0]}] of the recipe",
        ) from None


def lock_built(
    sources: Sources,
    rows: Iterable[Mapping[str, Any]],
    uv: UvCompile,
    packages: Sequence[LockedPackage],
    provided: Mapping[str, str],
    keep: Lock | None,
) -> tuple[BuiltPackage, ...]:
    """Return the packages of PEP 751 `rows` that are built from source, each with the wheels of its build tools.

    Builds keep the versions in `keep` and in the environment's `packages` while they fit. A build without isolation
    uses the environment's `packages` and `provided`; wheels of these are left out. Raises LockError.
    """
    built_packages, before = (
        [],
        {built_package.name: built_package.build for built_package in keep.built} if keep else {},
    )
    there = {locked_package.name for locked_package in packages} | provided.keys()
    for number, row in enumerate(rows):
        package, archive = sources.locate(row, keep)
        table, title = sources.builds[package.name], f"{package.name} {package.version}"
        folder = uv.work / f"build-{number}"
        folder.mkdir()
        lines = declared_requirements(
            archive, title, table, build_variables(table, package.version, git=bool(package.commit)), folder, uv.offers
        )
        known = {wheel.name: wheel for wheel in (*packages, *before.get(package.name, ()))}
        wheels = _resolved(lines, tuple(known.values()), uv, title, str(sources.recipe.path))
        own = tuple(wheel for wheel in wheels if table.isolation or wheel.name not in there)
        built_packages.append(replace(package, build=own))
    return tuple(built_packages)


def _resolved(
    lines: Sequence[str], known: tuple[LockedPackage, ...], uv: UvCompile, title: str, source: str
) -> list[LockedPackage]:
    for pins, preferred in (([f"{package.name}=={package.version}" for package in known], ()), ([], known), ([], ())):
        done = uv.run(lines, pins, preferred)
        if done.returncode == 0:
            break
    else:
        raise LockError(
            f"{source}: the build requirements of {title} cannot be resolved:\n{explanation(done)}",
            uv.hint(done.stderr, lines, (), "RECIPE", unreached=False),
        )
    rows = tomllib.loads(uv.pylock.read_text(encoding="utf-8")).get("packages", [])
    wheels = [locked_wheels(row, uv.python, uv.platform, f"{source}: {title} needs for its build") for row in rows]
    return sorted(wheels, key=lambda wheel: wheel.name)
