"""`envbuild lock`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from envbuild.cli.common import log, open_recipe, open_target
from envbuild.cli.options import with_options
from envbuild.environment import load_environment
from envbuild.errors import LockError, UsageError, joined
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

EXPORTS = ("conda-lock", "environment", "explicit")
SOLVERS = ("rattler", "conda-lock")
_ALL = "*"


@click.command("lock")
@click.argument("recipes", nargs=-1, metavar="RECIPE…")
@click.option("--target", "targets", multiple=True, metavar="TARGET", help="Only this target; repeatable.")
@click.option(
    "--upgrade", "upgrades", multiple=True, is_flag=False, flag_value=_ALL, metavar="[PKG]",
    help="Let every package move, or only PKG (repeatable). Otherwise locked versions stay.",
)  # fmt: skip
@click.option("--wheels", is_flag=True, help="Only the wheels; combines with --image and --conda.")
@click.option(
    "--image", is_flag=True,
    help="Only the base of container images, and the image in which their layers are compiled.",
)  # fmt: skip
@click.option("--conda", is_flag=True, help="Only the recipe's conda packages.")
@click.option(
    "--solver", type=click.Choice(SOLVERS), default=SOLVERS[0], show_default=True,
    help="What solves conda packages: envbuild itself, or conda-lock with a conda, mamba or micromamba on PATH "
    "(or in ENVBUILD_CONDA).",
)  # fmt: skip
@click.option("--check", is_flag=True, help="Change nothing; exit 3 when a lock is missing or stale.")
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
@with_options("offline")
def lock_command(
    recipes: tuple[str, ...],
    targets: tuple[str, ...],
    upgrades: tuple[str, ...],
    wheels: bool,
    image: bool,
    conda: bool,
    solver: str,
    check: bool,
    dry_run: bool,
    export: str | None,
    export_dir: Path,
    offline: bool,
) -> None:
    """Make every lock that a build of RECIPE… needs, for all its targets, from any host.

    These are the wheels of each target (exact versions, and the sha256 of each file that fits, no URLs), the base of
    its container images (Debian packages, or an image's digest) with the image in which source-built layers are
    compiled, and the packages of [conda]. pip's configuration says where wheels come from; the recipe may add indexes.

    Wheels are resolved again each time, and keep the locked versions that still fit. The other locks are made where
    they are missing or the recipe changed; --upgrade renews them too. What cannot be made ends with exit code 3, after
    all the others were made; --wheels, --image and --conda choose some.

    \b
    Examples:
      envbuild lock pt_cpu
      envbuild lock pt_cpu --target cpu-aarch64 --upgrade=numpy
      envbuild lock pt_minimal --check
      envbuild lock pt_cpu --wheels --image
      envbuild lock pt_cpu --wheels --export pylock
      envbuild lock pt_cpu --conda
      envbuild lock pt_cpu --upgrade=pytorch
      envbuild lock pt_cpu --conda --export conda-lock --export-dir exported
    """
    from envbuild.cli.lock_run import LockRun
    from envbuild.locks import PARTS, check_locks

    if not recipes:
        taken = f"; --upgrade took {upgrades[-1]!r} as a package: write --upgrade last" if upgrades else ""
        raise UsageError(f"no recipe was named{taken}", "envbuild lock RECIPE [--upgrade=PKG]")
    chosen = [part for part, on in zip(PARTS, (wheels, image, conda), strict=True) if on]
    parts = chosen or PARTS
    environment = load_environment()
    work = [
        (loaded, open_target(loaded, target, environment))
        for loaded in (open_recipe(name, environment) for name in recipes)
        for target in targets or loaded.recipe.targets
    ]
    _check_parts(work, chosen, parts, export)
    if check:
        check_locks(work, parts, log)
        return
    run = LockRun(
        environment, parts, None if _ALL in upgrades else upgrades, offline, write=not dry_run,
        by_conda_lock=solver == "conda-lock", export=None if dry_run else export, folder=export_dir,
    )  # fmt: skip
    for part, lock in zip(PARTS, (run.lock_wheels, run.lock_images, run.lock_conda), strict=True):
        for loaded, target in work if part in parts else ():
            with run.kept():
                lock(loaded, target)
    run.write_conda_exports()
    if run.errors:
        raise joined(LockError, run.errors)


def _check_parts(
    work: list[tuple[LoadedRecipe, Target]], chosen: Sequence[str], parts: Sequence[str], export: str | None
) -> None:
    """Raise UsageError for --conda with a recipe without conda packages, or an export of a lock that is not made."""
    from envbuild.lock.conda_kind import check_has_conda

    if "conda" in chosen or export in EXPORTS:
        for loaded, _ in work:
            check_has_conda(loaded)
    needed = "conda" if export in EXPORTS else "wheels"
    if export and needed not in parts:
        raise UsageError(f"--export {export} writes a lock that is not made here", f"add --{needed}")
