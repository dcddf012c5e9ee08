"""From a recipe to verified images: assembled in the store, then loaded, written or pushed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.artifacts import docker, place
from envbuild.artifacts.image import Image, assemble
from envbuild.environment import Environment
from envbuild.errors import HostError, UsageError, VerificationError
from envbuild.image.archive import write_archive
from envbuild.image.layout import fill_layout
from envbuild.image.model import Index
from envbuild.layers.bytecode import Compiler
from envbuild.layers.compiler import compiler_for
from envbuild.layers.compose import FIXED_TIME
from envbuild.layers.trainer import Trainer
from envbuild.lock.base_oci import registry_of
from envbuild.lock.image_manage import ensure_image_lock
from envbuild.make import has_receipt, prepare, settings_of
from envbuild.plan.plan import ImageInputs, Plan
from envbuild.progress import transfer
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target, host_arch

if TYPE_CHECKING:
    from envbuild.verify.image_subject import Built

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """One image to be made: its plan, the trainer, and the interpreter for its bytecode."""

    plan: Plan
    trainer: Trainer
    compiler: Compiler | None
    target: Target


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to become of the images: names in a daemon, a file or folder, a registry."""

    tag: str
    out: docker.Out | None
    push: bool
    verify: bool
    faults: bool

    @property
    def load(self) -> bool:
        """Whether the image's place is the docker daemon."""
        return self.out is None and not self.push


def prepare_image(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    locked: bool,
    offline: bool,
    bytecode: bool,
    say: Say,
) -> Prepared:
    """The plan of an image, from locks that are made when they are missing or stale."""
    base = ensure_image_lock(loaded, target, environment, locked=locked, offline=offline, say=say)
    compiler = compiler_for(loaded.recipe.python, environment) if bytecode else None
    inputs = ImageInputs(base, compiler.identity if compiler else None, source_date(environment))
    plan, trainer = prepare(
        loaded, target, environment, artifact=docker.KIND, locked=locked, offline=offline, say=say,
        image=inputs,
    )  # fmt: skip
    return Prepared(plan, trainer, compiler, target)


def source_date(environment: Environment) -> int:
    """The time of an image's files: SOURCE_DATE_EPOCH (reproducible-builds.org), else a fixed date.

    Raises UsageError for a value that is no time after 1980: zipfile refuses older ones inside of images.
    """
    text = environment.variables.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return FIXED_TIME
    if not text.isascii() or not text.isdecimal() or not 315532800 <= int(text) < 1 << 32:
        raise UsageError(
            f"SOURCE_DATE_EPOCH is {text!r}", "give seconds since 1970, 315532800 (1980) or later"
        )
    return int(text)


def make_images(
    prepared: Sequence[Prepared], wish: Wish, environment: Environment, say: Say, *, offline: bool
) -> dict[str, Any]:
    """Assemble the images, verify the one that this host can run, and bring all where they are wanted.

    Returns what `--json` prints. Raises VerificationError before anything takes its place.
    """
    started = time.monotonic()
    if wish.load and len(prepared) > 1:
        raise UsageError(
            "a docker daemon holds images of one platform; several targets need --out or --push",
            "add --out oci:DIR, or --tag REGISTRY/NAME:TAG --push",
        )
    images = []
    for one in prepared:
        say(f"{one.plan.recipe} for {one.target.name}: {len(one.plan.packages)} packages")
        images.append(
            assemble(one.plan, one.trainer, one.compiler, environment, say, offline=offline)
        )
    index = docker.index_of(images) if len(images) > 1 else None
    digest = index.digest if index else images[0].digest
    beside = wish.out.path if wish.out else default_place(prepared[0].plan)
    receipts = [
        _verified(one, image, wish, beside, environment, say)
        for one, image in zip(prepared, images, strict=True)
    ]
    result = {"path": wish.tag, "digest": digest}
    if wish.load:
        result |= _load(images[0], wish.tag, environment, say)
    if wish.out is not None:
        _write(images, index, wish, say)
        result["path"] = os.path.abspath(wish.out.path)
    if wish.push:
        result |= _push(images, index, wish.tag, environment, say)
    targets = [
        {"target": one.target.name, "digest": image.digest, "receipt": receipt}
        for one, image, receipt in zip(prepared, images, receipts, strict=True)
    ]
    return {
        **result,
        "receipt": next((r for r in receipts if r), None),
        "target": prepared[0].target.name,
        "targets": targets,
        "seconds": round(time.monotonic() - started, 3),
    }


def default_place(plan: Plan) -> Path:
    """Beside what the receipt of an image in a daemon or registry lies."""
    return Path("build") / plan.recipe / plan.target / "docker"


def _verified(
    one: Prepared, image: Image, wish: Wish, beside: Path, environment: Environment, say: Say
) -> str | None:
    """The receipt of `image`, None where it cannot be verified here; then why is said."""
    from envbuild.verify.receipt import receipt_path

    path = receipt_path(beside)
    if not wish.verify:
        return None
    if one.target.arch != host_arch():
        say(f"{one.target.name}: not verified: this {host_arch()} host cannot run it")
        return None
    if has_receipt(beside, image.digest, one.plan, wish.faults):
        return str(path.absolute())
    try:
        with _daemon(environment) as client:
            _load_into(client, image, [], say)
            verify_image(client, one, image, wish, beside, environment, say)
    except HostError as error:
        if wish.load:
            raise
        say(f"{one.target.name}: not verified: {error.message}")
        return None
    return str(path.absolute())


def verify_image(
    client: Any,
    one: Prepared,
    image: Built,
    wish: Wish,
    beside: Path,
    environment: Environment,
    say: Say,
) -> None:
    """Verify an image that `client`'s daemon has, and write its receipt. Raises VerificationError."""
    from envbuild.verify.explain import failures
    from envbuild.verify.image_subject import image_subject
    from envbuild.verify.receipt import make_receipt, receipt_path, write_receipt
    from envbuild.verify.run import verify

    settings = settings_of(one.plan.verify_settings(), {"faults": wish.faults})
    name = str(wish.out.path.absolute()) if wish.out else wish.tag
    subject = image_subject(client, image, settings)
    logs = beside.with_name(f"{beside.name}.verify-logs")
    verdict = verify(subject, settings, environment.variables, say, logs=logs)
    failed = beside.with_name(f"{beside.name}.failed")
    with place.writing(beside.parent):
        write_receipt(make_receipt(subject, verdict, name), beside if verdict.passed else failed)
        if verdict.passed:
            receipt_path(failed).unlink(missing_ok=True)
    if not verdict.passed:
        raise VerificationError(
            failures(verdict.checks),
            f"the daemon has what failed as {image.image_id[:19]}; the evidence is {receipt_path(failed)}, "
            f"the nodes' logs {verdict.logs}",
        )
    say(f"verified: {len(verdict.checks)} checks passed in {verdict.seconds:.1f} s")


def _load(image: Image, tag: str, environment: Environment, say: Say) -> dict[str, Any]:
    with _daemon(environment) as client:
        return _load_into(client, image, [tag], say)


def _load_into(client: Any, image: Image, tags: Sequence[str], say: Say) -> dict[str, Any]:
    from envbuild.image.daemon import load

    layers = [made.layer for made in image.layers]
    with transfer("loading into the docker daemon", None) as moved:
        loaded = load(client, image.config, image.image_id, layers, tags, image.blobs, moved)
    if loaded.layers_sent:
        say(f"  sent {loaded.layers_sent} of {len(layers)} layers to the daemon")
    return {"image_id": loaded.image_id, "layers_sent": loaded.layers_sent}


def _write(images: Sequence[Image], index: Index | None, wish: Wish, say: Say) -> None:
    """Write the layout or archive beside its place, then exchange the two."""
    assert wish.out is not None
    path = wish.out.path.absolute()
    if wish.out.form == "docker-archive" and index is not None:
        raise UsageError("a docker-archive holds one platform", "use --out oci:DIR")
    _check_place(path, wish.out.form)
    with place.exclusive(path, say), place.writing(path.parent):
        staged = place.staging(path)
        try:
            if wish.out.form == "oci":
                root = images[0].descriptor
                if index is not None:
                    images[0].blobs.add(index.raw)
                    root = index.descriptor
                fill_layout(staged, images[0].blobs, [(root, wish.tag)])
                place.swap_in(staged, path)
            else:
                file = staged / path.name
                with file.open("wb") as stream:
                    _archive(stream, images[0], wish.tag)
                file.chmod(0o644)
                os.replace(file, path)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _archive(stream: Any, image: Image, tag: str) -> None:
    descriptors = [made.layer.blob for made in image.layers]
    write_archive(stream, image.config, descriptors, image.blobs, [tag])


def _check_place(path: Path, form: str) -> None:
    """Raise UsageError when something stands there that is no image of the kind to be written."""
    if form == "oci":
        free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        if not free and not (path / "oci-layout").is_file():
            raise UsageError(
                f"{path} exists and is no OCI layout; it is left as it is",
                "remove it, or choose another place with --out",
            )
    elif path.is_dir():
        raise UsageError(f"{path} is a folder", "name a file: --out docker-archive:FILE")


def _push(
    images: Sequence[Image], index: Index | None, tag: str, environment: Environment, say: Say
) -> dict[str, Any]:
    """Push what the registry lacks; manifests by digest first, then the index or manifest by its tag."""
    registry = registry_of(tag, environment)
    counts = {"uploaded": 0, "uploaded_bytes": 0, "mounted": 0, "present": 0}
    try:
        for image in images:
            wanted = [image.manifest.config, *(made.layer.blob for made in image.layers)]
            pointer = image.digest if index else registry.reference.pointer
            sources = _repositories(image, registry.reference.registry, environment)
            with transfer(f"pushing to {tag}", sum(blob.size for blob in wanted)) as moved:
                pushed = registry.push(
                    image.blobs, wanted, image.manifest.raw, image.manifest.media_type, pointer,
                    mount_from=sources, moved=moved,
                )  # fmt: skip
            for name in counts:
                counts[name] += getattr(pushed, name)
        if index is not None:
            registry.put_manifest(index.raw, index.media_type, registry.reference.pointer)
    finally:
        registry.close()
    say(
        f"  pushed {counts['uploaded']} blobs ({counts['uploaded_bytes'] / 1e6:.1f} MB), "
        f"{counts['mounted']} mounted, {counts['present']} were there"
    )
    digest = index.digest if index else images[0].digest
    return {"pushed": counts, "reference": f"{registry.reference.name}@{digest}"}


def _repositories(image: Image, host: str, environment: Environment) -> list[str]:
    """The repositories of the registry `host` that have the base image: its own, or a mirror's."""
    from urllib.parse import urlsplit

    from envbuild.image.reference import parse_reference

    try:
        base = parse_reference(image.base_name)
    except UsageError:  # Debian packages, or a local image
        return []
    found = [base.repository] if base.registry == host else []
    for mirror in environment.site.registry(base.registry).mirrors:
        parts = urlsplit(mirror)
        if parts.netloc.rpartition("@")[2] == host:
            found.append(f"{parts.path}/{base.repository}".strip("/"))
    return found


@contextmanager
def _daemon(environment: Environment) -> Iterator[Any]:
    from envbuild.image.daemon import connect

    with connect(environment.variables) as client:
        yield client
