"""`envbuild lock`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli.common import log, offline_option, open_recipe, open_target
from envbuild.cli.lock_conda import EXPORTS, SOLVERS, CondaWork, lock_conda, upgrades_of_wheels, write_exports
from envbuild.environment import Environment, load_environment
from envbuild.errors import LockError, UsageError
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.lock.image import ImageLock
    from envbuild.lock.lifecycle import LockKind

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
@offline_option
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
    from envbuild.locks import PARTS, check_locks, has_conda, has_wheels, needed_locks

    if not recipes:
        taken = f"; --upgrade took {upgrades[-1]!r} as a package: write --upgrade last" if upgrades else ""
        raise UsageError(f"no recipe was named{taken}", "envbuild lock RECIPE [--upgrade=PKG]")
    chosen = [part for part, on in zip(PARTS, (wheels, image, conda), strict=True) if on]
    parts = tuple(chosen) or PARTS
    environment = load_environment()
    work = [
        (loaded, target)
        for loaded in (open_recipe(name, environment) for name in recipes)
        for target in _targets(loaded, targets, environment)
    ]
    _check_parts(work, chosen, parts, export)
    if check:
        check_locks(work, parts, log)
        return
    upgrade = None if _ALL in upgrades else upgrades
    failures = _Failures()
    for loaded, target in work:
        if "wheels" in parts and has_wheels(loaded, target):
            with failures.kept():
                pylock = _lock_wheels(loaded, target, environment, upgrade, offline, not dry_run)
                if export == "pylock" and not dry_run:
                    click.echo(_export(pylock, loaded, target, export_dir, environment))
    for loaded, target in work if "image" in parts else ():
        with failures.kept():
            for kind in needed_locks(loaded, target, ("image",)):
                with failures.kept():
                    _renew(kind, environment, upgrade is None, offline, not dry_run)
    asked = CondaWork(
        upgrade, offline, not dry_run, solver,
        export if export in EXPORTS and not dry_run else None, export_dir, "wheels" in parts,
    )  # fmt: skip
    for loaded, target in work:
        if "conda" in parts and has_conda(loaded):
            with failures.kept():
                lock_conda(loaded, target, environment, asked)
    write_exports(asked)
    failures.raise_all()


@dataclass
class _Failures:
    """Errors of locks that could not be made, raised after all others are written."""

    errors: list[LockError] = field(default_factory=list)

    @contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except LockError as error:
            self.errors.append(error)

    def raise_all(self) -> None:
        """Raise one LockError for all errors, if there are any."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            hints = dict.fromkeys(one.hint for one in self.errors if one.hint)
            messages = dict.fromkeys(one.message for one in self.errors)
            raise LockError("\n".join(messages), "\n".join(hints) or None)


def _targets(loaded: LoadedRecipe, names: tuple[str, ...], environment: Environment) -> list[Target]:
    if names:
        return [open_target(loaded, name, environment) for name in names]
    return [Target.parse(name) for name in loaded.recipe.targets]


def _check_parts(
    work: list[tuple[LoadedRecipe, Target]], chosen: list[str], parts: tuple[str, ...], export: str | None
) -> None:
    """Raise UsageError for --conda with a recipe without conda packages, or an export of a lock that is not made."""
    from envbuild.lock.conda_kind import check_has_conda

    if "conda" in chosen or export in EXPORTS:
        for loaded, _ in work:
            check_has_conda(loaded)
    needed = "conda" if export in EXPORTS else "wheels"
    if export and needed not in parts:
        raise UsageError(f"--export {export} writes a lock that is not made here", f"add --{needed}")


def _lock_wheels(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    upgrade: Collection[str] | None,
    offline: bool,
    write: bool,
) -> str:
    """Update the target's wheel lock. Return the resolution in the format of PEP 751."""
    from envbuild.lock.lifecycle import update
    from envbuild.lock.wheels import wheel_lock

    kind = wheel_lock(loaded, target)
    if upgrade:
        old = kind.inspect().lock
        upgrade = upgrades_of_wheels(loaded, target, old, list(upgrade))
    log(f"{loaded.recipe.name} {target.name}: resolving …")
    return update(kind, environment, upgrade=upgrade, offline=offline, log=log, write=write).pylock


def _renew(kind: LockKind[ImageLock], environment: Environment, upgrade: bool, offline: bool, write: bool) -> None:
    """Update a lock of an image if it is missing, stale or to be upgraded.

    Raises LockError if it is missing or stale and --offline forbids to resolve it.
    """
    from envbuild.lock.lifecycle import update

    state = kind.inspect()
    if offline and state.fault is not None:
        raise LockError(
            f"{state.path}: {state.fault}, and --offline forbids to resolve it",
            "leave --offline out, or lock the rest alone: --wheels, --conda",
        )
    if offline and upgrade:
        log(f"{state.path}: left as it is (--offline)")
    elif state.fault is not None or upgrade:
        update(kind, environment, upgrade=None, offline=offline, log=log, write=write)


def _export(pylock: str, loaded: LoadedRecipe, target: Target, folder: Path, environment: Environment) -> Path:
    """Write a PEP 751 file. Unlike the lock, it contains the URLs to which this site resolved."""
    from envbuild.atomic import write_atomically, writing
    from envbuild.lock.format import without_credentials

    # PEP 751: pylock.NAME.toml, without dots in NAME.
    name = f"pylock.{loaded.recipe.name}-{target.name}.toml".replace(".", "-").replace("pylock-", "pylock.", 1)
    path = folder / (name.removesuffix("-toml") + ".toml")
    with writing(folder, LockError):
        write_atomically(path, without_credentials(pylock))
    return path
