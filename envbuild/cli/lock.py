"""`envbuild lock`, `add`, `remove` and `audit`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.base.atomic import write_beside, writing
from envbuild.base.errors import LockError, UsageError, VerificationError, joined
from envbuild.base.progress import log
from envbuild.base.text import normalise
from envbuild.cli import complete, layout
from envbuild.cli.common import (
    PATH,
    Decorator,
    Names,
    open_own_recipe,
    open_recipe,
    open_target,
    run_environment,
    show,
    with_options,
)
from envbuild.debian.lock import suites_by_python
from envbuild.environment import Environment
from envbuild.lock.advisories import (
    Exemption,
    LockChange,
    UpgradeReport,
    VerifiedUpgrade,
    accepted_line,
    audit,
    exemptions_of,
    expired_line,
)
from envbuild.lock.base import has_base
from envbuild.lock.conda import CondaLock, environment_text, explicit_text, export_name, pip_entries
from envbuild.lock.conda_format import part_of, render
from envbuild.lock.conda_kind import check_has_conda, conda_lock, resolve_pip
from envbuild.lock.conda_solve import solve_by_conda_lock
from envbuild.lock.format import Lock, without_credentials
from envbuild.lock.lifecycle import L, LockKind, Resolved, update
from envbuild.lock.offers import release_ages
from envbuild.locks import PARTS, check_locks, needed_locks, wheel_locks
from envbuild.recipe.find import recipe_files, search_folders
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.imports.packages import PackageEdit


EXPORTS = ("conda-lock", "environment", "explicit")
SOLVERS = ("rattler", "conda-lock")
_ALL = "*"


@click.command("lock")
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete.recipes)
@with_options("targets")
@click.option(
    "--upgrade",
    "upgrades",
    multiple=True,
    is_flag=False,
    flag_value=_ALL,
    metavar="[PKG]",
    help="Upgrade every package, or only PKG (repeatable). Otherwise locked versions stay.",
)
@click.option("--wheels", is_flag=True, help="Only the wheels; combines with --image and --conda.")
@click.option(
    "--image", is_flag=True, help="Only the base of container images, and the image in which their layers are compiled."
)
@click.option("--conda", is_flag=True, help="Only the recipe's conda packages.")
@click.option(
    "--solver",
    type=click.Choice(SOLVERS),
    default=SOLVERS[0],
    show_default=True,
    help="Solver of conda packages: envbuild itself, or conda-lock with a conda, mamba or micromamba on PATH "
    "(or in ENVBUILD_CONDA).",
)
@click.option("--check", is_flag=True, help="Change nothing; exit 3 when a lock is missing or stale.")
@click.option("--dry-run", is_flag=True, help="Resolve and show the changes; write nothing.")
@click.option(
    "--export",
    "exports",
    multiple=True,
    type=click.Choice(["pylock", *EXPORTS]),
    help="Also write the lock for other tools: PEP 751 pylock files; or the conda lock, with what pip adds, as "
    "conda-lock.yml, as environment.yml with exact pins, or as @EXPLICIT list. Repeatable.",
)
@click.option(
    "--export-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder for exported files. Default: here.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.md",
    help="Write a report of the changes; with a database in [audit] of the site, also of known vulnerabilities.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="With --report: build and verify the venv, or conda environment, of each target that this host runs, by the "
    "locks before and after; exit 5 if the latter fails.",
)
@click.option(
    "--allow-expired", is_flag=True, help="Lock Debian packages even from an archive whose Release file has expired."
)
@with_options("offline")
def lock_command(
    recipes: Names,
    targets: Names,
    upgrades: Names,
    wheels: bool,
    image: bool,
    conda: bool,
    solver: str,
    check: bool,
    dry_run: bool,
    exports: Names,
    export_dir: Path,
    report: Path | None,
    verify: bool,
    allow_expired: bool,
    offline: bool,
) -> None:
    """Make every lock that a build of RECIPE… needs, for all its targets, from any host.

    Locks are the wheels of each target (exact versions, and the sha256 of each suitable file, no URLs), the base of its
    container images (Debian packages, or an image's digest) with the image in which source layers are compiled, and the
    packages of [conda]. Wheels come from the indexes of pip's configuration; the recipe may add indexes.

    Wheels are resolved again each time, and locked versions stay if they still fit. The other locks are written if they
    are missing or the recipe changed; --upgrade renews them too. If a lock cannot be made, envbuild makes all the
    others first and ends with exit code 3; --wheels, --image and --conda select locks.

    \b
    Examples:
      envbuild lock pt_cpu
      envbuild lock pt_cpu --target cpu-aarch64 --upgrade=numpy
      envbuild lock pt_minimal --check
      envbuild lock pt_cpu --wheels --image
      envbuild lock pt_cpu --wheels --export pylock
      envbuild lock pt_cpu --conda
      envbuild lock pt_cpu --upgrade=pytorch
      envbuild lock pt_cpu --report upgrade.md --upgrade
      envbuild lock pt_cpu --report upgrade.md --verify --upgrade
      envbuild lock pt_cpu --conda --export conda-lock --export-dir exported
    """
    chosen = [part for part, on in zip(PARTS, (wheels, image, conda), strict=True) if on]
    parts = chosen or PARTS
    environment = replace(run_environment(), allow_expired=allow_expired)
    if not recipes and upgrades and upgrades[-1] in recipe_files(search_folders(environment.site.recipe_folders)):
        raise UsageError(
            f"--upgrade took the recipe {upgrades[-1]!r} as a package, and no recipe was named",
            f"write --upgrade last: envbuild lock {upgrades[-1]} --upgrade",
        )
    work = [
        (loaded, open_target(loaded, target, environment))
        for loaded in (open_recipe(name, environment) for name in recipes or (None,))
        for target in targets or loaded.recipe.targets
    ]
    if "conda" in chosen or set(EXPORTS) & set(exports):
        for loaded, _ in work:
            check_has_conda(loaded)
    for export in exports:
        exported = "conda" if export in EXPORTS else "wheels"
        if exported not in parts:
            raise UsageError(f"--export {export} is for a lock that this command does not write", f"add --{exported}")
    if check:
        check_locks(work, parts, log)
        return
    if verify and (report is None or dry_run):
        raise UsageError("--verify is for a report of locks that are written", "give --report FILE, without --dry-run")
    run = LockRun(
        environment,
        parts,
        None if _ALL in upgrades else upgrades,
        offline,
        write=not dry_run,
        by_conda_lock=solver == "conda-lock",
        folder=export_dir,
        exports=() if dry_run else tuple(dict.fromkeys(exports)),
    )
    before = []
    if verify:
        from envbuild.build.folder import verified_here  # with all that builds environments

        before = [verified_here(loaded, target, environment, offline=offline) for loaded, target in work]
    for part, lock in zip(PARTS, (run.lock_wheels, run.lock_images, run.lock_conda), strict=True):
        for loaded, target in work if part in parts else ():
            with run.kept():
                lock(loaded, target)
    run.write_conda_exports()
    for old, (loaded, target) in zip(before, work, strict=False):
        after = verified_here(loaded, target, environment, offline=offline)
        if old or after:
            run.report.verified.append(VerifiedUpgrade(loaded.recipe.name, target.name, old, after))
    if report is not None:
        with writing(report.parent, LockError):
            exemptions = exemptions_of(environment.site, [loaded for loaded, _ in work])
            write_beside(report, run.report.render(environment.site.audit, environment.store, exemptions))
    if run.errors:
        raise joined(LockError, run.errors)
    failed = [
        f"{upgrade.recipe} {upgrade.target}"
        for upgrade in run.report.verified
        if upgrade.after and not upgrade.after[0]["passed"]
    ]
    if failed:
        raise VerificationError(
            f"{', '.join(failed)}: the upgraded locks fail verification; see {report}",
            "restore the previous locks from version control, or upgrade fewer packages: --upgrade=PKG",
        )
    if run.report.faults:
        raise run.report.faults[0]


@dataclass(frozen=True, slots=True)
class LockRun:
    """One run of `envbuild lock`.

    Only packages in `upgrade` may change, all of them for None. `exports` are the formats in which locks are also
    written to `folder`; `exported` has the conda locks for each file of these. `errors` are the errors of locks that
    failed.
    """

    environment: Environment
    parts: Collection[str]
    upgrade: Collection[str] | None
    offline: bool
    write: bool
    by_conda_lock: bool
    exports: tuple[str, ...]
    folder: Path
    report: UpgradeReport = field(default_factory=UpgradeReport)
    exported: dict[tuple[str, Path], list[tuple[CondaLock, LoadedRecipe, str]]] = field(default_factory=dict)
    errors: list[LockError] = field(default_factory=list)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a LockError of the block in `errors`."""
        try:
            yield
        except LockError as error:
            self.errors.append(error)

    def lock_wheels(self, loaded: LoadedRecipe, target: Target) -> None:
        """Update the wheel lock of `target`, and export it."""
        if not loaded.has_wheels(target):
            return
        for kind in wheel_locks(loaded, target):
            with self.kept():
                self._lock_wheels(kind, loaded, target)

    def _lock_wheels(self, kind: LockKind[Lock], loaded: LoadedRecipe, target: Target) -> None:
        upgrade = self.upgrade
        if upgrade:
            old = kind.inspect().lock
            wheels = {package.name for package in old.packages} if old else set()
            conda = conda_lock(loaded, target).inspect().lock if loaded.has_conda else None
            # The conda lock takes the names that only it contains.
            upgrade = [n for n in upgrade if normalise(n) in wheels or conda is None or not conda.knows(n)]
        of_python = kind.label.removeprefix(kind.name)
        log(f"{loaded.recipe.name} {target.name}{of_python}: resolving …")
        made = self._update(kind, upgrade)
        pylock = made.pylock
        self._check_extensions(kind, made)
        if "pylock" in self.exports:
            # PEP 751: pylock.NAME.toml, without dots in NAME. Unlike the lock, it contains the URLs of this site.
            words = [
                loaded.recipe.name,
                target.name,
                *(f"python{variant}" for variant in [kind.recipe.variant] if variant),
            ]
            name = "-".join(words).replace(".", "-")
            self._write_export(self.folder / f"pylock.{name}.toml", without_credentials(pylock))

    def _check_extensions(self, kind: LockKind[Lock], made: Resolved[Lock]) -> None:
        """Warn of locked extensions that do not load with the locked torch; what cannot be read is a note."""
        if "torch" not in made.lock.versions:
            return
        from envbuild.extensions import LOCK_BYTES, Extensions  # most locks of CPU recipes have neither

        extensions = Extensions(
            kind.recipe, kind.target, made.lock, self.environment, self.offline, LOCK_BYTES, made.pylock
        )
        for finding in extensions.findings():
            if finding.status == "good":
                continue
            text = f"{kind.target.name}: {finding.text}"
            hint = f"; {finding.fix}" if finding.fix else ""
            log(f"{'warning' if finding.status == 'bad' else 'note'}: {text}{hint}")
            self.report.extensions.append(f"{kind.recipe.recipe.name}, {text}")

    def lock_images(self, loaded: LoadedRecipe, target: Target) -> None:
        """Update each lock of the target's images that is missing, stale or to be upgraded."""
        if "wheels" in self.parts and not has_base(loaded.recipe):
            known = " and ".join(suites_by_python())
            log(
                f"note: no lock for images: Debian has Python {known}, not {loaded.recipe.python}; for images choose"
                " one of these as `python`, or a `base` in [image]"
            )
            return
        for kind in needed_locks(loaded, target, ("image",)):
            with self.kept():
                state = kind.inspect()
                if self.offline and state.fault is not None:
                    raise LockError(
                        f"{state.path}: {state.fault}, and --offline forbids resolving it",
                        "leave --offline out, or make only the other locks: --wheels, --conda",
                    )
                if self.offline and self.upgrade is None:
                    log(f"{state.path}: left as it is (--offline)")
                elif state.fault is not None or self.upgrade is None:
                    self._update(kind, None)

    def lock_conda(self, loaded: LoadedRecipe, target: Target) -> None:
        """Update the conda lock of `target` if it is missing, stale or to be upgraded; collect what to export."""
        if not loaded.has_conda:
            return
        kind = conda_lock(loaded, target, solve_by_conda_lock if self.by_conda_lock else None)
        state = kind.inspect()
        upgrade = self.upgrade
        if upgrade and state.lock is not None and "wheels" in self.parts and loaded.has_wheels(target):
            # The wheel lock takes the other names.
            upgrade = [name for name in upgrade if state.lock.knows(name)]
        lock = state.lock if state.fault is None else None
        if upgrade is None or upgrade or lock is None or self.by_conda_lock:
            log(f"{loaded.recipe.name} {target.name}: solving conda packages …")
            lock = self._update(kind, upgrade).lock
        exports = [export for export in self.exports if export in EXPORTS]
        if exports and lock.pip.built:
            raise LockError(
                f"{loaded.path}: --export {exports[0]} has no {lock.pip.built[0].name}, built from source",
                "leave --export out: `envbuild conda` builds the environment from the lock",
            )
        pip = ""
        if lock.pip.packages and "conda-lock" in exports:
            # The lock contains no URLs, so uv resolves the locked packages again.
            ages, keep = release_ages(loaded, target, lock.as_of), lock.pip
            again = resolve_pip(
                loaded, target, self.environment, lock.packages, ages=ages, keep=keep, offline=self.offline
            )
            pip = pip_entries(lock, again.pylock)
        for export in exports:
            path = self.folder / export_name(export, lock.recipe, target)
            self.exported.setdefault((export, path), []).append((lock, loaded, pip))

    def write_conda_exports(self) -> None:
        """Write the conda locks in the formats of `exports`, and print the paths."""
        for (export, path), shares in self.exported.items():
            lock, loaded, _ = shares[0]
            if export == "environment":
                text = environment_text(lock, loaded.recipe.conda.channels)
            elif export == "explicit":
                text = explicit_text(lock)
            else:
                text = render([part_of(lock, loaded.recipe.conda.channels) for lock, loaded, _ in shares])
                text += "".join(pip for _, _, pip in shares)
            self._write_export(path, text)

    def _update(self, kind: LockKind[L], upgrade: Collection[str] | None) -> Resolved[L]:
        made = update(kind, self.environment, upgrade=upgrade, offline=self.offline, log=log, write=self.write)
        recipe, target = kind.recipe.recipe.name, kind.target.name
        change = LockChange(recipe, target, kind.name, made.changes, made.before, made.lock, made.limits)
        self.report.changes.append(change)
        return made

    def _write_export(self, path: Path, text: str) -> None:
        with writing(self.folder, LockError):
            write_beside(path, text)
        click.echo(path)


_PIP_OR_CONDA = click.option(
    "--conda/--pip",
    "conda",
    default=None,
    help="Match specs of [conda], or pip's requirements. Default: as the recipe's `environment`.",
)


def _shared(*own: Decorator) -> Decorator:
    return with_options(
        ("recipe", "The recipe. Default: the project's only one."),
        ("target", "Only this target. Default: all."),
        *own,
        "dry-run",
        "json",
    )


@click.command("add")
@click.argument("packages", nargs=-1, required=True, metavar="PACKAGE…")
@_shared(_PIP_OR_CONDA)
def add_command(
    packages: Names, recipe: str | None, target: str | None, conda: bool | None, dry_run: bool, as_json: bool
) -> None:
    """Add packages to the recipe, and lock it again.

    PACKAGE is a pip requirement, such as numpy, 'numpy>=2' or 'pkg @ git+https://…', or a match spec for a recipe of
    conda packages. If the recipe already has the package, its line gets the new version; torch gets the build of each
    target. Comments and layout of the recipe stay. If the packages cannot be locked, nothing is changed.

    \b
    Examples:
      envbuild add rich 'pillow>=11'
      envbuild add torch==2.13.0 --target cpu-x86_64
      envbuild add einops --recipe my_train --dry-run
    """
    from envbuild.imports.packages import add_packages

    environment = run_environment()
    loaded = open_own_recipe(recipe, environment)
    _finish(add_packages(loaded, packages, target=target, conda=conda), environment, dry_run, as_json)


@click.command("remove")
@click.argument("packages", nargs=-1, required=True, metavar="PACKAGE…")
@_shared()
def remove_command(packages: Names, recipe: str | None, target: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove packages from the recipe, and lock it again.

    PACKAGE is a name. It is removed from all lists of the recipe, or of --target, and from [indexes] and [build]. If
    the remaining packages cannot be locked, nothing is changed.

    \b
    Examples:
      envbuild remove rich
      envbuild remove einops --recipe my_train --dry-run
    """
    from envbuild.imports.packages import remove_packages

    environment = run_environment()
    loaded = open_own_recipe(recipe, environment)
    _finish(remove_packages(loaded, packages, target=target), environment, dry_run, as_json)


def _finish(edit: PackageEdit, environment: Environment, dry_run: bool, as_json: bool) -> None:
    """Lock and write the recipe, and print what changed."""
    path = edit.before.path
    for place, old, new in edit.changes:
        log(f"{path}: {place}: {f'{old} -> {new}' if old and new else f'+ {new}' if new else f'- {old}'}")
    if not edit.changes:
        log(f"{path}: nothing to change")
    locks = edit.lock(environment, write=not dry_run) if edit.changes else {}
    changes = [{"list": place, "before": old or None, "after": new or None} for place, old, new in edit.changes]
    about = {"path": str(path), "recipe": edit.after.recipe.name, "changes": changes, "locks": locks}
    show(as_json, about, path)


@click.command("audit")
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete.recipes)
@with_options("targets")
@click.option("--database", type=PATH, metavar="DIR", help="OSV's exports. Default: database in [audit] of the site.")
@click.option("--ignore", multiple=True, metavar="ID", help="Vulnerability to ignore; repeatable.")
@with_options("json")
def audit_command(recipes: Names, targets: Names, database: Path | None, ignore: Names, as_json: bool) -> None:
    """Look up the locked packages of RECIPE… in an offline database of vulnerabilities; exit code 5 if one has any.

    The database is a folder with OSV's exports, PyPI/all.zip and Debian/all.zip. If it is missing, damaged or older
    than max_age in [audit] (default 14d), the exit code is 5 too: packages that cannot be checked are never reported as
    safe. Missing locks are named. Conda packages count if they contain a Python distribution. Other conda packages, and
    packages of an existing base image, are not covered by the database; their number is printed.

    [audit.exceptions.ID] in the recipe or site.toml accepts a vulnerability for a reason until a day.

    \b
    Examples:
      envbuild audit pt_cpu --database /srv/osv
      envbuild audit pt_cpu pt_hf --target cpu-x86_64 --ignore GHSA-xxxx-xxxx-xxxx --json
    """
    environment = run_environment()
    table = environment.site.audit
    table = replace(table, database=str(database or table.database))
    locks: list[object] = []
    opened = [open_recipe(name, environment) for name in recipes or (None,)]
    exemptions = [Exemption(name, "option", None, "--ignore") for name in ignore] + exemptions_of(
        environment.site, opened
    )
    for loaded in opened:
        for target in [open_target(loaded, name, environment) for name in targets or loaded.recipe.targets]:
            for kind in needed_locks(loaded, target):
                state = kind.inspect()
                if state.lock is None:
                    log(f"{state.path}: {state.fault}; not looked up")
                elif state.fault is not None:
                    raise LockError(f"{state.path}: {state.fault}", f"make it again: `{kind.command}`")
                else:
                    locks.append(state.lock)
    if not locks:
        raise LockError("none of these recipes is locked", f"envbuild lock {' '.join(recipes)}".rstrip())
    done = audit(locks, table, datetime.now(UTC), exemptions)
    value: dict[str, Any] = {
        "database": table.database,
        "newest": done.newest.isoformat() if done.newest else None,
        "judged": done.judged,
        "not_in_database": done.unknown,
        "accepted": [
            {
                "package": advisory.package.name,
                "version": advisory.package.version,
                "advisory": advisory.id,
                **exemption.row(),
            }
            for advisory, exemption in done.accepted
        ],
        "expired": [exemption.row() for exemption in done.expired],
        "unused": [exemption.row() for exemption in done.unused],
        "found": [
            {
                "package": advisory.package.name,
                "version": advisory.package.version,
                "ecosystem": advisory.package.ecosystem,
                "id": advisory.id,
                "aliases": advisory.aliases,
                "summary": advisory.summary,
                "fixed": advisory.fixed,
            }
            for advisory in done.advisories
        ],
    }
    rows = [
        [
            f"{advisory.package.name} {advisory.package.version}",
            advisory.id,
            ", ".join(advisory.fixed) or "-",
            advisory.summary,
        ]
        for advisory in done.advisories
    ]
    show(as_json, value, *layout.columns(rows))
    for advisory, exemption in done.accepted:
        log(f"{advisory.package.name} {advisory.package.version}: {accepted_line(exemption)}")
    for exemption in done.unused:
        log(f"note: the exception of {exemption.id} matches no locked package ({exemption.place})")
    others = f"; {done.unknown} others are not covered by the database" if done.unknown else ""
    log(f"{done.judged} packages looked up{others}: {len(done.advisories)} vulnerabilities")
    if done.advisories:
        raise VerificationError(
            f"{len({advisory.package for advisory in done.advisories})} packages have known vulnerabilities"
            + "".join(f"\n  {expired_line(exemption)}" for exemption in done.expired),
            "upgrade them: envbuild lock RECIPE --upgrade=PKG; or accept one for a reason until a day, in"
            " [audit.exceptions.ID] of the recipe or of site.toml",
        )
