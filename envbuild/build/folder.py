"""Builds of environments in a folder of this host, of any kind: from a recipe to a verified environment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from envbuild.base import atomic, host
from envbuild.base.errors import BuildError, HostError, LockError, UsageError, VerificationError
from envbuild.base.files import absolute_path
from envbuild.base.progress import log
from envbuild.build.commit import (
    Result,
    check_unverified_gpus,
    commit,
    failed_path,
    has_receipt,
    keep_receipt,
    verify_staged,
)
from envbuild.build.installing import FolderBuild, InstalledFilesDiffer, LayerFolder
from envbuild.build.kinds import folder_module
from envbuild.build.prepare import build_layers, prepare
from envbuild.contract.kinds import CONDA, VENV, FolderArtifact
from envbuild.contract.manifest import changes, move_seal, read_manifest, shown
from envbuild.contract.receipt import manifest_of, read_receipt, receipt_path
from envbuild.contract.state import State, check_place
from envbuild.contract.verification import FULL, Thoroughness
from envbuild.environment import Environment, own_command
from envbuild.interpreter import HostPython
from envbuild.layers.requested import RequestedLayers, before_environment, check_here, for_host, requested_layers
from envbuild.layers.source_job import BuildPython
from envbuild.layers.wheel import Trainer
from envbuild.lock.lifecycle import LockUse
from envbuild.plan import Plan
from envbuild.pythons import OfferedPython, choose_python, keep_python, provide_python
from envbuild.recipe.find import command_word
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target, check_host, host_arch
from envbuild.verify.elf_files import folder_gpu_code


def prepare_folder(
    kind: FolderArtifact,
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    compile_bytecode: bool = False,
    editable: bool = False,
    here: bool = True,
    python: str | None = None,
    verify: bool | None = None,
    **use: Unpack[LockUse],
) -> tuple[Plan, Trainer]:
    """Return the plan of an environment of `kind`, and its trainer. Raises UsageError, HostError if built `here`.

    `python` is as in `make_environment`. The Python of a virtual environment is chosen first, before packages are
    resolved; it is downloaded only if locks may be written.
    """
    if here:
        check_host(folder_module(kind).TITLE, target)
    if editable and loaded.code is None:
        raise UsageError(f"--editable: recipe {loaded.recipe.name} has no [project]", 'add one: [project] path = ".."')
    if not kind.of_conda and not loaded.has_wheels(target):
        raise UsageError(
            f"recipe {loaded.recipe.name} has conda packages and no requirements; it cannot be a {kind.name}",
            f"build it with `envbuild conda {command_word(loaded)}`",
        )
    if here and not kind.of_conda:
        loaded = _for_python(loaded, target, environment, python, **use)
    layers = for_host(loaded, target, environment) if here else requested_layers(loaded, target)
    plan, trainer = prepare(
        loaded,
        target,
        environment,
        artifact=kind.name,
        compile_bytecode=compile_bytecode,
        conda=kind.of_conda,
        layers=layers,
        editable=editable,
        verify=verify,
        **use,
    )
    if here:
        check_here(RequestedLayers(plan.sources, plan.host_layers), environment)
    return plan, trainer


def _for_python(
    loaded: LoadedRecipe, target: Target, environment: Environment, python: str | None, **use: Unpack[LockUse]
) -> LoadedRecipe:
    """Return the recipe with the Python that its virtual environment gets on this host, which may be downloaded."""
    recipe, version = loaded.recipe, python or loaded.recipe.python
    try:
        choose = provide_python if use.get("write", True) else choose_python
        chosen = choose(version, environment, offline=use["offline"])
    except HostError as error:
        here = [other for other in recipe.targets[target.name].pythons if other != version and _has(other, environment)]
        if python is not None or not here:
            raise
        command = f"{own_command()} venv {command_word(loaded)} --python {here[-1]}"
        raise HostError(error.message, f"run `{command}`: the recipe has a lock for it; or {error.hint}") from None
    if isinstance(chosen, OfferedPython):
        log(f"this host has no Python {chosen.minor}; the build gets {chosen}")
    if (loaded_recipe := loaded.for_python(target, chosen.minor)) is None:
        other = f", or name {chosen.minor} in `pythons` of its target {target.name}," if python else ""
        raise HostError(
            f"--python {python} is Python {chosen.version}; recipe {recipe.name} wants Python {recipe.python}",
            f"give a Python {recipe.python}, or change `python` in the recipe{other} and lock it again",
        )
    return loaded_recipe


def _has(python: str, environment: Environment) -> bool:
    try:
        return isinstance(choose_python(python, environment, offline=True), HostPython)
    except HostError:
        return False


def make_environment(
    kind: FolderArtifact,
    plan: Plan,
    trainer: Trainer,
    environment: Environment,
    path: Path,
    *,
    offline: bool,
    python: str | None = None,
    verify: bool = True,
    asked: Thoroughness = FULL,
    exact: bool = False,
    digest: str = "",
) -> Result:
    """Build and verify the environment of `plan` at `path`, unless the existing one is current, by `exact` comparison.

    An environment whose digest is not `digest` ("" for any) raises BuildError before its code is run. The new
    environment replaces the old one only after it passed. If it fails, the old one stays, the failed one is kept as
    NAME.failed with its receipt, and VerificationError is raised.
    """
    started = time.monotonic()
    module, workers = folder_module(kind), host.workers(environment.variables)

    def proven(where: Path, state: State) -> dict[str, Any]:
        from envbuild.verify.host import folder_subject

        settings = plan.verify.override(asdict(asked))
        subject = folder_subject(where, state, module, environment, fresh=where != path)
        return verify_staged(subject, settings, environment, path, staged=where)

    def check(state: State) -> None:
        if digest not in ("", state.digest):
            raise BuildError(
                f"{path}: the digest of the rebuilt environment is {state.digest}, but the pushed one has {digest}"
            )

    def result(state: State, *, built: bool, verified: bool) -> Result:
        receipt = receipt_path(path) if verify else None
        seconds = time.monotonic() - started
        return Result(path, state.digest, state.target, receipt, seconds, built, verified, plan.warnings)

    if path.is_symlink():  # replace the folder that the link names, not the link
        path = Path(os.path.realpath(path))  # of a loop, too
    check_place(path)
    with atomic.exclusive(path, log):
        state = check_place(path)
        if state is None:
            count = len(plan.packages) + len(plan.conda)
            log(f"{path}: building {plan.recipe} for {plan.target}, {count} packages")
        elif state.plan_digest != plan.digest:
            log(f"{path}: the plan changed since it was built; building again")
        elif state.verify != plan.verify:
            # Else `envbuild verify`, which has the artifact's own, would judge by the old ones.
            log(f"{path}: [verify] of its recipe changed since it was built; building again")
        elif not module.is_current(path, state, python):
            log(f"{path}: its packages or its interpreter changed since the build; building again")
        elif changed := changes(path, state, manifest_of(path), environment.store, workers, exact=exact):
            log(f"{path}: {shown(changed)} changed since the build; building again")
        else:
            check(state)
            keep_python(state.python_build, path, environment.store)
            known = not verify or has_receipt(path, state.digest, plan, asked)
            if not known:
                keep_receipt(proven(path, state), path)
            return result(state, built=False, verified=not known)
        with atomic.staged(path) as staged:
            layers = _layers(plan, environment, offline)
            final = absolute_path(path)
            build = FolderBuild(plan, trainer, environment, staged, final, offline, layers, python)
            try:
                state = module.build(build)
            except InstalledFilesDiffer as error:
                # Environments share files with the store by hard links, and somebody edited one of them in its place.
                log(f"{path}: {error.message}; a file of the store was changed, and its packages are unpacked again")
                atomic.remove(staged)
                with atomic.writing(path.parent):
                    staged.mkdir(mode=0o700)
                state = module.build(build)
            check(state)
            if not verify:
                check_unverified_gpus(state, environment.site, lambda target: folder_gpu_code(staged, target))
            commit(staged, path, proven(staged, state) if verify else None)
            move_seal(staged, path, environment.store)
    return result(state, built=True, verified=verify)


def _layers(plan: Plan, environment: Environment, offline: bool) -> Callable[[Path], Sequence[LayerFolder]]:
    """Return a function from a new environment's interpreter to the source layers of `plan`.

    Python projects are compiled against the packages of that environment. All other layers are built at once, so that
    they fail early.
    """
    requested = RequestedLayers(plan.sources, plan.host_layers)
    first = build_layers(before_environment(requested), plan.folder, environment, offline=offline)
    if len(first) == len(requested.sources):
        return lambda python: first

    def late(python: Path) -> Sequence[LayerFolder]:
        build_python = BuildPython(os.path.abspath(python), plan.python)
        return build_layers(requested, plan.folder, environment, offline=offline, python=build_python)

    return late


def verified_here(
    loaded: LoadedRecipe, target: Target, environment: Environment, *, offline: bool
) -> tuple[Mapping[str, Any], int] | None:
    """Build and verify the venv, or else the conda environment, at its default path unless it is current.

    Returns its receipt, passing or not, and the size of its files in bytes; None without locks, or for a target of
    another architecture. Raises BuildError.
    """
    if target.arch != host_arch():
        return None
    kind = VENV if loaded.has_wheels(target) else CONDA
    path = kind.default_path(loaded.recipe.name, target.name)
    try:
        plan, trainer = prepare_folder(kind, loaded, target, environment, locked=True, offline=offline, log=log)
        make_environment(kind, plan, trainer, environment, path, offline=offline)
    except LockError as error:
        log(f"{loaded.recipe.name} {target.name}: not verified: {error.message}")
        return None
    except VerificationError as error:
        log(f"{loaded.recipe.name} {target.name}: {error.message}")
        path = failed_path(path)
    manifest = read_manifest(path)
    size = sum(row.size for row in manifest.rows.values()) if manifest else 0
    return read_receipt(receipt_path(path)), size
