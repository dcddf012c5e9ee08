"""Resolver of a recipe's requirements for one target: uv, on a host of any platform."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envbuild import process
from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.lock.accelerator import check_accelerator
from envbuild.lock.format import Lock, LockedPackage
from envbuild.lock.nccl import check_override, free_of, nccl_override
from envbuild.lock.offers import Offers, tag_set
from envbuild.lock.skipped import skipped_releases, warnings_of
from envbuild.lock.unresolved import FailedResolution, without_wheel
from envbuild.lock.uv_compile import UvCompile
from envbuild.names import normalise
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target


@dataclass(frozen=True, slots=True)
class Resolution:
    """New lock, the same resolution as PEP 751 text, and notes for the user."""

    lock: Lock
    pylock: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResolveRequest:
    """Input of a resolution: requirements, constraints, and `digest`, the recipe_digest of the new lock.

    `provided` maps distributions that another installer provides to their versions; `stubs` is the folder with
    stub wheels for them. They take part in the resolution but are not in the lock. `overrides` replace the
    requirements of packages.
    """

    requirements: tuple[str, ...]
    constraints: tuple[str, ...]
    digest: str
    provided: Mapping[str, str] = field(default_factory=dict)
    stubs: Path | None = None
    overrides: tuple[str, ...] = ()


def resolve(
    recipe: LoadedRecipe, target: Target, environment: Environment, *, keep: Lock | None = None, offline: bool = False
) -> Resolution:
    """Resolve `target` of `recipe`; versions pinned in `keep` are preferred while they fit.

    Raises LockError with uv's explanation when no packages satisfy the requirements, when a package has no
    fitting wheel with a sha256, when the result is for another accelerator than the target's, or when
    [layers.nccl] cannot replace torch's NCCL.
    """
    table = recipe.recipe.targets[target.name]
    wanted = ResolveRequest(
        (*recipe.recipe.requirements, *table.requirements), recipe.recipe.constraints, recipe.resolution_digest(target)
    )
    override = nccl_override(recipe, target)
    if override is not None:
        # Only a resolution tells which NCCL torch pins, whatever torch's version and index.
        before = free_of(keep, target)
        pinned = resolve_wanted(wanted, recipe, target, environment, keep=before, offline=offline)
        check_override(recipe, target, pinned.lock)
        wanted = replace(wanted, overrides=(override,))
        keep = free_of(pinned.lock, target)
    return resolve_wanted(wanted, recipe, target, environment, keep=keep, offline=offline)


def resolve_wanted(
    wanted: ResolveRequest,
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    keep: Lock | None = None,
    offline: bool = False,
) -> Resolution:
    """Resolve `wanted` for `target` as `resolve` does, with the target's indexes."""
    table = recipe.recipe.targets[target.name]
    python, platform = recipe.recipe.python, target.platform(table.glibc)
    indexes, notes = _reachable(table.indexes, environment, offline)
    offers = Offers(environment, indexes, offline)
    fixed = [f"{name}=={version}" for name, version in wanted.provided.items()]
    with tempfile.TemporaryDirectory(prefix="envbuild-lock-") as folder:
        uv = UvCompile(
            Path(folder), environment, indexes, python, platform, [*wanted.constraints, *fixed],
            wanted.overrides, wanted.stubs, offline,
        )  # fmt: skip
        for pins, preferred in _ways_to_keep(keep):
            done = uv.run(wanted.requirements, pins, preferred)
            if done.returncode == 0:
                break
        if done.returncode != 0:
            failed = FailedResolution(
                python, platform, offers, f"{recipe.recipe.name} --target {target.name}",
                wanted.requirements, table.requirements, bool(notes), offline,
            )  # fmt: skip
            raise LockError(
                f"{recipe.path}: target {target.name} cannot be resolved:\n{process.tail(done)}"
                + "".join(f"\n  note: {note}" for note in notes),
                failed.hint(done.stderr),
            )
        text = uv.pylock.read_text(encoding="utf-8")
        resolved = tomllib.loads(text)
        resolved["packages"] = [
            package for package in resolved.get("packages", [])
            if normalise(package["name"]) not in wanted.provided
        ]  # fmt: skip
        skipped = skipped_releases(
            wanted.requirements, wanted.constraints,
            {normalise(package["name"]): package["version"] for package in resolved["packages"]},
            offers, python, platform, lambda line: without_wheel(uv.run([line]).stderr),
        )  # fmt: skip
    files = list(_fitting_files(resolved, python, platform, str(recipe.path)))
    lock = Lock(
        recipe=recipe.recipe.name,
        target=target.name,
        python=python,
        platform=platform,
        recipe_digest=wanted.digest,
        packages=tuple(files),
        warnings=warnings_of(skipped, f"{recipe.path}: target {target.name}", f"Python {python} on {platform}"),
    )
    check_accelerator(target, lock.packages, str(recipe.path))
    return Resolution(lock, text, tuple(notes))


def without(lock: Lock, names: Iterable[str]) -> Lock:
    """Return `lock` without `names`: the remaining versions are preferred, the named packages may change.

    Raises LockError when a name is not in the lock.
    """
    moving = {normalise(name) for name in names}
    unknown = moving - {package.name for package in lock.packages}
    if unknown:
        known = ", ".join(package.name for package in lock.packages)
        raise LockError(
            f"--upgrade: {', '.join(sorted(unknown))} is not in the lock of {lock.recipe} ({lock.target})",
            f"locked are: {known}",
        )
    return replace(lock, packages=tuple(p for p in lock.packages if p.name not in moving))


def _reachable(indexes: Sequence[str], environment: Environment, offline: bool) -> tuple[list[str], list[str]]:
    """Return the URLs of the indexes that answer, and a note for each index that does not.

    The URL is that of the index's first mirror that answers. When `offline`, no index is probed.
    """
    if offline:
        return [], [f"offline: {index} was not asked" for index in indexes]
    answering: list[str] = []
    notes: list[str] = []
    for index in indexes:
        refusals: list[str] = []
        for candidate in environment.site.mirrored(index):
            refusal = environment.probe(candidate)
            if refusal is None:
                answering.append(candidate)
                break
            refusals.append(refusal)
        else:
            notes.append(f"index {index} cannot be reached and was left out: {'; '.join(refusals)}")
    return answering, notes


def _ways_to_keep(keep: Lock | None) -> list[tuple[list[str], tuple[LockedPackage, ...]]]:
    """Return (constraints, preferences) to try in turn: every package pinned, every package preferred, no limits.

    Preferences alone would suffice, but uv 0.13 takes a preferred version from the first index that has it, even
    when only another index has a wheel of it that fits the target.
    """
    if keep is None:
        return [([], ())]
    return [([f"{p.name}=={p.version}" for p in keep.packages], ()), ([], keep.packages), ([], ())]


def _fitting_files(pylock: Mapping[str, Any], python: str, platform: str, source: str) -> Iterator[LockedPackage]:
    """Yield each package of a PEP 751 file with the hashes of the wheels that install on the target.

    Raises LockError for a package without such a wheel.
    """
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    tags = tag_set(python, platform)
    for package in sorted(pylock.get("packages", []), key=lambda entry: str(entry["name"])):
        hashes: set[str] = set()
        for wheel in package.get("wheels", []):
            file_name = str(wheel.get("name") or wheel.get("url") or wheel.get("path")).rsplit("/", 1)[-1]
            try:
                fits = bool(parse_wheel_filename(_unquote(file_name))[3] & tags)
            except InvalidWheelFilename:
                fits = False
            digest = wheel.get("hashes", {}).get("sha256")
            if fits and digest:
                hashes.add(str(digest))
        if not hashes:
            raise LockError(
                f"{source}: {package['name']}=={package.get('version', '?')} has no wheel with a sha256"
                f" for python {python} on {platform}",
                "pin a version that publishes such a wheel, or serve one from your index or find-links",
            )
        yield LockedPackage(normalise(package["name"]), str(package["version"]), tuple(sorted(hashes)))


def _unquote(name: str) -> str:
    from urllib.parse import unquote

    return unquote(name).split("#", 1)[0].split("?", 1)[0]
