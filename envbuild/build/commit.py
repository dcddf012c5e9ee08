"""Verification of artifacts of all kinds; a new artifact then replaces the old one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.base import atomic
from envbuild.base.errors import UsageError, VerificationError
from envbuild.base.files import absolute_path
from envbuild.base.progress import log
from envbuild.build.kinds import folder_module, kind_at, read_artifact
from envbuild.contract.kinds import DOCKER, FileArtifact, FolderArtifact
from envbuild.contract.receipt import failures, passed_line, passing_receipt, receipt_path, write_receipt
from envbuild.contract.state import State
from envbuild.contract.verification import Thoroughness, VerifySettings, parse_settings
from envbuild.environment import Environment
from envbuild.gpus import Containers, gpu_faults
from envbuild.recipe.targets import Target
from envbuild.store.history import record
from envbuild.verify.model import Subject, Verdict, check_texts, listed, make_receipt

if TYPE_CHECKING:
    from envbuild.plan import Plan
    from envbuild.site.settings import Site


@dataclass(frozen=True, slots=True)
class Result:
    """A finished artifact; `receipt` is None without verification. `built` and `verified` are about this run alone."""

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
    settings: VerifySettings,
    environment: Environment,
    final: Path,
    *,
    staged: Path | None = None,
    held: str = "",
    more: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Verify `subject`, to be placed at `final`, and return its passing receipt, with `more` about the artifact.

    When verification fails, moves `staged` to NAME.failed, writes the failing receipt beside that path, and raises
    VerificationError; an artifact that is already at `final` stays there. `held` is the location of a failed artifact
    without a path, for messages.
    """
    verdict = _verdict(subject, settings, environment, final)
    failed = final if verdict.passed or staged == final else failed_path(final)
    receipt = make_receipt(subject, verdict, failed)
    receipt["artifact"] |= more
    record(environment.store, receipt)
    if verdict.passed:
        log(f"verified: {passed_line(receipt)} in {verdict.seconds:.1f} s")
        return receipt
    kept = ""
    with atomic.writing(final.parent):
        if staged is not None and staged != final:
            kept = f"{final} is as it was; " if final.exists() else ""
            atomic.replace(staged, failed)
        write_receipt(receipt, failed)
    held = held or f"{kept}the failed artifact is {failed}"
    raise VerificationError(
        failures(receipt), f"{held}, the evidence {receipt_path(failed)}, the nodes' logs {verdict.logs}"
    )


def _verdict(
    subject: Subject, settings: VerifySettings, environment: Environment, path: Path, *, fit: bool = True
) -> Verdict:
    """Verify `subject`, and accept it if it passed. `fit`: with no more ranks per node than this host has GPUs."""
    from envbuild.verify.run import verify

    logs = path.with_name(f"{path.name}.verify-logs")
    verdict = verify(subject, settings, environment.site, environment.variables, log, logs=logs, fit=fit)
    if verdict.passed:
        subject.accept()
    return verdict


def open_subject(path: Path, environment: Environment, runtime: str | None = None) -> Subject:
    """Return the artifact at `path` as the subject of a verification.

    `runtime` starts it, None for the best one on this host. Raises UsageError when envbuild did not build it or it has
    no such runtime, HostError when it cannot run here.
    """
    kind = kind_at(path)
    if runtime is not None and not isinstance(kind, FileArtifact):
        raise UsageError(f"{path} is no .sqsh or .sif file: it has no runtime to choose")
    if kind is None:
        problem = "is not an artifact of envbuild" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}", "give the folder or file that envbuild printed as its last line")
    if isinstance(kind, FolderArtifact):
        from envbuild.verify.host import folder_subject

        return folder_subject(path, read_artifact(path).state, folder_module(kind), environment)
    from envbuild.verify.image_runtime import open_file_subject

    return open_file_subject(path, environment, runtime)


def verify_artifact(
    path: Path, environment: Environment, overrides: dict[str, Any], runtime: str | None, beside: Path, image: str = ""
) -> tuple[State, dict[str, Any]]:
    """Verify the artifact at `path` again, and write its receipt, passing or not, beside the path `beside`.

    `image` is the docker image (NAME@sha256:…, oci:FOLDER@sha256:…) from which the file at `path` was written, and
    whose receipt is written. Returns its state and the receipt.
    """
    from envbuild.verify.static_checks import check_built_torch

    subject, more = open_subject(path, environment, runtime), dict[str, str]()
    if image:
        name, _, digest = image.rpartition("@")
        subject = replace(subject, kind=DOCKER.name, digest=digest, manifest="")
        folder = name.removeprefix("oci:")
        more = {"path": name, "pushed": image} if folder == name else {"path": str(absolute_path(Path(folder)))}
    place = beside if image else path
    check_built_torch(subject.state, path)
    settings = subject.state.verify.override(overrides)
    verdict = _verdict(subject, settings, environment, place, fit=overrides.get("nproc_per_node") is None)
    receipt = make_receipt(subject, verdict, path)
    receipt["artifact"] |= more
    receipt["logs"] = str(verdict.logs.absolute()) if verdict.logs else None
    record(environment.store, receipt)
    with atomic.writing(place.parent):
        write_receipt(receipt, beside)
    from envbuild.trust.bundle import bundle_path

    if beside == path and (attestation := bundle_path(path)).exists():
        log(f"{attestation} attests the receipt before this one; `envbuild attest {path} --key KEY` attests this one")
    return subject.state, receipt


def check_unverified_gpus(state: State, site: Site, read: Callable[[Target], Mapping[str, Containers]]) -> None:
    """Raise VerificationError for an artifact, built without verification, that lacks code for the requested GPUs.

    `read` returns the containers of each of its libraries; it is called only if GPUs are requested.
    """
    target, words = Target.parse(state.target), state.verify.gpus or site.node.gpu_types
    if words and target.family.gpu and (faults := gpu_faults(read(target), words)):
        raise VerificationError(
            f"the {state.artifact} of {state.recipe} does not run on {', '.join(words)}: {listed(faults)}",
            check_texts()["gpus"]["cause"],
        )


def failed_path(path: Path) -> Path:
    """Return the path at which an artifact for `path` is kept when it fails verification."""
    return path.with_name(f"{path.name}.failed")


def commit(staged: Path, final: Path, receipt: dict[str, Any] | None, *, known: bool = False) -> None:
    """Replace the artifact at `final` with `staged`, and write its receipt unless it is `known` to exist."""
    atomic.replace(staged, final)
    # The receipt comes last: if a run stops before this line, the next one finds no receipt of this content and
    # verifies.
    if not known:
        keep_receipt(receipt, final)


def keep_receipt(receipt: dict[str, Any] | None, path: Path) -> None:
    """Write the receipt of the artifact at `path`, or remove the previous artifact's receipt for None."""
    with atomic.writing(path.parent):
        if receipt is None:
            receipt_path(path).unlink(missing_ok=True)
            return
        write_receipt(receipt, path)
        if not failed_path(path).exists():  # else its receipt stays, too
            receipt_path(failed_path(path)).unlink(missing_ok=True)


def has_receipt(path: Path, digest: str, plan: Plan, asked: Thoroughness) -> bool:
    """Return whether `path` has a passing receipt for this content, as thorough as the plan and `asked` require."""
    receipt = passing_receipt(path, digest)
    if receipt is None:
        return False
    try:
        return parse_settings(receipt["settings"]).covers(plan.verify.override(asdict(asked)))
    except (LookupError, ValueError):  # settings of another form do not say how thorough it was
        return False
