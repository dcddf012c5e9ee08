"""Requirements of a package's build: those of [build-system], and those that its build back end adds (PEP 517, 518)."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envbuild.base import process
from envbuild.base.errors import BuildError, LockError
from envbuild.base.unpack import unpack
from envbuild.environment import Environment
from envbuild.lock.built import Sources, locked_wheels
from envbuild.lock.format import BuiltPackage, Lock
from envbuild.lock.uv_compile import UvCompile, explanation
from envbuild.recipe.model import BuildTable
from envbuild.recipe.sources import LockedPackage

# A build of a git repository's files has no history to read the version from: PyPA's setuptools-scm (hatch-vcs and
# others use it), PDM, and OpenStack's pbr read it from these variables.
_VERSION = ("SETUPTOOLS_SCM_PRETEND_VERSION", "PDM_BUILD_SCM_VERSION", "PBR_VERSION")


def build_variables(table: BuildTable, version: str, *, git: bool) -> dict[str, str]:
    """Return the environment variables of the build of a package: of the recipe, and with its version if from `git`."""
    return {**(dict.fromkeys(_VERSION, version) if git else {}), **table.environment}


def declared_requirements(
    archive: Path,
    title: str,
    table: BuildTable,
    variables: Mapping[str, str],
    folder: Path,
    indexes: Sequence[str],
    environment: Environment,
    *,
    offline: bool,
) -> list[str]:
    """Return the build requirements of the project in `archive`; `folder` is an empty folder for its files.

    An isolated build's back end is asked for more of them, in a virtual environment with those of [build-system].
    Raises LockError when the back end fails.
    """
    from build import BuildException, ProjectBuilder

    source, said = folder / "source", list[subprocess.CompletedProcess[str]]()
    python = folder / "venv" / "bin" / "python"

    def run(cmd: Sequence[str], cwd: str | None = None, extra_environ: Mapping[str, str] | None = None) -> None:
        env = {**environment.uv_environment(), **variables, **(extra_environ or {})}
        said.append(process.run(cmd, env=env, cwd=Path(cwd) if cwd else None, check=False))
        said[-1].check_returncode()

    try:
        unpack(archive, source)
        builder = ProjectBuilder(source, python_executable=os.fspath(python), runner=run)
        static = sorted({*builder.build_system_requires, *table.requires})
        if not table.isolation:  # the back end needs the environment's packages
            return static
        environment.write_uv_settings(folder / "uv.toml", indexes)
        uv = [environment.uv, "--quiet", "--config-file", os.fspath(folder / "uv.toml"), "--no-progress"]
        run([*uv, "venv", "--python", sys.executable, os.fspath(folder / "venv")])
        more = ["--offline"] if offline else []
        if static:
            run([*uv, "pip", "install", "--python", os.fspath(python), "--only-binary", ":all:", *more, *static])
        return sorted({*static, *builder.get_requires_for_build("wheel")})
    except BuildError as error:
        raise LockError(f"{title}: {error.message}", error.hint) from None
    except (BuildException, subprocess.CalledProcessError) as error:
        text = process.tail(said[-1]) if said and said[-1].returncode else f"  {error}"
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
    """Return the packages of PEP 751 `rows` whose wheels are built, with the wheels that their builds run.

    Builds use the versions of `keep` and of the environment's `packages` while they fit. Wheels that a build without
    isolation finds in the environment, from its `packages` or `provided`, are left out. Raises LockError.
    """
    found, before = [], {one.name: one.build for one in keep.built} if keep else {}
    there = {one.name for one in packages} | provided.keys()
    for number, row in enumerate(rows):
        one, archive = sources.locate(row, keep)
        table, title = sources.builds[one.name], f"{one.name} {one.version}"
        folder = uv.work / f"build-{number}"
        folder.mkdir()
        lines = declared_requirements(
            archive,
            title,
            table,
            build_variables(table, one.version, git=bool(one.commit)),
            folder,
            uv.offers.indexes,
            sources.environment,
            offline=sources.offline,
        )
        known = {wheel.name: wheel for wheel in (*packages, *before.get(one.name, ()))}
        wheels = _resolved(lines, tuple(known.values()), uv, title, str(sources.recipe.path))
        own = tuple(wheel for wheel in wheels if table.isolation or wheel.name not in there)
        found.append(replace(one, build=own))
    return tuple(found)


def _resolved(
    lines: Sequence[str], known: tuple[LockedPackage, ...], uv: UvCompile, title: str, source: str
) -> list[LockedPackage]:
    for pins, preferred in (([f"{one.name}=={one.version}" for one in known], ()), ([], known), ([], ())):
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
    return sorted(wheels, key=lambda one: one.name)
