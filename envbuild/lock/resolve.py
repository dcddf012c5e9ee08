"""Resolution of a wheel lock: uv resolves a recipe's requirements, on a host of any platform.

`[layers.nccl]` can replace the NCCL wheel that torch pins by another version: torch's libtorch_cuda finds
libnccl.so.2 by its DT_RPATH, in nvidia/nccl/lib beside torch. LD_LIBRARY_PATH therefore does not select another NCCL.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.base.errors import LockError
from envbuild.base.text import normalise
from envbuild.environment import Environment
from envbuild.lock.built import (
    UvCompile,
    check_used,
    explanation,
    filtered_names,
    lock_built,
    locked_wheels,
    sources_of,
    without_wheel,
)
from envbuild.lock.format import BuiltPackage, Lock
from envbuild.lock.judge import check_accelerator
from envbuild.lock.lifecycle import Resolved
from envbuild.lock.offers import (
    Offers,
    ReleaseAges,
    allowed_releases,
    bound_indexes,
    check_bound,
    index_limits,
    no_time,
    reachable,
    release_ages,
    releases_of,
    skipped_warnings,
)
from envbuild.recipe.checks import applicable, requirement_parts
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import requirement_entries
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_UNREACHED = (
    "run `envbuild lock` where the index in the note is reached, or name a mirror of it in site.toml, and commit the"
    " lock: it holds everywhere"
)


def resolve_recipe(
    recipe: LoadedRecipe, target: Target, environment: Environment, keep: Lock | None, offline: bool, as_of: str = ""
) -> Resolved[Lock]:
    """Resolve `target` as `resolve` does. Also raises LockError when [layers.nccl] cannot replace torch's NCCL."""
    requirements = (*recipe.recipe.requirements, *recipe.recipe.targets[target.name].requirements)
    digest, ages = recipe.resolution_digest(target), release_ages(recipe, target, as_of)
    resolve_it = partial(resolve, recipe, target, environment, requirements, digest, ages=ages)
    override = nccl_override(recipe, target)
    if override is None:
        return resolve_it(keep=keep, offline=offline)
    # Only a resolution tells which NCCL torch pins, whatever torch's version and index.
    pinned = resolve_it(keep=keep and _without_nccl(keep, target), offline=offline).lock
    check_override(recipe, target, pinned)
    return resolve_it(overrides=[override], keep=_without_nccl(pinned, target), offline=offline)


def resolve(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    requirements: Sequence[str],
    digest: str,
    *,
    ages: ReleaseAges,
    overrides: Sequence[str] = (),
    provided: Mapping[str, str] = {},
    stubs: Path | None = None,
    keep: Lock | None = None,
    offline: bool = False,
    bounds: Sequence[str] = (),
) -> Resolved[Lock]:
    """Resolve `requirements` for `target` of `recipe`; versions pinned in `keep` are preferred while they fit.

    `digest` is the recipe_digest of the new lock. Files that are newer than `ages` allows are left out. `overrides`
    replace the requirements of packages. `provided` maps distributions that another installer provides to their
    versions; `stubs` is the folder with stub wheels for them. They take part in the resolution but are not in the lock.
    `bounds` are further constraints. If torch is of another accelerator, the recipe is resolved again with the newest
    build for the target as torch's limit: an index with a newer torch, such as PyPI, must not hide it.
    Raises LockError with uv's explanation when no packages satisfy the requirements, when a package has no fitting
    wheel with a sha256, or when the result is for another accelerator than the target's.
    """
    table = recipe.recipe.targets[target.name]
    python, platform = recipe.recipe.python, target.platform(table.glibc)
    indexes, unreached = reachable(table.indexes, environment, offline)
    left_out = [f"note: {reason}; it was left out" for reason in unreached]
    notes = [*left_out]
    sources = sources_of(recipe, target, environment, requirements, offline)
    lines_of = applicable(requirements, python, platform)  # a requirement with another marker binds nothing
    bound, limits = bound_indexes(recipe, lines_of, environment, offline), index_limits(ages, environment)
    offers = Offers(environment, indexes, offline, bound=bound, ages=ages, limits=limits)
    constraints = [*recipe.recipe.constraints, *bounds, *(f"{name}=={version}" for name, version in provided.items())]
    # To keep versions, every package is pinned, then preferred. Preferences alone would suffice, but uv 0.13 takes a
    # preferred version from the first index that has it, even when only another index has a wheel of it that fits.
    ways: list[tuple[Lock | None, list[str], tuple[LockedPackage, ...]]] = [(None, [], ())]
    if keep is not None:
        pins = [f"{name}=={version}" for name, version in keep.versions.items() if name not in sources.references]
        ways = [(keep, pins, ()), (keep, [], keep.packages), *ways]
    with environment.temporary_folder("lock-") as folder:
        replaced = (*recipe.recipe.overrides, *overrides)
        uv = UvCompile(folder, offers, python, platform, constraints, replaced, stubs, sources.builds)
        for kept, pins, preferred in ways:
            done = uv.run(sources.lines(requirements, python, platform, kept), pins, preferred)
            if done.returncode == 0:
                break
        else:
            command = f"{recipe.recipe.name} --target {target.name}"
            names = [*lines_of, *filtered_names(done.stderr)]
            too_new = _too_new(recipe, offers, lines_of, dict.fromkeys(names), python, platform)
            problem = [explanation(done), *(f"  {line}" for line in (*too_new, *notes))]
            hint = (
                f"allow an older release, or change `exclude_newer` at {recipe.where('exclude_newer')}; for an "
                'index that you trust, write "off" in [exclude_newer_index]'
                if too_new
                else uv.hint(done.stderr, requirements, table.requirements, command, unreached=bool(notes))
            )
            raise LockError("\n".join([f"{recipe.path}: target {target.name} cannot be resolved:", *problem]), hint)
        pylock = uv.pylock.read_text(encoding="utf-8")
        rows = [row for row in tomllib.loads(pylock).get("packages", []) if normalise(row["name"]) not in provided]
        rows.sort(key=lambda row: str(row["name"]))
        own = [row for row in rows if normalise(row["name"]) in sources.builds]
        packages = tuple(locked_wheels(row, python, platform, str(recipe.path)) for row in rows if row not in own)
        built = lock_built(sources, own, UvCompile(folder, offers, python, platform), packages, provided, keep)
        check_used(recipe, target, built)
        every: list[LockedPackage | BuiltPackage] = [*packages, *built]
        of_indexes = [package for package in every if package.name not in sources.references]
        check_bound(recipe, of_indexes, offers)
        offers.check_pages(recipe, of_indexes)
        wheels = {package.name: package.version for package in packages if package.name not in sources.references}
        warnings = skipped_warnings(
            requirements,
            recipe.recipe.constraints,
            wheels,
            offers,
            python,
            platform,
            lambda line: without_wheel(uv.run([line]).stderr),
            f"{recipe.path}: target {target.name}",
        )
        notes += offers.ambiguous_names(of_indexes)
        notes += offers.age_notes({package.name: package.version for package in of_indexes})
    refusal: LockError | None = None
    try:
        check_accelerator(target, packages, str(recipe.path), table.indexes)
    except LockError as error:
        refusal = error
    if refusal is not None:  # outside of the handler: a failed request is described by the exceptions in its context
        lower = () if bounds else own_limits(target, offers, lines_of, python, platform)
        reasons = [*left_out]
        if lower:
            try:
                return resolve(
                    recipe,
                    target,
                    environment,
                    requirements,
                    digest,
                    ages=ages,
                    overrides=overrides,
                    provided=provided,
                    stubs=stubs,
                    keep=keep,
                    offline=offline,
                    bounds=lower,
                )
            except LockError as second:
                reasons.append(f"with {lower[0]}, the newest build for it in the indexes: {second.message}")
        lines = "".join(f"\n  {reason}" for reason in reasons)
        raise LockError(refusal.message + lines, f"{_UNREACHED}; or {refusal.hint}" if unreached else refusal.hint)
    if bounds:
        reason = "newer releases in the indexes have no build for its accelerator"
        notes.append(f"note: {target.name}: {bounds[0]}: {reason}")
    locked = {*(package.name for package in every), *provided}
    for override in recipe.recipe.overrides:
        if requirement_parts(override)[0] not in locked:
            notes.append(f"note: the override {override} has no effect for {target.name}: no package needs it")
    lock = Lock(
        recipe.recipe.name,
        target.name,
        python,
        platform,
        digest,
        packages,
        warnings,
        built,
        recipe.recipe.overrides,
        ages.kept,
    )
    summary = f"{len(packages)} packages" + (f", {len(built)} to build from source" if built else "")
    return Resolved(lock, summary, sources.published(pylock), notes, ages.notes())


def own_limits(
    target: Target, offers: Offers, lines_of: Mapping[str, Sequence[Requirement]], python: str, platform: str
) -> tuple[str, ...]:
    """Return constraints on torch: the newest release in the indexes with a build for `target`; () if none fits.

    torchaudio has torch's version number, and its newer releases do not require the torch that they need.
    """
    allowed = allowed_releases(offers.releases(["torch"])["torch"], lines_of.get("torch", ()), python)
    own = [
        release.version
        for release in allowed
        if release.version.local == target.accelerator and release.fits(python, platform)
    ]
    return tuple(f"{name}<={max(own).public}" for name in ("torch", "torchaudio")) if own else ()


def _too_new(
    recipe: LoadedRecipe,
    offers: Offers,
    lines_of: Mapping[str, Sequence[Requirement]],
    names: Iterable[str],
    python: str,
    platform: str,
) -> list[str]:
    """Return a line for each of `names` whose only releases that would do are left out by `exclude_newer`."""
    places = {requirement_parts(text)[0]: keys for keys, text in requirement_entries(recipe.document)}
    lines = []
    for name, files in offers.too_new(names).items():
        young, known = releases_of(name, [file.link for file in files]), offers.releases([name])[name]
        fitting, others = (
            [
                release_file
                for release_file in allowed_releases(releases, lines_of.get(name, ()), python)
                if release_file.fits(python, platform)
            ]
            for releases in (young, known)
        )
        if not fitting or (name in lines_of and others):
            continue
        release = fitting[-1]
        file = next(
            file
            for file in files
            if release.version in {known_release.version for known_release in releases_of(name, [file.link])}
        )
        if release.uploaded is None:
            text = f"{no_time(file.index)} of {name}, so they are left out"
        else:
            allowed = offers.ages.allowed_from(release.uploaded, offers.limits.get(file.index, ""))
            text = f"{name} {release.version}, uploaded on {release.uploaded:%Y-%m-%d %H:%M} UTC, is too new: {allowed}"
        lines.append(f"{recipe.document.where(*places[name])}: {text}" if name in places else text)
    return lines


def without(lock: Lock, names: Iterable[str]) -> Lock:
    """Return `lock` without the packages `names`, so that they may change. Raises LockError for an unknown name."""
    moving = {normalise(name) for name in names}
    known = dict.fromkeys([*lock.versions, *(wheel.name for package in lock.built for wheel in package.build)])
    unknown = moving - known.keys()
    if unknown:
        raise LockError(
            f"--upgrade: {', '.join(sorted(unknown))} is not in the lock of {lock.recipe} ({lock.target})",
            f"locked are: {', '.join(known)}",
        )
    built = (
        replace(package, build=tuple(wheel for wheel in package.build if wheel.name not in moving))
        for package in lock.built
        if package.name not in moving
    )
    return replace(lock, packages=tuple(p for p in lock.packages if p.name not in moving), built=tuple(built))


def nccl_package(target: Target) -> str:
    """Return the name of NVIDIA's NCCL distribution on PyPI for a CUDA target: `nvidia-nccl-cu12`."""
    return f"{target.family.nccl_wheel}{target.accelerator[:4]}"


def nccl_override(recipe: LoadedRecipe, target: Target) -> str | None:
    """Return the pin that overrides torch's own in a resolution for `target`, or None if the recipe requests none."""
    version = recipe.nccl_wheel(target)
    return None if version is None else f"{nccl_package(target)}=={version}"


def check_override(recipe: LoadedRecipe, target: Target, pinned: Lock) -> None:
    """Raise LockError when [layers.nccl] cannot replace the NCCL in `pinned`, the resolution without an override.

    It cannot if torch does not depend on an NCCL wheel, or if the override is older than torch's pin: torch may call
    functions that an older NCCL lacks.
    """
    from packaging.version import Version

    version = recipe.nccl_wheel(target)
    assert version is not None
    name, where = nccl_package(target), recipe.where("layers", "nccl")
    torch, own = pinned.versions.get("torch"), pinned.versions.get(name)
    if own is None:
        problem = f"torch=={torch} brings no {name}" if torch else f"nothing here depends on {name}"
        raise LockError(
            f"{where}: NCCL {version} cannot replace anything for {target.name}: {problem}",
            "NCCL is inside that wheel or the base image; choose a torch that pins it, or remove [layers.nccl]",
        )
    try:
        older = Version(version) < Version(own)
    except ValueError:
        raise LockError(
            f"{where}: {version!r} is not a version of {name}", f"write it as PyPI does, for example {own}"
        ) from None
    if older:
        raise LockError(
            f"{where}: NCCL {version} is older than {own}, which torch=={torch} pins",
            f'version = "{own}" or newer; without [layers.nccl] it is {own}',
        )


def _without_nccl(lock: Lock, target: Target) -> Lock:
    """Return `lock` without NCCL, whose version the override decides."""
    return replace(lock, packages=tuple(p for p in lock.packages if p.name != nccl_package(target)))
