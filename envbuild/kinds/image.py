"""Verified images from a recipe: assembled in the store, then loaded, written or pushed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from envbuild import atomic
from envbuild.artifacts import docker
from envbuild.artifacts.image import AssembledImage, assemble
from envbuild.artifacts.layers_in import LayerFolder
from envbuild.artifacts.state import IMAGE
from envbuild.environment import Environment
from envbuild.errors import HostError, UsageError
from envbuild.kinds.commit import has_receipt, keep_receipt, settings_of, verify_staged
from envbuild.kinds.docker import DOCKER
from envbuild.kinds.prepare import prepare
from envbuild.kinds.source_layers import build_layers
from envbuild.layers.bytecode import Compiler
from envbuild.layers.compiler import compiler_for
from envbuild.layers.compose import FIXED_TIME
from envbuild.layers.requested import RequestedLayers, check_here, for_image
from envbuild.layers.trainer import Trainer
from envbuild.lock.base import image_lock
from envbuild.lock.image import ImageLock
from envbuild.lock.lifecycle import ensure
from envbuild.lock.state import LockUse
from envbuild.plan.plan import ImageInputs, Plan
from envbuild.progress import Log
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target, host_arch

if TYPE_CHECKING:
    from envbuild.verify.image_subject import Built


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image to build.

    It has the plan, the trainer, the interpreter that compiles its bytecode, and the lock of the builder image
    for its source layers, None without source layers.
    """

    plan: Plan
    trainer: Trainer
    compiler: Compiler | None
    target: Target
    builder: ImageLock | None = None

    def layers(self, environment: Environment, log: Log, *, offline: bool) -> list[LayerFolder]:
        """Return the source layers of the image, from the store or built now. Raises BuildError and HostError."""
        wanted = RequestedLayers(self.plan.sources, self.plan.host_layers, self.builder)
        return build_layers(wanted, self.plan.folder, environment, log, offline=offline)


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Outputs requested for images: a name in a daemon, a file or folder, a registry.

    Images are pushed in `form`, one of docker.FORMATS.
    """

    tag: str
    out: docker.ImageOutput | None
    push: bool
    verify: bool
    faults: bool
    form: str = docker.OCI

    @property
    def load(self) -> bool:
        """Whether the image goes to the docker daemon."""
        return self.out is None and not self.push


def prepare_image(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    bytecode: bool,
    here: bool = True,
    **use: Unpack[LockUse],
) -> PreparedImage:
    """Return the plan of an image; missing or stale locks are updated first.

    The recipe says whether its environment consists of wheels or of conda packages. Raises HostError for source
    layers that are not in the store and cannot be built `here`.
    """
    layers = for_image(loaded, target, environment, **use)
    base = ensure(image_lock(loaded, target), environment, **use)
    compiler = compiler_for(loaded.recipe.python, environment) if bytecode else None
    inputs = ImageInputs(base, compiler.identity if compiler else None, source_date(environment))
    plan, trainer = prepare(
        loaded, target, environment, artifact=IMAGE, image=inputs,
        conda=loaded.recipe.environment == "conda", layers=layers, **use,
    )  # fmt: skip
    if here:  # last: errors in the recipe or its locks are the same on every host
        check_here(layers, environment)
    return PreparedImage(plan, trainer, compiler, target, layers.builder)


def source_date(environment: Environment) -> int:
    """Return the time of an image's files: SOURCE_DATE_EPOCH (reproducible-builds.org), else a fixed date.

    Raises UsageError for an invalid value and for times before 1980, which zipfile refuses inside of images.
    """
    text = environment.variables.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return FIXED_TIME
    if not text.isascii() or not text.isdecimal() or not 315532800 <= int(text) < 1 << 32:
        raise UsageError(f"SOURCE_DATE_EPOCH is {text!r}", "give seconds since 1970, 315532800 (1980) or later")
    return int(text)


def make_images(
    prepared: Sequence[PreparedImage], wish: ImageOptions, environment: Environment, log: Log, *, offline: bool
) -> dict[str, Any]:
    """Assemble the images, verify those that this host can run, and write them to the requested outputs.

    Returns the object that `--json` prints. Raises VerificationError before any output is replaced.
    """
    started = time.monotonic()
    check_wish(wish, len(prepared), environment)
    images = []
    # All layers before the first image: layers of another architecture may be unavailable here.
    built = [one.layers(environment, log, offline=offline) for one in prepared]
    for one, layers in zip(prepared, built, strict=True):
        count = len(one.plan.conda) + len(one.plan.packages)
        log(f"{one.plan.recipe} for {one.target.name}: {count} packages")
        images.append(
            assemble(
                one.plan, one.trainer, one.compiler, environment, log,
                offline=offline, layers=layers,
            )
        )  # fmt: skip
    index = docker.index_of(images) if len(images) > 1 else None
    digest = index.digest if index else images[0].digest
    receipts = [_verified(one, image, wish, environment, log) for one, image in zip(prepared, images, strict=True)]
    result = {"path": wish.tag, "digest": digest}
    if wish.load:
        result |= docker.load_tagged(images[0], wish.tag, environment, log)
    if wish.out is not None:
        docker.write(images, index, wish.out, wish.tag, log)
        result["path"] = os.path.abspath(wish.out.path)
    if wish.push:
        sent = docker.in_format(images, wish.form)
        result |= docker.push(sent, wish.tag, environment, log)
        _record_push(prepared, images, sent, wish, result["reference"].partition("@")[0])
    targets = [
        {"target": one.target.name, "digest": image.digest, "receipt": receipt}
        for one, image, receipt in zip(prepared, images, receipts, strict=True)
    ]
    return {
        **result,
        "receipt": next((r for r in receipts if r), None),
        "target": prepared[0].target.name,
        "targets": targets,
        "warnings": [line for one in prepared for line in one.plan.warnings],
        "seconds": round(time.monotonic() - started, 3),
    }


def check_wish(wish: ImageOptions, count: int, environment: Environment) -> None:
    """Raise early what would fail later for `count` images: invalid options, a taken path, no daemon to load into."""
    from envbuild.image.daemon import connect

    if wish.load and count > 1:
        raise UsageError(
            "a docker daemon holds images of one platform; several targets need --out or --push",
            "add --out oci:DIR, or --tag REGISTRY/NAME:TAG --push",
        )
    if wish.out is not None:
        docker.check_place(wish.out, count)
    if wish.load:
        with connect(environment.variables):
            pass


def _beside(plan: Plan, wish: ImageOptions) -> Path:
    """Return the path beside which the receipt of an image of `plan` is."""
    return wish.out.path if wish.out else DOCKER.default_path(plan.recipe, plan.target)


def _record_push(
    prepared: Sequence[PreparedImage],
    images: Sequence[AssembledImage],
    sent: Sequence[AssembledImage],
    wish: ImageOptions,
    name: str,
) -> None:
    """Record in each image's receipt the reference that nodes pull: its own manifest as `sent`, even within an index.

    A copy of the receipt is written where jobs look for it.
    """
    from envbuild.verify.receipt import record_push

    for one, image, pushed in zip(prepared, images, sent, strict=True):
        usual = DOCKER.default_path(one.plan.recipe, one.plan.target)
        reference = f"{name}@{pushed.digest}"
        with atomic.writing(usual.parent):
            record_push(_beside(one.plan, wish), image.digest, reference, usual)


def _verified(
    one: PreparedImage, image: AssembledImage, wish: ImageOptions, environment: Environment, log: Log
) -> str | None:
    """Verify `image` and return the path of its receipt; None, after a message, when it cannot be verified here."""
    from envbuild.image.daemon import connect
    from envbuild.verify.receipt import receipt_path

    beside = _beside(one.plan, wish)
    path = receipt_path(beside)
    if not wish.verify:
        return None
    if one.target.arch != host_arch():
        log(f"{one.target.name}: not verified: this {host_arch()} host cannot run it")
        return None
    if has_receipt(beside, image.digest, one.plan, wish.faults):
        return str(path.absolute())
    try:
        with connect(environment.variables) as client, docker.loaded(client, image, log, keep=wish.load):
            verify_image(client, one, image, wish, beside, environment, log)
    except HostError as error:
        if wish.load:
            raise
        log(f"{one.target.name}: not verified: {error.message}")
        return None
    return str(path.absolute())


def verify_image(
    client: Any, one: PreparedImage, image: Built, wish: ImageOptions, beside: Path, environment: Environment, log: Log
) -> None:
    """Verify an image in the daemon of `client`, and write its receipt. Raises VerificationError."""
    from envbuild.verify.image_subject import image_subject
    from envbuild.verify.receipt import pushed_as

    settings = settings_of(one.plan.verify_settings(), {"faults": wish.faults})
    told = {"path": str(wish.out.path.absolute()) if wish.out else wish.tag}
    if pushed := pushed_as(beside, image.digest):
        told["pushed"] = pushed
    subject = image_subject(client, image, settings)
    held = f"the daemon keeps the failed image as {image.image_id[:19]}"
    keep_receipt(verify_staged(subject, settings, environment, log, beside, held=held, told=told), beside)
