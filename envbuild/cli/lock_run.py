"""The work of `envbuild lock`: makes each lock, collects what cannot be made, and exports."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click

from envbuild.atomic import write_atomically, writing
from envbuild.environment import Environment
from envbuild.errors import LockError
from envbuild.lock import conda_export
from envbuild.lock.conda import CondaLock
from envbuild.lock.conda_export import PipFile
from envbuild.lock.conda_format import part_of
from envbuild.lock.conda_kind import conda_lock, knows
from envbuild.lock.conda_lock_tool import solve_by_conda_lock
from envbuild.lock.conda_pip import resolve_pip
from envbuild.lock.export import without_credentials
from envbuild.lock.lifecycle import LockKind, Resolved, update
from envbuild.lock.state import L
from envbuild.lock.wheels import wheel_lock
from envbuild.locks import has_conda, has_wheels, needed_locks
from envbuild.names import normalise
from envbuild.progress import log
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target


@dataclass(frozen=True, slots=True)
class LockRun:
    """One run of `envbuild lock`.

    Only packages in `upgrade` may change, all of them for None. `export` is the format in which locks are also written
    to `folder`, None for none. `errors` are those of the locks that could not be made.
    """

    environment: Environment
    parts: Collection[str]
    upgrade: Collection[str] | None
    offline: bool
    write: bool
    by_conda_lock: bool
    export: str | None
    folder: Path
    exports: dict[Path, list[tuple[CondaLock, LoadedRecipe, tuple[PipFile, ...]]]] = field(default_factory=dict)
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
        if not has_wheels(loaded, target):
            return
        kind = wheel_lock(loaded, target)
        upgrade = self.upgrade
        if upgrade:
            old = kind.inspect().lock
            wheels = {package.name for package in old.packages} if old else set()
            conda = conda_lock(loaded, target).inspect().lock if has_conda(loaded) else None
            # The conda lock takes the names that only it contains.
            upgrade = [n for n in upgrade if normalise(n) in wheels or conda is None or not knows(conda, n)]
        log(f"{loaded.recipe.name} {target.name}: resolving …")
        pylock = self._update(kind, upgrade).pylock
        if self.export == "pylock":
            # PEP 751: pylock.NAME.toml, without dots in NAME. Unlike the lock, it contains the URLs of this site.
            name = f"{loaded.recipe.name}-{target.name}".replace(".", "-")
            self._write_export(self.folder / f"pylock.{name}.toml", without_credentials(pylock))

    def lock_images(self, loaded: LoadedRecipe, target: Target) -> None:
        """Update each lock of the target's images that is missing, stale or to be upgraded."""
        for kind in needed_locks(loaded, target, ("image",)):
            with self.kept():
                state = kind.inspect()
                if self.offline and state.fault is not None:
                    raise LockError(
                        f"{state.path}: {state.fault}, and --offline forbids to resolve it",
                        "leave --offline out, or lock the rest alone: --wheels, --conda",
                    )
                if self.offline and self.upgrade is None:
                    log(f"{state.path}: left as it is (--offline)")
                elif state.fault is not None or self.upgrade is None:
                    self._update(kind, None)

    def lock_conda(self, loaded: LoadedRecipe, target: Target) -> None:
        """Update the conda lock of `target` if it is missing, stale or to be upgraded; collect what to export."""
        if not has_conda(loaded):
            return
        kind = conda_lock(loaded, target, solve_by_conda_lock if self.by_conda_lock else None)
        state = kind.inspect()
        upgrade = self.upgrade
        if upgrade and state.lock is not None and "wheels" in self.parts and has_wheels(loaded, target):
            # The wheel lock takes the other names.
            upgrade = [name for name in upgrade if knows(state.lock, name)]
        lock = state.lock if state.fault is None else None
        if upgrade is None or upgrade or lock is None or self.by_conda_lock:
            log(f"{loaded.recipe.name} {target.name}: solving conda packages …")
            lock = self._update(kind, upgrade).lock
        if self.export is None or self.export == "pylock":
            return
        pip: tuple[PipFile, ...] = ()
        if lock.pip.packages and self.export == "conda-lock":
            # The lock contains no URLs, so uv resolves the locked packages again.
            again = resolve_pip(loaded, target, self.environment, lock.packages, keep=lock.pip, offline=self.offline)
            pip = conda_export.pip_files(lock, again.pylock)
        path = self.folder / conda_export.file_name(self.export, lock.recipe, target)
        self.exports.setdefault(path, []).append((lock, loaded, pip))

    def write_conda_exports(self) -> None:
        """Write the conda locks in the format of `export`, and print the paths."""
        for path, shares in self.exports.items():
            lock, loaded, _ = shares[0]
            if self.export == "environment":
                text = conda_export.environment_text(lock, loaded.recipe.conda.channels)
            elif self.export == "explicit":
                text = conda_export.explicit_text(lock)
            else:
                text = conda_export.conda_lock_text(
                    [part_of(lock, loaded.recipe.conda.channels) for lock, loaded, _ in shares],
                    {lock.target: pip for lock, _, pip in shares},
                )
            self._write_export(path, text)

    def _update(self, kind: LockKind[L], upgrade: Collection[str] | None) -> Resolved[L]:
        return update(kind, self.environment, upgrade=upgrade, offline=self.offline, log=log, write=self.write)

    def _write_export(self, path: Path, text: str) -> None:
        with writing(self.folder, LockError):
            write_atomically(path, text)
        click.echo(path)
