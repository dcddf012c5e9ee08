"""`envbuild lock`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import click

from envbuild.cli.common import offline_option, open_recipe, open_target, say
from envbuild.cli.lock_builder import (
    builder_faults,
    has_to_renew,
    lock_builder,
    names_an_image,
)
from envbuild.cli.lock_conda import (
    EXPORTS,
    SOLVERS,
    CondaWork,
    check_conda,
    conda_faults,
    has_wheels,
    lock_conda,
    upgrades_of_wheels,
    write_exports,
)
from envbuild.environment import Environment, load_environment
from envbuild.errors import LockError, UsageError
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

_ALL = "*"


@click.command("lock")
@click.argument("recipes", nargs=-1, metavar="RECIPE…")
@click.option(
    "--target", "targets", multiple=True, metavar="TARGET", help="Only this target; repeatable."
)
@click.option(
    "--upgrade", "upgrades", multiple=True, is_flag=False, flag_value=_ALL, metavar="[PKG]",
    help="Let every package move, or only PKG (repeatable). Otherwise locked versions stay.",
)  # fmt: skip
@click.option(
    "--image",
    "with_image",
    is_flag=True,
    help="Lock the base of container images too, where that was never done.",
)
@click.option(
    "--conda",
    "with_conda",
    is_flag=True,
    help="Lock the recipe's conda packages too, where that was never done.",
)
@click.option(
    "--solver", type=click.Choice(SOLVERS), default=SOLVERS[0], show_default=True,
    help="What solves conda packages: envbuild itself, or conda-lock with a conda, mamba or micromamba on PATH "
    "(or in ENVBUILD_CONDA).",
)  # fmt: skip
@click.option(
    "--check", is_flag=True, help="Change nothing; exit 3 when a lock is missing or stale."
)
@click.option("--dry-run", is_flag=True, help="Resolve and say what would change; write nothing.")
@click.option(
    "--export", type=click.Choice(["pylock", *EXPORTS]),
    help="Also write the lock for other tools: PEP 751 pylock files; or the conda lock, with what pip adds, as "
    "conda-lock.yml, as environment.yml with exact pins, or as @EXPLICIT list.",
)  # fmt: skip
@click.option(
    "--export-dir", type=click.Path(path_type=Path, file_okay=False), default=Path(),
    help="Folder for exported files. Default: here.",
)  # fmt: skip
@offline_option
def lock_command(
    recipes: tuple[str, ...],
    targets: tuple[str, ...],
    upgrades: tuple[str, ...],
    with_image: bool,
    with_conda: bool,
    solver: str,
    check: bool,
    dry_run: bool,
    export: str | None,
    export_dir: Path,
    offline: bool,
) -> None:
    """Resolve RECIPE… for all their targets, from any host, and write the locks.

    A lock holds exact versions and the sha256 of the wheels that fit its target, no URLs. pip's
    configuration says where packages come from; the recipe may add indexes.

    The base of container images has a lock of its own, made by --image or by the first image build: Debian
    packages or an image's digest. So has the image in which source-built layers ([layers]) are built. From then on
    these are renewed when the recipe's [image] or [layers] change, or by --upgrade of everything.

    The conda packages of a recipe with [conda] have locks of their own, made by --conda or by the first conda build:
    conda-lock.yml, one file for the targets of an accelerator, and a file for what pip adds. From then on they are
    renewed when the recipe's [conda] changes, or by --upgrade of everything or of a package in them.

    \b
    Examples:
      envbuild lock pt_cpu
      envbuild lock pt_cpu --target cpu-aarch64 --upgrade=numpy
      envbuild lock pt_cpu pt_minimal --check
      envbuild lock pt_cpu --export pylock
      envbuild lock pt_cpu --image
      envbuild lock pt_cpu --conda
      envbuild lock pt_cpu --upgrade=pytorch
      envbuild lock pt_cpu --export conda-lock --export-dir exported
    """
    from envbuild.lock.manage import inspect_lock, update_lock

    if not recipes:
        taken = (
            f"; --upgrade took {upgrades[-1]!r} as a package: write --upgrade last"
            if upgrades
            else ""
        )
        raise UsageError(f"no recipe was named{taken}", "envbuild lock RECIPE [--upgrade=PKG]")
    environment = load_environment()
    work = [
        (loaded, target)
        for loaded in (open_recipe(name, environment) for name in recipes)
        for target in _targets(loaded, targets, environment)
    ]
    if with_conda or export in EXPORTS:
        check_conda(loaded for loaded, _ in work)
    if check:
        _check(work)
        return
    upgrade = None if _ALL in upgrades else upgrades
    for loaded, target in work:
        if not has_wheels(loaded, target):
            continue
        moving: Collection[str] | None = upgrade
        if upgrade:
            moving = upgrades_of_wheels(
                loaded, target, inspect_lock(loaded, target).lock, list(upgrade)
            )
        say(f"{loaded.recipe.name} {target.name}: resolving …")
        resolution = update_lock(
            loaded,
            target,
            environment,
            upgrade=moving,
            offline=offline,
            say=say,
            write=not dry_run,
        )
        if export == "pylock" and not dry_run:
            click.echo(_export(resolution.pylock, loaded, target, export_dir, environment))
    for loaded, target in work:  # after all wheels: a registry out of reach costs nothing of theirs
        _lock_image(
            loaded, target, environment,
            wanted=with_image, upgrade=_ALL in upgrades, offline=offline, write=not dry_run,
        )  # fmt: skip
        lock_builder(
            loaded, target, environment,
            wanted=with_image, upgrade=_ALL in upgrades, offline=offline, write=not dry_run,
        )  # fmt: skip
    conda = CondaWork(
        with_conda, upgrade, offline, not dry_run, solver,
        export if export in EXPORTS and not dry_run else None, export_dir,
    )  # fmt: skip
    for loaded, target in work:  # last, for the same reason
        lock_conda(loaded, target, environment, conda)
    write_exports(conda)


def _targets(
    loaded: LoadedRecipe, names: tuple[str, ...], environment: Environment
) -> list[Target]:
    if names:
        return [open_target(loaded, name, environment) for name in names]
    return [Target.parse(name) for name in loaded.recipe.targets]


def _check(work: list[tuple[LoadedRecipe, Target]]) -> None:
    from envbuild.lock.manage import check_lock, inspect_lock

    faults = []
    for loaded, target in work:
        faults += _image_faults(loaded, target)
        faults += builder_faults(loaded, target)
        faults += conda_faults(loaded, target)
        if not has_wheels(loaded, target):
            continue
        state = inspect_lock(loaded, target)
        if state.fault is not None or state.lock is None:
            faults.append(f"{state.path}: {state.fault}")
            continue
        check_lock(loaded, target, state.lock, str(state.path), say)
        say(f"{state.path}: current")
    if faults:
        raise LockError(
            "\n".join(faults), "run `envbuild lock` with the same recipes and commit the result"
        )


def _image_faults(loaded: LoadedRecipe, target: Target) -> list[str]:
    from envbuild.lock.image_manage import inspect_image_lock

    state = inspect_image_lock(loaded, target)
    if state.lock is None and not names_an_image(loaded):
        return []
    return [f"{state.path}: {state.fault}"] if state.fault else []


def _lock_image(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    wanted: bool,
    upgrade: bool,
    offline: bool,
    write: bool,
) -> None:
    """Renew the image lock where there is one to renew, or where one is wanted."""
    from envbuild.lock.image_manage import inspect_image_lock, update_image_lock

    state = inspect_image_lock(loaded, target)
    if state.lock is None and not wanted and not names_an_image(loaded):
        return
    if has_to_renew(state, upgrade=upgrade, offline=offline):
        update_image_lock(loaded, target, environment, say=say, write=write)


def _export(
    pylock: str, loaded: LoadedRecipe, target: Target, folder: Path, environment: Environment
) -> Path:
    """Write a PEP 751 file. Unlike the lock it names the URLs that this site resolved to."""
    from envbuild.artifacts.place import writing
    from envbuild.files import write_atomically
    from envbuild.lock.export import without_credentials

    # PEP 751: pylock.NAME.toml, no dots in NAME.
    name = f"pylock.{loaded.recipe.name}-{target.name}.toml".replace(".", "-").replace(
        "pylock-", "pylock.", 1
    )
    path = folder / (name.removesuffix("-toml") + ".toml")
    with writing(folder, LockError):
        write_atomically(path, without_credentials(pylock))
    return path
