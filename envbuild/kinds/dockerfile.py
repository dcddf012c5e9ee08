"""Verified images built by `docker build` from Dockerfile.cpu or Dockerfile.gpu."""

from __future__ import annotations

import hashlib
import posixpath
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

from envbuild.artifacts import dockerfile, pip_records
from envbuild.artifacts.docker_layer import add_files
from envbuild.artifacts.image import PreparedImage
from envbuild.artifacts.image_manifest import FILE_NAME, OCI, PathRow, render
from envbuild.artifacts.state import FILE, IMAGE, State, state_of
from envbuild.base.errors import HostError, UsageError
from envbuild.base.progress import log
from envbuild.environment import Environment
from envbuild.image.daemon import connect
from envbuild.image.entry import FILE as REGULAR
from envbuild.image.model import GOARCH, digest_of
from envbuild.image.reference import parse_reference
from envbuild.kinds.commit import has_receipt
from envbuild.kinds.image import ImageOptions, report, verify_image
from envbuild.kinds.prepare import prepare
from envbuild.layers.compose import PREFIX, source_date
from envbuild.layers.requested import RequestedLayers, requested_layers
from envbuild.layers.wheels import locate
from envbuild.lock.base import builder_lock, image_lock
from envbuild.lock.image import ImageLock, OciLock
from envbuild.lock.lifecycle import LockUse, ensure
from envbuild.plan.plan import ImageInputs
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target
from envbuild.site.settings import Site
from envbuild.verify.containers import BuiltImage, image_rows
from envbuild.verify.receipt import receipt_path


def prepare_dockerfile(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    bytecode: bool,
    base: str | None = None,
    verify: bool | None = None,
    **use: Unpack[LockUse],
) -> PreparedImage:
    """Return the plan of an image for `docker build`.

    The base is `base`, else the existing image that the recipe names, else the Dockerfile's own. Raises UsageError for
    a base or a layer that docker cannot build, and for recipes of conda packages.
    """
    if loaded.recipe.environment == "conda":
        raise UsageError(
            f"--builder dockerfile installs wheels, and {loaded.recipe.name} is made of conda packages",
            "leave --builder dockerfile out: the native builder makes their layers",
        )
    if loaded.code is not None:
        raise UsageError(
            f"{loaded.code.where}: --builder dockerfile does not install [project]",
            "leave --builder dockerfile out: the native builder installs it last",
        )
    if not target.family.dockerfile:
        raise UsageError(
            f"--builder dockerfile has no Dockerfile for {target.name}",
            "leave --builder dockerfile out: the native builder needs none",
        )
    if loaded.recipe.python == "3.9":
        raise UsageError(
            "--builder dockerfile needs Python 3.10 or later in the recipe", "the native builder takes 3.9"
        )
    if base is not None:
        lock = _unlocked(loaded, target, str(parse_reference(base)))
    elif loaded.recipe.image.base == "debian":
        lock = _unlocked(loaded, target, _mirrored(_default_base(loaded, target), environment.site))
    else:
        lock = ensure(image_lock(loaded, target), environment, **use)
        if loaded.recipe.image.base.startswith(("oci:", "docker-archive:")):
            raise UsageError(
                f"`docker build` cannot build on {loaded.recipe.image.base}",
                "load it into the daemon and name it with --base, or leave --builder dockerfile out",
            )
    layers = _layers(loaded, target, environment, lock, use)
    compiler = f"pip {loaded.recipe.python} -" if bytecode else None
    plan, trainer = prepare(
        loaded,
        target,
        environment,
        artifact=IMAGE,
        compile_bytecode=bytecode,
        image=ImageInputs(lock, compiler, source_date(environment.variables)),
        layers=layers,
        verify=verify,
        **use,
    )
    return PreparedImage(plan, trainer, None, target, layers.builder)


def make_by_dockerfile(
    prepared: Sequence[PreparedImage], options: ImageOptions, environment: Environment, *, offline: bool
) -> dict[str, Any]:
    """Build the image, verify it, and tag it in the daemon; return the object that `--json` prints.

    Raises HostError when docker cannot build for the target, BuildError when the build fails, VerificationError before
    the tag moves from an older image to this one.
    """
    started = time.monotonic()
    with _docker(prepared, options, environment) as (command, client):
        one, plan = prepared[0], prepared[0].plan
        image = _build(client, command, one, environment, offline)
        beside = options.beside(plan)
        if options.verify and not has_receipt(beside, image.digest, plan, options.asked):
            verify_image(client, plan, image, options, environment)
        name, _, label = options.tag.rpartition(":")
        client.api.tag(image.image_id, name, label)
    receipt = str(receipt_path(beside).absolute()) if options.verify else None
    known = {"path": options.tag, "digest": image.digest, "image_id": image.image_id}
    return known | report(prepared, [image.digest], [receipt], started)


def check_dockerfile(prepared: Sequence[PreparedImage], options: ImageOptions, environment: Environment) -> None:
    """Raise UsageError for an option that `docker build` does not support, HostError when docker cannot build here."""
    with _docker(prepared, options, environment):
        pass


@contextmanager
def _docker(
    prepared: Sequence[PreparedImage], options: ImageOptions, environment: Environment
) -> Iterator[tuple[dockerfile.DockerCommand, Any]]:
    """Yield docker's command and a client of its daemon, if they can build the image with these options."""
    if len(prepared) > 1:
        raise UsageError("--builder dockerfile makes the image of one target", "name one, with --target")
    if options.push:
        raise UsageError(
            "--builder dockerfile leaves the image in the daemon; it does not push",
            f"leave --push out, then: docker push {options.tag}",
        )
    if options.out is not None:
        raise UsageError(
            "--builder dockerfile leaves the image in the daemon; it writes none",
            f"leave --out out, then: docker save {options.tag}",
        )
    command, target = dockerfile.find_docker(environment.variables), prepared[0].target
    with connect(environment.variables) as client:
        version = client.version()
        system, arch = str(version.get("Os", "linux")), str(version.get("Arch", ""))
        if (system, arch) != ("linux", GOARCH[target.arch]):
            raise HostError(
                f"the docker daemon builds for {system}/{arch}, {target.name} is linux/{GOARCH[target.arch]}",
                "name a daemon of that architecture with DOCKER_HOST; the native builder builds for all",
            )
        yield command, client


def _build(
    client: Any, command: dockerfile.DockerCommand, one: PreparedImage, environment: Environment, offline: bool
) -> BuiltImage:
    plan = one.plan
    assert plan.base is not None
    log(f"{plan.recipe} for {plan.target}: {len(plan.packages)} packages")
    log(f"{one.target.family.dockerfile} on {dockerfile.image_name(plan.base)}")
    wheels, own = locate(plan, one.trainer, environment, offline)
    sources = dockerfile.stage_files(plan, environment, offline=offline)
    with dockerfile.build_context(one, wheels, environment, sources) as context:
        image_id = dockerfile.build(command, context, plan, one.builder, environment)
    installed = pip_records.read_installed(client, image_id, plan.python)
    packages = pip_records.check_installed(installed, [*wheels, *own], plan.python)
    layers = pip_records.built_layers(plan, installed.layers)
    state = state_of(plan, installed.python_version, installed.interpreter, packages, layers)
    return _with_manifest(client, command, image_id, state, environment)


def _with_manifest(
    client: Any, command: dockerfile.DockerCommand, image_id: str, state: State, environment: Environment
) -> BuiltImage:
    """Add to the image what the native builder's images hold besides: the state and the manifest of all files."""
    rows = image_rows(client, image_id, environment.site.limits, state.verify["timeout_s"])
    text = state.render().encode()
    rows[f"{PREFIX}/{FILE}"] = PathRow(REGULAR, 0o644, size=len(text), value=hashlib.sha256(text).hexdigest())
    manifest = render(OCI, rows)
    files = {FILE: text, posixpath.basename(FILE_NAME): manifest}
    whole = add_files(command, client, image_id, files, environment)
    return BuiltImage(whole, state, whole, digest_of(manifest))


def _layers(
    loaded: LoadedRecipe, target: Target, environment: Environment, base: ImageLock, use: LockUse
) -> RequestedLayers:
    """Return the source layers that a stage of the Dockerfile builds, and the image of that stage.

    That is the recipe's `build_base`; with the default base of Dockerfile.gpu, its BUILD_BASE; else the base itself,
    into which compilers are installed. Raises UsageError for layers that no stage can build.
    """
    found = requested_layers(loaded, target)
    if not found.every:
        return found
    if loaded.recipe.python == "3.10":
        raise UsageError(
            "--builder dockerfile builds [layers] with Python 3.11 or later", "the native builder takes 3.10"
        )
    hosts = {one.name for one in found.hosts}
    for one in found.every:
        outside = hosts.intersection(one.requires)
        why = f"with {', '.join(outside)} of the nodes, which" if outside else ""
        why = "as a Python package, which needs torch and" if one.system == "wheel" else why
        if why:
            where = loaded.where_build(one.name) if one.locked else loaded.where("layers", one.name)
            raise UsageError(
                f"{where}: {one.name} is built {why} no stage of the Dockerfile has",
                "leave --builder dockerfile out, or build a venv on a node",
            )
    if loaded.recipe.image.build_base:
        builder = ensure(builder_lock(loaded, target, found.sources), environment, **use)
    else:
        builder, own = base, _mirrored(dockerfile.default_base(target), environment.site)
        if target.family.gpu and dockerfile.image_name(base) == own:
            devel = dockerfile.default_base(target, "BUILD_BASE")
            builder = _unlocked(loaded, target, _mirrored(devel, environment.site))
    identity = f"docker build on {dockerfile.image_name(builder)}"
    sources = tuple(replace(one, environment=identity) for one in found.sources)
    return RequestedLayers(sources, found.hosts, builder)


def _unlocked(loaded: LoadedRecipe, target: Target, base: str) -> ImageLock:
    """Return an image as a base without a lock; only a digest in its name pins it."""
    return ImageLock(loaded.recipe.name, target.name, loaded.digest, OciLock(base, ""))


def _default_base(loaded: LoadedRecipe, target: Target) -> str:
    base, python = dockerfile.default_base(target), loaded.recipe.python
    if not target.family.gpu:
        return re.sub(r"(?<=/python:)[0-9.]+", python, base)
    if f":{target.version}." not in base:
        raise UsageError(
            f"{target.family.dockerfile} builds on {base}, which is not for {target.name}",
            f"name an image with CUDA {target.version}: --base docker.io/nvidia/cuda:TAG",
        )
    return base


def _mirrored(base: str, site: Site) -> str:
    """Return the name of `base` at the site's first mirror of its registry, or `base` without a mirror."""
    reference = parse_reference(base)
    mirrors = site.registry(reference.registry).mirrors
    if not mirrors:
        return base
    mirror = mirrors[0].partition("://")[2].strip("/")
    return f"{mirror}/{reference.repository}:{reference.pointer}"
