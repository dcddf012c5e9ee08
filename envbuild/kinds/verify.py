"""Verification of an existing artifact, of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envbuild import atomic
from envbuild.artifacts.state import State
from envbuild.environment import Environment, load_environment
from envbuild.errors import UsageError
from envbuild.kinds import kind_at
from envbuild.kinds.commit import settings_of
from envbuild.progress import Log
from envbuild.verify.needs_torch import check_built_torch
from envbuild.verify.receipt import make_receipt, write_receipt
from envbuild.verify.run import verify
from envbuild.verify.subject import Subject


def open_subject(path: Path, environment: Environment | None = None, runtime: str | None = None) -> Subject:
    """Return the artifact at `path` as the subject of a verification, see `Artifact.subject`.

    Raises UsageError when there is none.
    """
    kind = kind_at(path)
    if kind is None:
        if runtime is not None:
            raise UsageError(f"{path} is no .sqsh or .sif file: it has no runtime to choose")
        what = "is not an artifact of envbuild" if path.exists() else "does not exist"
        raise UsageError(f"{path} {what}", "give the folder or file that envbuild printed as its last line")
    return kind.subject(path, environment or load_environment(), runtime)


def verify_artifact(
    path: Path, environment: Environment, log: Log, overrides: dict[str, Any], runtime: str | None = None
) -> tuple[State, dict[str, Any]]:
    """Verify the artifact at `path` again, and write its receipt, passing or not.

    `runtime` starts an image file, None for the best one on this host. Returns the artifact's state and the
    receipt. Raises UsageError when there is no artifact of envbuild's.
    """
    subject = open_subject(path, environment, runtime)
    check_built_torch(subject.state, path)
    settings = settings_of(subject.state.verify, overrides)
    verdict = verify(subject, settings, environment.variables, log, logs=path.with_name(f"{path.name}.verify-logs"))
    receipt = make_receipt(subject, verdict, path)
    receipt["logs"] = str(verdict.logs.absolute()) if verdict.logs else None
    with atomic.writing(path.parent):
        write_receipt(receipt, path)
    return subject.state, receipt
