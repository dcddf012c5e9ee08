"""Verification of a new artifact, and its replacement of the old one; shared by all kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild import atomic
from envbuild.environment import Environment
from envbuild.errors import VerificationError
from envbuild.plan.plan import Plan
from envbuild.progress import Log

if TYPE_CHECKING:
    from envbuild.verify.model import Settings
    from envbuild.verify.subject import Subject


@dataclass(frozen=True, slots=True)
class Result:
    """A finished artifact.

    `receipt` is None without verification. `built` and `verified` say whether this run did so or found it done.
    `warnings` are those of the lock.
    """

    path: Path
    digest: str
    target: str
    receipt: Path | None
    seconds: float
    built: bool
    verified: bool
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
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


def verify_staged(
    subject: Subject,
    settings: Settings,
    environment: Environment,
    log: Log,
    final: Path,
    *,
    staged: Path | None = None,
    held: str = "",
    told: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Verify `subject`, to be placed at `final`, and return its passing receipt, which includes `told`.

    When verification fails, moves `staged` to NAME.failed, writes the failing receipt beside that path, and
    raises VerificationError; an artifact that is already at `final` stays there. `held` says where a failed
    artifact is that has no path.
    """
    from envbuild.verify.explain import failures
    from envbuild.verify.receipt import make_receipt, receipt_path, write_receipt
    from envbuild.verify.run import verify

    logs = final.with_name(f"{final.name}.verify-logs")
    verdict = verify(subject, settings, environment.variables, log, logs=logs)
    failed = final if verdict.passed or staged == final else failed_path(final)
    receipt = make_receipt(subject, verdict, failed)
    receipt["artifact"] |= told or {}
    if verdict.passed:
        log(f"verified: {len(verdict.checks)} checks passed in {verdict.seconds:.1f} s")
        return receipt
    kept = ""
    with atomic.writing(final.parent):
        if staged is not None and staged != final:
            kept = f"{final} is as it was; " if final.exists() else ""
            atomic.replace(staged, failed)
        write_receipt(receipt, failed)
    held = held or f"{kept}the failed artifact is {failed}"
    raise VerificationError(
        failures(verdict.checks), f"{held}, the evidence {receipt_path(failed)}, the nodes' logs {verdict.logs}"
    )


def failed_path(path: Path) -> Path:
    """Return the path at which an artifact for `path` is kept when it fails verification."""
    return path.with_name(f"{path.name}.failed")


def commit(staged: Path, final: Path, receipt: dict[str, Any] | None, *, known: bool = False) -> None:
    """Let `staged` replace the artifact at `final`, and write its receipt, unless that is `known` to be there."""
    atomic.replace(staged, final)
    # The receipt comes last: if a run stops before this line, the next one finds no receipt of this content and
    # verifies.
    if not known:
        keep_receipt(receipt, final)


def keep_receipt(receipt: dict[str, Any] | None, path: Path) -> None:
    """Write the receipt of the artifact at `path`, or remove the previous artifact's receipt for None.

    The receipt of NAME.failed is kept as long as that artifact exists.
    """
    from envbuild.verify.receipt import receipt_path, write_receipt

    with atomic.writing(path.parent):
        if receipt is None:
            receipt_path(path).unlink(missing_ok=True)
            return
        write_receipt(receipt, path)
        if not failed_path(path).exists():
            receipt_path(failed_path(path)).unlink(missing_ok=True)


def settings_of(table: dict[str, Any], overrides: dict[str, Any]) -> Settings:
    """Return the settings of a verification: the recipe's [verify] `table` with `overrides` that are not None."""
    from envbuild.verify.model import Settings

    known = {field.name for field in fields(Settings)}
    given = {name: value for name, value in overrides.items() if value is not None}
    return Settings(**{name: value for name, value in {**table, **given}.items() if name in known})


def has_receipt(path: Path, digest: str, plan: Plan, faults: bool) -> bool:
    """Return whether a passing receipt for this content, as thorough as the plan requires, is beside `path`."""
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
