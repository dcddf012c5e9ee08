"""Resolve a recipe's requirements for one target with uv, from any host."""

from __future__ import annotations

import re
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
from envbuild.names import normalise
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target


@dataclass(frozen=True, slots=True)
class Resolution:
    """A fresh lock, the same resolution as PEP 751 text, and notes that the user should see."""

    lock: Lock
    pylock: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What uv is to resolve: requirements and constraints, and `digest`, the new lock's recipe_digest.

    `provided` are distributions that something else installs, by version; `stubs` is the folder with wheels that
    stand for them. They take part in the resolution and are no part of the lock. `overrides` take the place of what
    packages require.
    """

    requirements: tuple[str, ...]
    constraints: tuple[str, ...]
    digest: str
    provided: Mapping[str, str] = field(default_factory=dict)
    stubs: Path | None = None
    overrides: tuple[str, ...] = ()


def resolve(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    keep: Lock | None = None,
    offline: bool = False,
) -> Resolution:
    """Resolve `target` of `recipe`; versions pinned in `keep` are preferred where they still fit.

    Raises LockError with uv's explanation when nothing satisfies the requirements, when a file
    has no sha256, when the result is for another accelerator than the target's, or when [layers.nccl]
    cannot replace torch's NCCL.
    """
    table = recipe.recipe.targets[target.name]
    wanted = Wanted(
        (*recipe.recipe.requirements, *table.requirements),
        recipe.recipe.constraints,
        recipe.resolution_digest(target),
    )
    override = nccl_override(recipe, target)
    if override is not None:
        # Only the resolution itself tells what torch pins, whatever its version and index.
        before = free_of(keep, target)
        pinned = resolve_wanted(wanted, recipe, target, environment, keep=before, offline=offline)
        check_override(recipe, target, pinned.lock)
        wanted = replace(wanted, overrides=(override,))
        keep = free_of(pinned.lock, target)
    return resolve_wanted(wanted, recipe, target, environment, keep=keep, offline=offline)


def resolve_wanted(
    wanted: Wanted,
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    keep: Lock | None = None,
    offline: bool = False,
) -> Resolution:
    """Resolve `wanted` for `target` as `resolve` does, through the target's indexes."""
    table = recipe.recipe.targets[target.name]
    python, platform = recipe.recipe.python, target.platform(table.glibc)
    indexes, notes = _reachable(table.indexes, environment, offline)
    with tempfile.TemporaryDirectory(prefix="envbuild-lock-") as folder:
        work = Path(folder)
        (work / "requirements.in").write_text("\n".join(wanted.requirements) + "\n")
        environment.write_uv_settings(work / "uv.toml", indexes)
        pylock = work / "pylock.toml"
        command: list[str | Path] = [
            environment.uv, "pip", "compile", work / "requirements.in",
            "--config-file", work / "uv.toml", "--constraints", work / "constraints.txt",
            "--python-version", python, "--python-platform", platform,
            "--only-binary", ":all:", "--format", "pylock.toml", "--output-file", pylock,
            "--no-header", "--no-annotate", "--quiet",
        ]  # fmt: skip
        if wanted.stubs is not None:
            command += ["--find-links", wanted.stubs]
        if wanted.overrides:
            (work / "overrides.txt").write_text("\n".join(wanted.overrides) + "\n")
            command += ["--overrides", work / "overrides.txt"]
        fixed = [f"{name}=={version}" for name, version in wanted.provided.items()]
        for pins, preferred in _ways_to_keep(keep):
            lines = [*wanted.constraints, *fixed, *pins]
            (work / "constraints.txt").write_text("\n".join(lines) + "\n")
            pylock.write_text(_preferences(preferred))
            done = process.run(
                [*command, "--offline"] if offline else command,
                env=environment.uv_environment(),
                cwd=work,
                check=False,
            )
            if done.returncode == 0:
                break
        if done.returncode != 0:
            raise LockError(
                f"{recipe.path}: target {target.name} cannot be resolved:\n{process.tail(done)}"
                + "".join(f"\n  note: {note}" for note in notes),
                _hint(done.stderr, notes, offline, f"{recipe.recipe.name} --target {target.name}"),
            )
        text = pylock.read_text(encoding="utf-8")
    resolved = tomllib.loads(text)
    resolved["packages"] = [
        package for package in resolved.get("packages", [])
        if normalise(package["name"]) not in wanted.provided
    ]  # fmt: skip
    files = list(_fitting_files(resolved, python, platform, str(recipe.path)))
    lock = Lock(
        recipe=recipe.recipe.name,
        target=target.name,
        python=python,
        platform=platform,
        recipe_digest=wanted.digest,
        packages=tuple(files),
    )
    check_accelerator(target, lock.packages, str(recipe.path))
    return Resolution(lock, text, tuple(notes))


def without(lock: Lock, names: Iterable[str]) -> Lock:
    """`lock` less `names`: what is left is preferred, what is taken out is free to move.

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


def _reachable(
    indexes: Sequence[str], environment: Environment, offline: bool
) -> tuple[list[str], list[str]]:
    """The recipe's indexes that answer, through the first mirror that does; a note for each other."""
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
    """(constraints, preferences) to try in turn: everything kept as it is; kept where it still fits; free.

    Preferences alone would do, but uv 0.13 takes a preferred version from the first index that has it,
    even when only another index has a wheel of it that fits the target.
    """
    if keep is None:
        return [([], ())]
    return [([f"{p.name}=={p.version}" for p in keep.packages], ()), ([], keep.packages), ([], ())]


def _preferences(packages: Iterable[LockedPackage]) -> str:
    """A PEP 751 file naming versions alone: uv prefers what its output file already holds."""
    lines = ['lock-version = "1.0"', 'created-by = "envbuild"']
    packages = list(packages)
    if not packages:
        lines.append("packages = []")
    for package in packages:
        lines += ["", "[[packages]]", f'name = "{package.name}"', f'version = "{package.version}"']
    return "\n".join(lines) + "\n"


def _fitting_files(
    pylock: Mapping[str, Any], python: str, platform: str, source: str
) -> Iterator[LockedPackage]:
    """Each package of a PEP 751 file with the hashes of the wheels that install on the target."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    tags = frozenset(compatible_tags(python, platform))
    for package in sorted(pylock.get("packages", []), key=lambda entry: str(entry["name"])):
        hashes: set[str] = set()
        for wheel in package.get("wheels", []):
            file_name = str(wheel.get("name") or wheel.get("url") or wheel.get("path")).rsplit(
                "/", 1
            )[-1]
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
        yield LockedPackage(
            normalise(package["name"]), str(package["version"]), tuple(sorted(hashes))
        )


def _unquote(name: str) -> str:
    from urllib.parse import unquote

    return unquote(name).split("#", 1)[0].split("?", 1)[0]


def compatible_tags(python: str, platform: str) -> Iterator[Any]:
    """The wheel tags (PEP 425, PEP 600) that install on CPython `python` and `ARCH-manylinux_2_N`."""
    from packaging import tags

    arch, _, minor = platform.partition("-manylinux_2_")
    legacy = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms: list[str] = []
    for glibc in range(int(minor), 4, -1):
        platforms.append(f"manylinux_2_{glibc}_{arch}")
        if glibc in legacy:
            platforms.append(f"{legacy[glibc]}_{arch}")
    platforms.append(f"linux_{arch}")
    version = tuple(int(part) for part in python.split("."))
    yield from tags.cpython_tags(version, platforms=platforms)
    yield from tags.compatible_tags(version, f"cp{version[0]}{version[1]}", platforms)


def _hint(stderr: str, notes: Sequence[str], offline: bool, what: str) -> str:
    """What usually cures a failed resolution of `what`, judged by what uv printed."""
    if offline:
        return "resolving needs an index: run it once without --offline, or give pip a find-links folder"
    if re.search(r"dns error|Connect|timed out|certificate|invalid peer", stderr, re.IGNORECASE):
        return (
            "check the network, pip's index-url, proxy and cert (envbuild reads pip's configuration and "
            "SSL_CERT_FILE), or name a mirror in site.toml"
        )
    if notes:
        return (
            f"run `envbuild lock {what}` where that index is reached, or name a mirror of it in site.toml, and "
            "commit the lock: it holds everywhere. Wheels that only that index has may also lie in pip's find-links"
        )
    return "loosen or correct the requirement that uv names above"
