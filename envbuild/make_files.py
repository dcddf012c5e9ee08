"""Image files that were made beside their places: each is verified, then takes its place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.artifacts import place
from envbuild.artifacts.state import State
from envbuild.environment import Environment
from envbuild.errors import HostError, UsageError, VerificationError
from envbuild.image.blobs import file_digest
from envbuild.image.squashfs.codec import Codec
from envbuild.make import Result, has_receipt, settings_of
from envbuild.plan.plan import Plan
from envbuild.recipe.targets import host_arch
from envbuild.verify.image_file import (
    APPTAINER,
    ENROOT,
    image_state,
    is_image_file,
    open_image_file,
)
from envbuild.verify.receipt import passing_receipt, receipt_path

Say = Callable[[str], None]
SUFFIXES = {ENROOT: ".sqsh", APPTAINER: ".sif"}


@dataclass(frozen=True, slots=True)
class File:
    """An artifact to be written: its kind (ENROOT, APPTAINER) and its place."""

    kind: str
    path: Path


@dataclass(frozen=True, slots=True)
class ImageFileOptions:
    """What is to become of an image: files in the order of their writing, compressed by `codec`. `runtime`
    launches them for verification, None for the best that this host has; `engine` is who writes them, "native"
    or "apptainer"."""

    files: tuple[File, ...]
    codec: Codec
    verify: bool
    faults: bool
    runtime: str | None = None
    engine: str = "native"


@dataclass(frozen=True, slots=True)
class FileBuild:
    """What the files were made of: the architecture (x86_64, aarch64) and when that began (time.monotonic()).

    `state` and `plan` are None where an existing image was converted: then the file itself tells.
    """

    arch: str
    started: float
    state: State | None = None
    plan: Plan | None = None


@contextmanager
def places(wish: ImageFileOptions, say: Say) -> Iterator[None]:
    """Hold the places of all files, which must be free or hold what may be replaced. Raises UsageError."""
    check_files(wish)
    with ExitStack() as stack:
        held: set[Path] = set()
        for path in (file.path.absolute() for file in wish.files):
            if path.parent in held:  # a second flock of ours would wait for the first
                place.recover(path)
            else:
                stack.enter_context(place.exclusive(path, say))
                held.add(path.parent)
        yield


def check_files(wish: ImageFileOptions) -> None:
    """Raise UsageError where a file's place holds something that may not be replaced."""
    for file in wish.files:
        _check_place(file.path)


def _check_place(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "name a file with --out")
    if path.exists() and path.stat().st_size and not is_image_file(path):
        raise UsageError(
            f"{path} exists and is neither a squashfs nor a SIF; it is left as it is",
            "remove it, or choose another place with --out",
        )


def accept(
    staged: Sequence[Path],
    wish: ImageFileOptions,
    made: FileBuild,
    environment: Environment,
    say: Say,
) -> list[Result]:
    """Verify each of the `staged` files, in the order of `wish.files`, and put it in its place.

    Raises VerificationError after keeping what failed as FILE.failed, with its receipt.
    """
    results = []
    for file, path in zip(wish.files, staged, strict=True):
        digest = file_digest(path)
        state = made.state or _state_inside(path)
        known = wish.verify and _has_receipt(file, digest, wish, made)
        verified = False
        if wish.verify and not known:
            verified = _verified(file, path, digest, state, wish, made, environment, say)
        with place.writing(file.path.parent):
            os.replace(path, file.path)
            if not known and not verified:
                receipt_path(file.path).unlink(missing_ok=True)
        seconds = time.monotonic() - made.started
        target = state.target if state else made.arch
        receipt = receipt_path(file.path) if known or verified else None
        warnings = made.plan.warnings if made.plan else ()
        results.append(
            Result(file.path, digest, target, receipt, seconds, True, verified, warnings)
        )
    return results


def _has_receipt(file: File, digest: str, wish: ImageFileOptions, made: FileBuild) -> bool:
    if made.plan is None:
        return passing_receipt(file.path, digest) is not None
    return has_receipt(file.path, digest, made.plan, wish.faults)


def _state_inside(path: Path) -> State | None:
    try:
        return image_state(open_image_file(path))
    except UsageError:
        return None


def _verified(
    file: File,
    path: Path,
    digest: str,
    state: State | None,
    wish: ImageFileOptions,
    made: FileBuild,
    environment: Environment,
    say: Say,
) -> bool:
    """Verify the file at `path`; False where that cannot be done here, then why is said."""
    if state is None:
        why = "the image holds no environment of envbuild's"
    elif made.arch != host_arch():
        why = f"this {host_arch()} host cannot run {made.arch}"
    else:
        try:
            _verify(file, path, digest, state, wish, environment, say)
            return True
        except HostError as error:
            why = error.message
    say(f"{file.path}: not verified: {why}")
    return False


def _verify(
    file: File,
    path: Path,
    digest: str,
    state: State,
    wish: ImageFileOptions,
    environment: Environment,
    say: Say,
) -> None:
    """Train in the image, and write its receipt. Raises VerificationError after keeping what failed."""
    from envbuild.verify.explain import failures
    from envbuild.verify.file_subject import file_subject
    from envbuild.verify.receipt import make_receipt, write_receipt
    from envbuild.verify.run import verify

    settings: Any = settings_of(state.verify, {"faults": wish.faults})
    subject = file_subject(path, file.kind, state, digest, settings, environment, wish.runtime)
    final = file.path
    logs = final.with_name(f"{final.name}.verify-logs")
    verdict = verify(subject, settings, environment.variables, say, logs=logs)
    failed = final.with_name(f"{final.name}.failed")
    with place.writing(final.parent):
        if verdict.passed:
            write_receipt(make_receipt(subject, verdict, final), final)
            receipt_path(failed).unlink(missing_ok=True)
            failed.unlink(missing_ok=True)
            say(f"verified: {len(verdict.checks)} checks passed in {verdict.seconds:.1f} s")
            return
        os.replace(path, failed)
        write_receipt(make_receipt(subject, verdict, failed), failed)
    kept = f"{final} is as it was; " if final.exists() else ""
    raise VerificationError(
        failures(verdict.checks),
        f"{kept}what failed is {failed}, the evidence {receipt_path(failed)}, the nodes' logs {verdict.logs}",
    )
