"""Image files written beside their final paths: each is verified, then moved to its path."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild import atomic
from envbuild.artifacts.state import State
from envbuild.environment import Environment
from envbuild.errors import HostError, UsageError
from envbuild.image.blobs import file_digest
from envbuild.image.squashfs.codec import Codec
from envbuild.kinds.commit import Result, commit, failed_path, has_receipt, settings_of, verify_staged
from envbuild.plan.plan import Plan
from envbuild.progress import Log
from envbuild.recipe.targets import host_arch
from envbuild.verify.image_file import image_kind, image_state, open_image_file
from envbuild.verify.receipt import passing_receipt, receipt_path


@dataclass(frozen=True, slots=True)
class OutputFile:
    """An image file to write: the name of its kind, and its path."""

    kind: str
    path: Path


@dataclass(frozen=True, slots=True)
class ImageFileOptions:
    """Outputs requested for an image: files in the order in which they are written, compressed by `codec`.

    `runtime` starts them for verification, None for the best one on this host; `engine`, "native" or
    "apptainer", writes them.
    """

    files: tuple[OutputFile, ...]
    codec: Codec
    verify: bool
    faults: bool
    runtime: str | None = None
    engine: str = "native"


@dataclass(frozen=True, slots=True)
class ImageFileBuild:
    """The build of image files: their architecture (x86_64, aarch64) and its start (time.monotonic()).

    `state` and `plan` are None for the conversion of an existing image: the state is then read from the file.
    """

    arch: str
    started: float
    state: State | None = None
    plan: Plan | None = None


@contextmanager
def places(wish: ImageFileOptions, log: Log) -> Iterator[None]:
    """Hold the locks for the paths of all files, which must be free or replaceable. Raises UsageError."""
    check_files(wish)
    with ExitStack() as stack:
        held: set[Path] = set()
        for path in (file.path.absolute() for file in wish.files):
            if path.parent in held:  # a second flock of this process would wait for the first
                atomic.recover(path)
            else:
                stack.enter_context(atomic.exclusive(path, log))
                held.add(path.parent)
        yield


def check_files(wish: ImageFileOptions) -> None:
    """Raise UsageError when the path of a file holds something that must not be replaced."""
    for path in (file.path for file in wish.files):
        if path.is_dir():
            raise UsageError(f"{path} is a folder", "name a file with --out")
        if path.exists() and path.stat().st_size and image_kind(path) is None:
            raise UsageError(
                f"{path} exists and is neither a squashfs nor a SIF; it is left as it is",
                "remove it, or choose another path with --out",
            )


def accept(
    staged: Sequence[Path], wish: ImageFileOptions, made: ImageFileBuild, environment: Environment, log: Log
) -> list[Result]:
    """Verify each of the `staged` files, in the order of `wish.files`, and move it to its path.

    Raises VerificationError after keeping the failed file as FILE.failed, with its receipt.
    """
    results = []
    for file, path in zip(wish.files, staged, strict=True):
        digest = file_digest(path)
        state = made.state or _state_inside(path)
        known = wish.verify and _has_receipt(file, digest, wish, made)
        receipt = None
        if wish.verify and not known:
            receipt = _verified(file, path, digest, state, wish, made, environment, log)
        if receipt is not None:
            failed_path(file.path).unlink(missing_ok=True)
        commit(path, file.path, receipt, known=known)
        seconds = time.monotonic() - made.started
        target = state.target if state else made.arch
        at = receipt_path(file.path) if known or receipt else None
        warnings = made.plan.warnings if made.plan else ()
        results.append(Result(file.path, digest, target, at, seconds, True, receipt is not None, warnings))
    return results


def _has_receipt(file: OutputFile, digest: str, wish: ImageFileOptions, made: ImageFileBuild) -> bool:
    if made.plan is None:
        return passing_receipt(file.path, digest) is not None
    return has_receipt(file.path, digest, made.plan, wish.faults)


def _state_inside(path: Path) -> State | None:
    try:
        return image_state(open_image_file(path))
    except UsageError:
        return None


def _verified(
    file: OutputFile,
    path: Path,
    digest: str,
    state: State | None,
    wish: ImageFileOptions,
    made: ImageFileBuild,
    environment: Environment,
    log: Log,
) -> dict[str, Any] | None:
    """Verify the file at `path` and return its receipt; None, after a message, when it cannot be verified here."""
    from envbuild.verify.file_subject import file_subject

    if state is None:
        why = "the image holds no environment of envbuild's"
    elif made.arch != host_arch():
        why = f"this {host_arch()} host cannot run {made.arch}"
    else:
        settings = settings_of(state.verify, {"faults": wish.faults})
        try:
            subject = file_subject(path, file.kind, state, digest, settings, environment, wish.runtime)
            return verify_staged(subject, settings, environment, log, file.path, staged=path)
        except HostError as error:
            why = error.message
    log(f"{file.path}: not verified: {why}")
    return None
