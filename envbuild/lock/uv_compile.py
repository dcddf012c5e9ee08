"""Runs of `uv pip compile` for one target, and hints for failed ones, chosen by the cause in uv's explanation."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.base import process
from envbuild.base.text import normalise
from envbuild.base.toml import toml_key, toml_pairs
from envbuild.lock.offers import Offers, ProjectRelease, allowed_releases
from envbuild.recipe.checks import requirement_parts
from envbuild.recipe.model import PYTHONS, BuildTable
from envbuild.recipe.sources import LockedPackage
from envbuild.site.uv_config import bound_project

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
_OWN_ADVICE = re.compile(r"\nhint: This error likely indicates .*", re.DOTALL)
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class UvCompile:
    """Runs of uv that share `offers`' sources, platform and constraints; their files are in the folder `work`.

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
        environment.write_uv_settings(work / "uv.toml", self.offers.indexes)
        with (work / "uv.toml").open("a", encoding="utf-8") as stream:
            stream.write(_build_settings(self.builds))
        lines, bound = list(requirements), self.offers.bound
        own = [line for line in lines if requirement_parts(line)[0] in bound]
        (work / "requirements.in").write_text("\n".join(line for line in lines if line not in own) + "\n")
        (work / "constraints.txt").write_text("\n".join([*self.constraints, *pins]) + "\n")
        # uv prefers the versions in its existing output file.
        rows = [f'[[packages]]\nname = "{one.name}"\nversion = "{one.version}"\n' for one in preferred]
        head = 'lock-version = "1.0"\ncreated-by = "envbuild"\n'
        self.pylock.write_text(head + ("\n".join(rows) or "packages = []\n"))
        command: list[str | Path] = [
            environment.uv,
            "pip",
            "compile",
            work / "requirements.in",
            "--config-file",
            work / "uv.toml",
            "--constraints",
            work / "constraints.txt",
            # No wheel is built, so any interpreter will do; otherwise uv searches the host for one of --python-version.
            "--python",
            sys.executable,
            "--python-version",
            self.python,
            "--python-platform",
            self.platform,
            "--only-binary",
            ":all:",
            "--format",
            "pylock.toml",
            "--output-file",
            self.pylock,
            "--no-header",
            "--no-annotate",
            "--quiet",
            *(word for name in self.builds for word in ("--no-binary", name)),
        ]
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
        """Return the advice that usually cures the failure that uv explains in `stderr`.

        `of_target` are those of `requirements` that the target itself has, `command` are the recipe and target for
        `envbuild lock`, and `unreached` is whether an index of the recipe was left out.
        """
        if self.offers.offline:
            return "resolving needs an index: run it once without --offline, or give pip a find-links folder"
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
            return "loosen or correct the requirement that uv names above"
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
        usable = [str(one.version) for one in releases if one.fits(self.python, self.platform)]
        newest = ", ".join(usable[: -_SHOWN - 1 : -1]) or "none"
        more = f" (the newest of {len(usable)})" if len(usable) > _SHOWN else ""
        change = f"change the requirement of {name}"
        advice = change if kind in ("version", "range") else self._other_python(name, requirements, releases) or change
        return f"{advice}; releases of {name} with a wheel for Python {self.python} on {self.platform}: {newest}{more}"

    def _other_python(self, name: str, requirements: Sequence[str], releases: Sequence[ProjectRelease]) -> str | None:
        """Return advice on the Pythons for which the newest requested release has wheels, None without a release."""
        from packaging.requirements import Requirement

        lines = [line for line in map(Requirement, requirements) if normalise(line.name) == name]
        asked = [one for python in (self.python, *PYTHONS) for one in allowed_releases(releases, lines, python)]
        if not asked:
            return None
        newest = max(asked, key=lambda one: one.version)
        pythons = [python for python in PYTHONS if newest.fits(python, self.platform)]
        title = f"{name} {newest.version}"
        if pythons:
            return f"{title} has wheels for Python {', '.join(pythons)}: set `python` in the recipe"
        if any(file.tags for file in newest.files):
            return f"{title} has no wheel for {self.platform}: set `glibc` in the target, or take another release"
        return f'{title} has no wheel: let envbuild build it, with `build = ["{name}"]` in the recipe'


def _build_settings(builds: Mapping[str, BuildTable]) -> str:
    """Return lines of a uv.toml for the metadata of `builds`."""
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
    """Return the end of uv's explanation of a failure, without its advice on projects of its own.

    Of an index that cannot be reached, it is one line: its URL without the package, and the last cause.
    """
    done.stderr = _OWN_ADVICE.sub("", done.stderr)
    lines = done.stderr.splitlines()
    index = next((found[1] for line in lines if (found := _UNREACHED.search(line))), "")
    causes = [found[1] for line in lines if (found := _CAUSE.match(line))]
    if index and any("error sending request" in line for line in lines):
        return f"  {index} cannot be reached: {causes[-1]}"
    return process.tail(done)


def without_wheel(stderr: str) -> str | None:
    """Return the requirement (name and versions) that has no wheel according to uv, or None for any other cause."""
    match = _CAUSES["wheel"].search(" ".join(stderr.split()))
    return f"{match[1]}{match[2] or ''}" if match else None


def _cause(stderr: str, direct: set[str]) -> tuple[str, str, str] | None:
    """Return (kind, normalised name, specifier) of the first cause, if possible one of a direct requirement."""
    text = " ".join(stderr.split())
    found = [(kind, normalise(m[1]), m[2] or "") for kind, pattern in _CAUSES.items() for m in pattern.finditer(text)]
    return min(found, key=lambda cause: cause[1] not in direct, default=None)


def _names(requirements: Sequence[str]) -> set[str]:
    return {requirement_parts(text)[0] for text in requirements}
