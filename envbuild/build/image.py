"""Verified images from a recipe: assembled in the store, then loaded, written or pushed.

Also the compiler of an image's bytecode: a Python of this host, else the Debian base's Python, unpacked in the store;
and the plan of an artifact of any kind, for commands that do not build it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from envbuild.base import atomic
from envbuild.base.errors import HostError, UsageError
from envbuild.base.files import absolute_path
from envbuild.base.packages import json_digest
from envbuild.base.progress import Log, log, step
from envbuild.build import docker
from envbuild.build.commit import has_receipt, keep_receipt, verify_staged
from envbuild.build.image_layers import AssembledImage, PreparedImage, assemble
from envbuild.build.installing import LayerFolder
from envbuild.build.prepare import build_layers, image_python, prepare
from envbuild.contract.kinds import DOCKER, Artifact, FolderArtifact
from envbuild.contract.receipt import pushed_as, receipt_path, record_push
from envbuild.contract.state import IMAGE
from envbuild.contract.verification import FULL, Thoroughness
from envbuild.debian.lock import DebianLock
from envbuild.debian.rootfs import merged, read_data
from envbuild.environment import Environment
from envbuild.image.daemon import connect
from envbuild.image.entry import FILE, SYMLINK
from envbuild.image.model import docker_manifest
from envbuild.interpreter import read_python
from envbuild.layers.bytecode import MAGIC, Compiler, compiler_of
from envbuild.layers.requested import check_here, for_image
from envbuild.lock.base import fetch_locked, image_lock
from envbuild.lock.image import ImageLock
from envbuild.lock.lifecycle import LockUse, ensure
from envbuild.plan import ImageInputs, Plan
from envbuild.pythons import FOLDER, find_python, own_python
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target, host_arch
from envbuild.verify.containers import BuiltImage, image_subject


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Outputs requested for images: a name in a daemon, a file or folder, a registry.

    `form`, "oci" or "docker", selects the media types of pushed images.
    """

    tag: str
    out: docker.ImageOutput | None
    push: bool
    verify: bool
    asked: Thoroughness = FULL
    form: str = "oci"

    @property
    def load(self) -> bool:
        """Whether the image goes to the docker daemon."""
        return self.out is None and not self.push

    def beside(self, plan: Plan) -> Path:
        """Return the path beside which the receipt of an image of `plan` is."""
        return self.out.path if self.out else DOCKER.default_path(plan.recipe, plan.target)


def prepare_image(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    bytecode: bool,
    here: bool = True,
    verify: bool | None = None,
    **use: Unpack[LockUse],
) -> PreparedImage:
    """Return the plan of an image, with current locks. Raises HostError if built `here` and its layers cannot be."""
    layers = for_image(loaded, target, environment, **use)
    base = ensure(image_lock(loaded, target), environment, **use)
    compiler = None
    if bytecode:
        compiler = image_compiler(
            base,
            loaded.recipe.python,
            environment,
            conda=loaded.has_conda_images,
            offline=use["offline"],
            log=use["log"],
        )
    inputs = ImageInputs(base, compiler.identity if compiler else None, environment.source_date)
    plan, trainer = prepare(
        loaded,
        target,
        environment,
        artifact=IMAGE,
        image=inputs,
        conda=loaded.has_conda_images,
        layers=layers,
        verify=verify,
        **use,
    )
    if here:  # last: errors in the recipe or its locks are the same on every host
        check_here(layers, environment)
    return PreparedImage(plan, trainer, compiler, target, layers.builder)


def image_layers(prepared: PreparedImage, environment: Environment, *, offline: bool) -> list[LayerFolder]:
    """Return the source layers of an image, built now if needed. Raises the errors of `build_layers`."""
    python = image_python(prepared.plan, environment, offline=offline)
    return build_layers(prepared.requested, prepared.plan.folder, environment, offline=offline, python=python)


def make_images(
    prepared: Sequence[PreparedImage], options: ImageOptions, environment: Environment, *, offline: bool
) -> dict[str, Any]:
    """Assemble, verify and write images; return the `--json` object. Raises VerificationError before any output."""
    started = time.monotonic()
    check_options(options, len(prepared), environment)
    images = []
    # All layers before the first image: layers of another architecture may be unavailable here.
    built = [image_layers(image, environment, offline=offline) for image in prepared]
    for prepared_image, layers in zip(prepared, built, strict=True):
        count = len(prepared_image.plan.conda) + len(prepared_image.plan.packages)
        log(f"{prepared_image.plan.recipe} for {prepared_image.target.name}: {count} packages")
        images.append(assemble(prepared_image, layers, environment, offline=offline))
    index = docker.index_of(images) if len(images) > 1 else None
    receipts = [_verified(image, options, environment) for image in images]
    result = {"path": options.tag, "digest": index.digest if index else images[0].digest}
    if options.load:
        result |= docker.load_tagged(images[0], options.tag, environment)
    if options.out is not None:
        docker.write(images, index, options.out, options.tag)
        result["path"] = str(absolute_path(options.out.path))
    if options.push:
        sent = images
        if options.form == "docker":  # other manifests, the same blobs
            sent = [replace(image, manifest=docker_manifest(image.manifest)) for image in images]
        result |= docker.push(sent, options.tag, environment)
        _record_push(images, sent, options, result["reference"].partition("@")[0])
    return result | report(prepared, [image.digest for image in images], receipts, started)


def report(
    prepared: Sequence[PreparedImage], digests: Sequence[str], receipts: Sequence[str | None], started: float
) -> dict[str, Any]:
    """Return the part of the `--json` output about the images' receipts, targets and warnings."""
    rows = zip(prepared, digests, receipts, strict=True)
    return {
        "receipt": next((receipt for receipt in receipts if receipt), None),
        "target": prepared[0].target.name,
        "targets": [{"target": image.target.name, "digest": digest, "receipt": path} for image, digest, path in rows],
        "warnings": [line for image in prepared for line in image.plan.warnings],
        "seconds": round(time.monotonic() - started, 3),
    }


def check_options(options: ImageOptions, count: int, environment: Environment) -> None:
    """Raise errors early for `count` images: invalid options, a path with other content, no daemon to load into."""
    if options.load and count > 1:
        raise UsageError(
            "a docker daemon holds images of one platform; several targets need --out or --push",
            "add --out oci:DIR, or --tag REGISTRY/NAME:TAG --push",
        )
    if options.out is not None:
        docker.check_place(options.out, count)
    if options.load:
        with connect(environment.variables):
            pass


def _record_push(
    images: Sequence[AssembledImage], sent: Sequence[AssembledImage], options: ImageOptions, name: str
) -> None:
    """Record the reference that nodes pull, by the `sent` image, in each image's receipt and in a copy for jobs."""
    for image, pushed in zip(images, sent, strict=True):
        usual = DOCKER.default_path(image.plan.recipe, image.plan.target)
        with atomic.writing(usual.parent):
            record_push(options.beside(image.plan), image.digest, f"{name}@{pushed.digest}", usual)


def _verified(image: AssembledImage, options: ImageOptions, environment: Environment) -> str | None:
    """Verify `image` and return the path of its receipt; None, after a message, when it cannot be verified here."""
    plan = image.plan
    if not options.verify:
        return None
    if Target.parse(plan.target).arch != host_arch():
        log(f"{plan.target}: not verified: this {host_arch()} host cannot run it")
        return None
    beside = options.beside(plan)
    if not has_receipt(beside, image.digest, plan, options.asked):
        try:
            with connect(environment.variables) as client, docker.loaded(client, image, keep=options.load):
                built = BuiltImage(image.image_id, image.state, image.digest, image.file_manifest)
                verify_image(client, plan, built, options, environment)
        except HostError as error:
            if options.load:
                raise
            log(f"{plan.target}: not verified: {error.message}")
            return None
    return str(receipt_path(beside).absolute())


def verify_image(client: Any, plan: Plan, image: BuiltImage, options: ImageOptions, environment: Environment) -> None:
    """Verify an image in the daemon of `client`, and write its receipt. Raises VerificationError."""
    beside = options.beside(plan)
    settings = plan.verify.override(asdict(options.asked))
    more = {"path": str(absolute_path(options.out.path)) if options.out else options.tag}
    if pushed := pushed_as(beside, image.digest):
        more["pushed"] = pushed
    subject = image_subject(client, image, settings, environment.site.limits)
    held = f"the daemon keeps the failed image as {image.image_id[:19]}"
    keep_receipt(verify_staged(subject, settings, environment, beside, held=held, more=more), beside)


def plan_of(
    kind: Artifact,
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    here: bool = True,
    bytecode: bool = True,
    verify: bool = True,
    **use: Unpack[LockUse],
) -> Plan:
    """Return the plan of an artifact of `kind`, as its build makes it.

    Raises the errors of that build, without `verify` those of a build without verification. Without `here`, it raises
    no error that depends on this host. `bytecode` is whether to look for the interpreter that compiles an image's
    bytecode.
    """
    if isinstance(kind, FolderArtifact):
        from envbuild.build.folder import prepare_folder  # images need nothing of environments in folders

        return prepare_folder(kind, loaded, target, environment, here=here, verify=verify, **use)[0]
    return prepare_image(loaded, target, environment, bytecode=bytecode, here=here, verify=verify, **use).plan


# All that an interpreter needs that imports nothing but built-in modules.
_PACKAGES = r"(lib)?python{python}-minimal|libc6|libexpat1|zlib1g"
_FILES = re.compile(r"usr/bin/python3\.\d+|usr/lib/python3\.\d+/.*\.py|usr/lib/([^/]+/)?[^/]+\.so(\.[^/]*)?")


def image_compiler(
    lock: ImageLock, python: str, environment: Environment, *, conda: bool, offline: bool, log: Log
) -> Compiler | None:
    """Return the compiler of the bytecode of an image with the base of `lock`, None for an image without bytecode.

    It is envbuild's own or another Python of this host with the version `python`, else the base's Python if this host
    can run it. The latter is unpacked at its first use: an image of cached layers does not need it.
    """
    # Two users of one envbuild get the same bytes, whatever is on their PATH.
    if host_python := own_python(python) or find_python(python, environment):
        return compiler_of(host_python)
    base, lacking = lock.base, f"{lock.target}: this host has no Python {python}"
    runs = not conda and Target.parse(lock.target).arch == host_arch()
    if runs and isinstance(base, DebianLock) and (own := _planned(base, python)):
        log(f"{lacking}; the image's own Python compiles its bytecode")
        return replace(own, provide=lambda: _unpacked(base, own, python, environment, offline))
    log(f"{lacking} and cannot run the image's; the image gets no bytecode, so programs start slower in it")
    return None


def _planned(lock: DebianLock, python: str) -> Compiler | None:
    """Return the base's Python from the data of its lock, without a path; None if its version is unknown."""
    version = next((deb.version for deb in lock.packages if deb.name == f"python{python}-minimal"), "")
    match = re.match(r"\d+(\.\d+){2}", version)
    magic = MAGIC.get(python)
    return Compiler("", match[0], f"cpython-{python.replace('.', '')}", magic) if match and magic else None


def _unpacked(lock: DebianLock, own: Compiler, python: str, environment: Environment, offline: bool) -> Compiler:
    """Unpack the base's Python in the store; return `own` with its path. Raises BuildError or HostError."""
    pattern = re.compile(_PACKAGES.format(python=re.escape(python)))
    some = replace(lock, packages=tuple(deb for deb in lock.packages if pattern.fullmatch(deb.name)))
    digest = json_digest([[deb.name, deb.sha256] for deb in some.packages]).partition(":")[2]
    root = environment.store.folder(FOLDER) / f"debian-{digest}"
    with atomic.exclusive(root, lambda _: None):
        if not root.is_dir():
            with atomic.staged(root) as staged, step(f"unpacking the image's Python {own.version}"):
                _unpack(some, staged, environment, offline)
                atomic.replace(staged, root)
    environment.store.note_use(root, root)
    (loader,) = {os.path.realpath(path) for path in root.glob("usr/lib*/**/ld-linux*.so*")}
    folders = sorted({os.fspath(path.parent) for path in root.glob("usr/lib*/**/*.so*")})
    start = (loader, "--library-path", ":".join(folders))
    program, home = str(root / "usr/bin" / f"python{python}"), str(root / "usr")
    there = compiler_of(read_python(program, start, home))
    if there.identity != own.identity:
        raise HostError(f"{program} is {there.identity}, not {own.identity}", "build with --no-bytecode")
    return replace(there, python=program, start=start, home=home)


def _unpack(lock: DebianLock, folder: Path, environment: Environment, offline: bool) -> None:
    files = fetch_locked(lock, environment, offline=offline)
    with atomic.writing(folder):
        for deb, file in zip(lock.packages, files, strict=True):
            for entry, content in read_data(file, deb.name):
                name = merged(entry.path)
                place = folder / name
                if not _FILES.fullmatch(name) or place.exists():
                    continue
                place.parent.mkdir(parents=True, exist_ok=True)
                if entry.kind == SYMLINK and "/" not in entry.target:
                    place.symlink_to(entry.target)
                elif entry.kind == FILE and content is not None:
                    with place.open("wb") as stream:
                        shutil.copyfileobj(content, stream)
                    place.chmod(entry.mode & 0o755)
