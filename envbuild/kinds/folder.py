"""Environments in a folder of this host, of any kind: from a recipe to a verified environment at its path."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from envbuild import atomic
from envbuild.artifacts.folder import check_host
from envbuild.artifacts.state import State, check_place
from envbuild.environment import Environment
from envbuild.errors import UsageError
from envbuild.kinds.base import FolderArtifact
from envbuild.kinds.commit import Result, commit, has_receipt, keep_receipt, settings_of, verify_staged
from envbuild.kinds.prepare import prepare
from envbuild.kinds.source_layers import build_layers
from envbuild.layers.requested import RequestedLayers, before_environment, check_here, for_host, requested_layers
from envbuild.layers.trainer import Trainer
from envbuild.lock.state import LockUse
from envbuild.locks import has_wheels
from envbuild.plan.plan import Plan
from envbuild.progress import Log
from envbuild.recipe.find import command_word
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.artifacts.layers_in import LayerFolder


def prepare_folder(
    kind: FolderArtifact,
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    compile_bytecode: bool = False,
    here: bool = True,
    **use: Unpack[LockUse],
) -> tuple[Plan, Trainer]:
    """Return the plan of an environment of `kind`, and its trainer; see `prepare`.

    Raises UsageError when this kind cannot be built from the recipe, HostError when it is to be built `here`
    and this host cannot build it.
    """
    if here:
        check_host(kind.module().TITLE, target)
    if not kind.of_conda and not has_wheels(loaded, target):
        raise UsageError(
            f"recipe {loaded.recipe.name} has conda packages and no requirements, so there is no {kind.name} of it",
            f"build it with `envbuild conda {command_word(loaded)}`",
        )
    layers = for_host(loaded, target, environment) if here else requested_layers(loaded, target)
    plan, trainer = prepare(
        loaded, target, environment, artifact=kind.name, compile_bytecode=compile_bytecode,
        conda=kind.of_conda, layers=layers, **use,
    )  # fmt: skip
    if here:
        check_here(RequestedLayers(plan.sources, plan.host_layers), environment)
    return plan, trainer


def make_environment(
    kind: FolderArtifact,
    plan: Plan,
    trainer: Trainer,
    environment: Environment,
    path: Path,
    log: Log,
    *,
    offline: bool,
    python: str | None = None,
    verify: bool = True,
    faults: bool = False,
) -> Result:
    """Build and verify the environment of `plan` at `path`, unless the existing one is current.

    The new environment replaces the old one only after it passed. If it fails, the old one stays, the failed
    one is kept as NAME.failed with its receipt, and VerificationError is raised.
    """
    from envbuild.verify.receipt import receipt_path

    started = time.monotonic()
    module = kind.module()

    def proven(where: Path, state: State) -> dict[str, Any]:
        from envbuild.verify.folder_subject import folder_subject

        settings = settings_of(plan.verify_settings(), {"faults": faults})
        subject = folder_subject(where, state, module)
        return verify_staged(subject, settings, environment, log, path, staged=where)

    def result(state: State, *, built: bool, verified: bool) -> Result:
        receipt = receipt_path(path) if verify else None
        seconds = time.monotonic() - started
        return Result(path, state.digest, state.target, receipt, seconds, built, verified, plan.warnings)

    if path.is_symlink():  # replace the folder that the link names, not the link
        path = path.resolve()
    check_place(path)
    with atomic.exclusive(path, log):
        state = check_place(path)
        if state is not None and state.plan_digest == plan.digest and module.is_current(path, state, python):
            known = not verify or has_receipt(path, state.digest, plan, faults)
            if not known:
                keep_receipt(proven(path, state), path)
            return result(state, built=False, verified=not known)
        _say_why(path, state, plan, log)
        with atomic.staged(path) as staged:
            state = module.build(
                plan, trainer, environment, staged, path.absolute(),
                offline=offline, layers=_layers(plan, environment, log, offline), python=python,
            )  # fmt: skip
            receipt = proven(staged, state) if verify else None
            commit(staged, path, receipt)
    return result(state, built=True, verified=verify)


def _say_why(path: Path, state: State | None, plan: Plan, log: Log) -> None:
    if state is None:
        count = len(plan.packages) + len(plan.conda)
        log(f"{path}: building {plan.recipe} for {plan.target}, {count} packages")
    elif state.plan_digest != plan.digest:
        log(f"{path}: the plan changed since it was built; building again")
    else:
        log(f"{path}: its packages or its interpreter changed since the build; building again")


def _layers(plan: Plan, environment: Environment, log: Log, offline: bool) -> Callable[[Path], Sequence[LayerFolder]]:
    """Return a function from a new environment's interpreter to the source layers of `plan`.

    Python projects are compiled against the packages of that environment. All other layers are built now, so
    that their errors come early.
    """
    requested = RequestedLayers(plan.sources, plan.host_layers)
    first = build_layers(before_environment(requested), plan.folder, environment, log, offline=offline)
    if len(first) == len(requested.sources):
        return lambda python: first
    return lambda python: build_layers(requested, plan.folder, environment, log, offline=offline, python=python)
