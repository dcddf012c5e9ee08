"""Newer releases without a wheel that a lock skips: a warning, or an error when the lock is years behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from envbuild.errors import LockError
from envbuild.lock.offers import Offers, ProjectRelease
from envbuild.names import normalise

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_TOO_OLD = timedelta(days=2 * 365)


@dataclass(frozen=True, slots=True)
class SkippedRelease:
    """A newer release that was skipped: `chosen` is locked although `newest` is allowed.

    `without_wheel` is the requirement without a wheel: `newest` itself or a dependency of it.
    """

    name: str
    chosen: ProjectRelease
    newest: ProjectRelease
    without_wheel: str

    @property
    def own(self) -> bool:
        """Whether `newest` itself has no wheel, rather than a dependency of it."""
        return self.without_wheel == _pin(self.name, self.newest)

    @property
    def too_old(self) -> bool:
        """Whether the locked release is over two years older; False if an upload time is unknown."""
        if self.chosen.uploaded is None or self.newest.uploaded is None:
            return False
        return self.newest.uploaded - self.chosen.uploaded > _TOO_OLD

    def text(self, where: str) -> str:
        """Return a description of the skipped release and the reason; `where` is the target's Python and platform."""
        subject = self.newest.version if self.own else f"it needs {self.without_wheel}, which"
        return (
            f"{self.name} {self.chosen} is locked instead of {self.newest}: {subject} has no wheel"
            f" for {where}, and envbuild locks wheels only"
        )

    @property
    def hint(self) -> str:
        """Advice for the user."""
        return (
            f"pin {self.name} to the version that you want ({_pin(self.name, self.chosen)} keeps the locked one), or "
            f"run `pip wheel --no-deps '{self.without_wheel}'` and name the folder in pip's find-links"
        )


def skipped_releases(
    requirements: Iterable[str],
    constraints: Iterable[str],
    locked: Mapping[str, str],
    offers: Offers,
    python: str,
    platform: str,
    without_wheel: Callable[[str], str | None],
) -> list[SkippedRelease]:
    """Return the direct requirements whose newest allowed release is not `locked` because of a missing wheel.

    `locked` maps names to versions. `without_wheel` resolves one requirement alone and returns the requirement
    that has no wheel, or None: a release with a wheel may depend on one that has none.
    """
    from packaging.version import Version

    limits = _by_name(constraints, python, platform)
    wanted = {
        name: [*lines, *limits.get(name, ())]
        for name, lines in _by_name(requirements, python, platform).items()
        if name in locked
    }
    open_ended = [name for name, lines in wanted.items() if not any(map(_is_pin, lines))]
    releases = offers.releases(open_ended)
    found = []
    for name in open_ended:
        lines, version = wanted[name], Version(locked[name])
        allowed = allowed_releases(releases[name], lines, python)
        newer = [release for release in allowed if release.version > version]
        fitting = [release for release in newer if release.fits(python, platform)]
        if not newer:
            continue
        newest = (fitting or newer)[-1]
        cause: str | None = _pin(name, newest)
        if fitting:
            cause = without_wheel(_pin(name, newest, lines[0].extras))
        if cause is not None:
            chosen = next((one for one in releases[name] if one.version == version), ProjectRelease(version, ()))
            found.append(SkippedRelease(name, chosen, newest, cause))
    return found


def warnings_of(skipped: Sequence[SkippedRelease], source: str, where: str) -> tuple[str, ...]:
    """Return a warning for each of `skipped`; `source` is the recipe and target in the message.

    Raises LockError when a locked release is over two years older than the newest one.
    """
    old = [one for one in skipped if one.too_old]
    if old:
        hints = [one.hint for one in old]
        if any(one.own for one in old):
            hints.append('or build it from source as a layer ([layers], system = "wheel")')
        raise LockError(
            f"{source}: releases without wheels would be replaced by ones over two years older:"
            + "".join(f"\n  {one.text(where)}" for one in old),
            "; ".join(hints),
        )
    return tuple(f"{one.text(where)}; {one.hint}" for one in skipped)


def allowed_releases(
    releases: Iterable[ProjectRelease], lines: Sequence[Requirement], python: str
) -> list[ProjectRelease]:
    """Return the `releases` that all of `lines` allow and that support `python`, with or without a wheel.

    As in uv, pre-releases count only if a line names one or if there is no other release.
    """
    from packaging.specifiers import SpecifierSet

    specifier = SpecifierSet()
    for line in lines:
        specifier &= line.specifier
    fitting = [
        release for release in releases
        if release.accepts(python) and specifier.contains(release.version, prereleases=True)
    ]  # fmt: skip
    if specifier.prereleases:
        return fitting
    return [one for one in fitting if not one.version.is_prerelease] or fitting


def _by_name(lines: Iterable[str], python: str, platform: str) -> dict[str, list[Requirement]]:
    """Return the requirements whose markers hold on the target, by normalised name."""
    from packaging.requirements import Requirement

    variables = {
        "python_version": python, "python_full_version": f"{python}.0",
        "implementation_name": "cpython", "platform_python_implementation": "CPython",
        "os_name": "posix", "sys_platform": "linux", "platform_system": "Linux",
        "platform_machine": platform.partition("-")[0], "extra": "",
    }  # fmt: skip
    found: dict[str, list[Requirement]] = {}
    for text in lines:
        line = Requirement(text)
        if line.marker is None or line.marker.evaluate(variables):
            found.setdefault(normalise(line.name), []).append(line)
    return found


def _is_pin(line: Requirement) -> bool:
    """Return whether `line` allows only one version, so that there is no newer release to look for."""
    return any(one.operator in ("==", "===") and not one.version.endswith("*") for one in line.specifier)


def _pin(name: str, release: ProjectRelease, extras: Iterable[str] = ()) -> str:
    chosen = ",".join(sorted(extras))
    return f"{name}[{chosen}]=={release.version}" if chosen else f"{name}=={release.version}"
