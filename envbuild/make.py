"""The way through the house: recipe → lock → plan → artifact → verified → receipt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from envbuild.artifacts import place
from envbuild.artifacts.state import State, check_place
from envbuild.environment import Environment
from envbuild.errors import VerificationError
from envbuild.layers.trainer import Trainer, load_trainer
from envbuild.lock.conda import CondaLock
from envbuild.lock.format import Lock
from envbuild.lock.manage import ensure_lock
from envbuild.make_checks import RequestedLayers
from envbuild.make_layers import against, on_host
from envbuild.plan.plan import ImageInputs, Plan, make_plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished artifact. `receipt` is None where verification was left out; `built` and `verified`
    tell whether this run did so or found it done; `warnings` are those of the lock."""

    path: Path
    digest: str
    target: str
    receipt: Path | None
    seconds: float
    built: bool
    verified: bool
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "path": str(self.path.absolute()),
            "digest": self.digest,
            "receipt": str(self.receipt.absolute()) if self.receipt else None,
            "target": self.target,
            "seconds": round(self.seconds, 3),
            "built": self.built,
            "verified": self.verified,
            "warnings": list(self.warnings),
        }


def prepare(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    artifact: str,
    locked: bool,
    offline: bool,
    say: Say,
    compile_bytecode: bool = False,
    image: ImageInputs | None = None,
    conda: bool = False,
    layers: RequestedLayers | None = None,
    write: bool = True,
) -> tuple[Plan, Trainer]:
    """The plan of `artifact`, from a lock that is made when it is missing or stale, and its trainer. Without `write` no
    lock is written.

    `conda` tells that it is made of the recipe's conda packages; `layers` are its source-built ones where this host
    does not build them.
    """
    layers = layers or on_host(loaded, target, environment)
    lock: Lock | CondaLock
    if conda:
        from envbuild.lock.conda_manage import ensure_conda_lock

        lock = ensure_conda_lock(
            loaded, target, environment, locked=locked, offline=offline, say=say, write=write
        )
    else:
        lock = ensure_lock(
            loaded, target, environment, locked=locked, offline=offline, say=say, write=write
        )
    layers = against(layers, lock)
    trainer = load_trainer()
    plan = make_plan(
        loaded.recipe,
        loaded.digest,
        lock,
        target,
        artifact=artifact,
        trainer_version=trainer.version,
        trainer_digest=trainer.digest,
        compile_bytecode=compile_bytecode,
        image=image,
        folder=loaded.folder,
        sources=layers.sources,
        host_layers=layers.hosts,
    )
    return plan, trainer


class Kind(Protocol):
    """An environment in a folder, as `make_environment` handles it: one that is there, and a new one."""

    def is_current(self, path: Path, state: State) -> bool:
        """Whether what stands at `path` is what the plan asks for, judged quickly."""
        ...

    def build(self, staged: Path, final: Path) -> State:
        """Make the environment in the empty folder `staged`, for `final` as its place, and return its state."""
        ...


def make_environment(
    kind: Kind,
    plan: Plan,
    environment: Environment,
    path: Path,
    say: Say,
    *,
    verify: bool = True,
    faults: bool = False,
) -> Result:
    """Build and verify the environment of `plan` at `path`; what is current already is left alone.

    The new environment takes its place only after it passed. When it fails, the old one stays, the
    failed one is kept beside it as NAME.failed with its receipt, and VerificationError is raised.
    """
    started = time.monotonic()
    if path.is_symlink():  # the folder that it names is replaced, not the link
        path = path.resolve()
    check_place(path)
    with place.exclusive(path, say):
        state = check_place(path)
        if state is not None and state.plan_digest == plan.digest and kind.is_current(path, state):
            verified = False
            if verify and not has_receipt(path, state.digest, plan, faults):
                _keep_receipt(_verify(path, path, state, plan, environment, say, faults), path)
                verified = True
            return _result(
                path, state, plan, started, built=False, verified=verified, verify=verify
            )
        _say_why(path, state, plan, say)
        staged = place.staging(path)
        try:
            place.create(staged)
            state = kind.build(staged, path.absolute())
            receipt = None
            if verify:
                receipt = _verify(staged, path, state, plan, environment, say, faults)
            place.swap_in(staged, path)
            # Last: cut off before this, the next call finds no receipt of this content and verifies.
            _keep_receipt(receipt, path)
        except BaseException:
            place.remove(staged)
            raise
    return _result(path, state, plan, started, built=True, verified=verify, verify=verify)


def verify_artifact(
    path: Path,
    environment: Environment,
    say: Say,
    overrides: dict[str, Any],
    runtime: str | None = None,
) -> tuple[State, dict[str, Any]]:
    """Verify the artifact at `path` again and write its receipt, passing or not. `runtime` launches an image
    file, None for the best that this host has.

    Returns the artifact's state and the receipt. Raises UsageError when nothing of ours is there.
    """
    from envbuild.verify.needs_torch import check_built_torch
    from envbuild.verify.open import open_subject
    from envbuild.verify.receipt import make_receipt, write_receipt
    from envbuild.verify.run import verify

    subject = open_subject(path, environment, runtime)
    check_built_torch(subject.state, path)
    settings = settings_of(subject.state.verify, overrides)
    verdict = verify(subject, settings, environment.variables, say, logs=_logs(path))
    receipt = make_receipt(subject, verdict, path)
    receipt["logs"] = str(verdict.logs.absolute()) if verdict.logs else None
    with place.writing(path.parent):
        write_receipt(receipt, path)
    return subject.state, receipt


def _verify(
    where: Path,
    final: Path,
    state: State,
    plan: Plan,
    environment: Environment,
    say: Say,
    faults: bool,
) -> dict[str, Any]:
    """Verify the environment at `where`, to be placed at `final`, and return its passing receipt.

    Raises VerificationError after keeping what failed, with a receipt that says so.
    """
    from envbuild.verify.explain import failures
    from envbuild.verify.open import folder_subject
    from envbuild.verify.receipt import make_receipt, receipt_path, write_receipt
    from envbuild.verify.run import verify

    subject = folder_subject(where, state)
    settings = settings_of(plan.verify_settings(), {"faults": faults})
    verdict = verify(subject, settings, environment.variables, say, logs=_logs(final))
    if verdict.passed:
        say(f"verified: {len(verdict.checks)} checks passed in {verdict.seconds:.1f} s")
        return make_receipt(subject, verdict, final)
    failed = final
    with place.writing(final.parent):
        if where != final:
            failed = final.with_name(f"{final.name}.failed")
            place.swap_in(where, failed)
        write_receipt(make_receipt(subject, verdict, failed), failed)
    kept = f"{final} is as it was; " if where != final and final.exists() else ""
    raise VerificationError(
        failures(verdict.checks),
        f"{kept}what failed is {failed}, the evidence {receipt_path(failed)}, the nodes' logs {verdict.logs}",
    )


def settings_of(table: dict[str, Any], overrides: dict[str, Any]) -> Any:
    from envbuild.verify.model import Settings

    known = {field.name for field in fields(Settings)}
    given = {name: value for name, value in overrides.items() if value is not None}
    return Settings(**{name: value for name, value in {**table, **given}.items() if name in known})


def has_receipt(path: Path, digest: str, plan: Plan, faults: bool) -> bool:
    """Whether a passing receipt for this content, no less thorough than the recipe asks, lies beside `path`."""
    from envbuild.verify.receipt import passing_receipt

    receipt = passing_receipt(path, digest)
    if receipt is None:
        return False
    had, wanted = receipt["settings"], plan.verify_settings()
    return (
        had["nodes"] >= wanted["nodes"]
        and had["nodes"] * had["nproc_per_node"] >= wanted["nodes"] * wanted["nproc_per_node"]
        and had["epochs"] >= wanted["epochs"]
        and had["loss_tolerance"] <= wanted["loss_tolerance"]
        and had["model"] == wanted["model"]
        and had.get("busbw_floor", 0.0) >= wanted.get("busbw_floor", 0.0)
        and (had["faults"] or not faults)
    )


def _say_why(path: Path, state: State | None, plan: Plan, say: Say) -> None:
    if state is None:
        count = len(plan.packages) + len(plan.conda)
        say(f"{path}: building {plan.recipe} for {plan.target}, {count} packages")
    elif state.plan_digest != plan.digest:
        say(f"{path}: the plan changed since it was built; building again")
    else:
        say(f"{path}: no longer what was built (packages or interpreter); building again")


def _keep_receipt(receipt: dict[str, Any] | None, path: Path) -> None:
    """Write the receipt of what is now at `path`; without one, the receipt of what was there goes."""
    from envbuild.verify.receipt import receipt_path, write_receipt

    with place.writing(path.parent):
        if receipt is not None:
            write_receipt(receipt, path)
        else:
            receipt_path(path).unlink(missing_ok=True)


def _result(
    path: Path,
    state: State,
    plan: Plan,
    started: float,
    *,
    built: bool,
    verified: bool,
    verify: bool,
) -> Result:
    from envbuild.verify.receipt import receipt_path

    seconds = time.monotonic() - started
    receipt = receipt_path(path) if verify else None
    return Result(
        path, state.digest, state.target, receipt, seconds, built, verified, plan.warnings
    )


def _logs(path: Path) -> Path:
    return path.with_name(f"{path.name}.verify-logs")
