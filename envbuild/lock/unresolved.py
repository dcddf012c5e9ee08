"""Hints for a failed resolution, chosen by the cause in uv's explanation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from envbuild.lock.offers import Offers, ProjectRelease
from envbuild.lock.skipped import allowed_releases
from envbuild.names import normalise
from envbuild.recipe.model import PYTHONS

_NAME = r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?"
_SPECIFIER = r"((?:[<>=!~]=|[<>])\S+)?"
# Wording of uv 0.13, after runs of whitespace are collapsed to one space.
_CAUSES = {
    "unknown": re.compile(_NAME + r" was not found in the (?!cache)"),
    "version": re.compile(r"there (?:is no version|are no versions) of " + _NAME + _SPECIFIER),
    "wheel": re.compile(_NAME + _SPECIFIER + r" (?:has|have) no (?:usable )?wheels"),
    "python": re.compile(r"does not satisfy Python\S+ and " + _NAME + _SPECIFIER + " depends on Python"),
    "range": re.compile(r"only (?:the following versions of )?" + _NAME + _SPECIFIER + " (?:is|are) available"),
}
_NETWORK = re.compile(r"dns error|Connect|timed out|certificate|invalid peer", re.IGNORECASE)
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class FailedResolution:
    """Inputs of a hint in addition to uv's text: target, package sources, and the `command` that locks it.

    `unreached` is true when an index of the recipe was left out; `of_target` holds the target's own
    requirements.
    """

    python: str
    platform: str
    offers: Offers
    command: str
    direct: Sequence[str]
    of_target: Sequence[str]
    unreached: bool
    offline: bool

    def hint(self, stderr: str) -> str:
        """Return the advice that usually cures the failure that uv explains in `stderr`."""
        if self.offline:
            return "resolving needs an index: run it once without --offline, or give pip a find-links folder"
        if _NETWORK.search(stderr):
            return (
                "check the network, pip's index-url, proxy and cert (envbuild reads pip's configuration and "
                "SSL_CERT_FILE), or name a mirror in site.toml"
            )
        cause = next(_causes(stderr, _names(self.direct)), None)
        if cause is None:
            return "loosen or correct the requirement that uv names above"
        kind, name, specifier = cause
        elsewhere = self.unreached and (name in _names(self.of_target) or "+" in specifier)
        if elsewhere and (kind == "unknown" or (kind == "version" and "+" in specifier)):
            return self._index_left_out()
        advice = self._advice(kind, name, specifier)
        return f"{advice}; the index in the note may have more" if elsewhere else advice

    def _index_left_out(self) -> str:
        return (
            f"run `envbuild lock {self.command}` where the index in the note is reached, or name a mirror of it in "
            "site.toml, and commit the lock: it holds everywhere. Wheels that only that index has may also lie in "
            "pip's find-links"
        )

    def _advice(self, kind: str, name: str, specifier: str) -> str:
        if kind == "unknown":
            return (
                f"check the spelling of {name}; if it is on another index, name that in pip's extra-index-url or in "
                "`indexes` of the target"
            )
        releases = self.offers.releases([name])[name]
        usable = [one for one in releases if one.fits(self.python, self.platform)]
        there = f"releases of {name} with a wheel for Python {self.python} on {self.platform}: {_newest(usable)}"
        if kind in ("version", "range"):
            return f"change the requirement of {name}; {there}"
        return f"{self._pythons(name, specifier, releases)}; {there}"

    def _pythons(self, name: str, specifier: str, releases: Sequence[ProjectRelease]) -> str:
        """Return advice on the Pythons that the newest requested release has wheels for."""
        from packaging.requirements import Requirement

        lines = [
            Requirement(text) for text in (*self.direct, name + specifier)
            if normalise(Requirement(text).name) == name
        ]  # fmt: skip
        asked = [
            one for python in (self.python, *PYTHONS)
            for one in allowed_releases(releases, lines, python)
        ]  # fmt: skip
        if not asked:
            return f"change the requirement of {name}"
        newest = max(asked, key=lambda one: one.version)
        pythons = [python for python in PYTHONS if newest.fits(python, self.platform)]
        title = f"{name} {newest.version}"
        if pythons:
            return f"{title} has wheels for Python {', '.join(pythons)}: set `python` in the recipe"
        if any(file.tags for file in newest.files):
            return f"{title} has no wheel for {self.platform}: set `glibc` in the target, or take another release"
        return (
            f"{title} has no wheel: run `pip wheel --no-deps '{name}=={newest.version}'` and name the folder in "
            "pip's find-links"
        )


def without_wheel(stderr: str) -> str | None:
    """Return the requirement (name and versions) that has no wheel according to uv, or None for any other cause."""
    match = _CAUSES["wheel"].search(" ".join(stderr.split()))
    return f"{match[1]}{match[2] or ''}" if match else None


def _causes(stderr: str, direct: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, normalised name, specifier) of each cause, direct requirements first, then all."""
    text = " ".join(stderr.split())
    found = [
        (kind, normalise(match[1]), (match.group(2) if match.re.groups > 1 else "") or "")
        for kind, pattern in _CAUSES.items()
        for match in pattern.finditer(text)
    ]
    yield from (cause for cause in found if cause[1] in direct)
    yield from found


def _names(requirements: Sequence[str]) -> set[str]:
    from envbuild.recipe.checks import requirement_parts

    return {requirement_parts(text)[0] for text in requirements}


def _newest(releases: Sequence[ProjectRelease]) -> str:
    if not releases:
        return "none"
    names = ", ".join(str(one.version) for one in releases[: -_SHOWN - 1 : -1])
    more = f" (the newest of {len(releases)})" if len(releases) > _SHOWN else ""
    return names + more
