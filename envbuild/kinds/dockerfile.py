"""Verified images built by `docker build` from Dockerfile.cpu or Dockerfile.gpu."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Unpack

from envbuild.artifacts import dockerfile, dockerfile_layers, pip_records
from envbuild.artifacts.state import IMAGE, State, state_of
from envbuild.environment import Environment
from envbuild.errors import HostError, UsageError
from envbuild.image.model import GOARCH
from envbuild.image.reference import parse_reference
from envbuild.kinds.commit import has_receipt
from envbuild.kinds.docker import DOCKER
from envbuild.kinds.image import ImageOptions, PreparedImage, source_date, verify_image
from envbuild.kinds.prepare import prepare
from envbuild.layers.requested import RequestedLayers, requested_layers
from envbuild.layers.wheels import locate
from envbuild.lock.base import image_lock
from envbuild.lock.image import ImageLock, OciLock
from envbuild.lock.lifecycle import ensure
from envbuild.lock.state import LockUse
from envbuild.plan.plan import ImageInputs
from envbuild.progress import Log
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target
from envbuild.site.settings import Site


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image that `docker build` left in the daemon. Its digest is its id there: it has no manifest yet."""

    image_id: str
    state: State

    @property
    def digest(self) -> str:
        return self.image_id


def prepare_dockerfile(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    bytecode: bool,
    base: str | None = None,
    **use: Unpack[LockUse],
) -> PreparedImage:
    """Return the plan of an image for `docker build`.

    The base is `base`, else the existing image that the recipe names, else the Dockerfile's own. Raises
    UsageError for a base or a layer that docker cannot build, and for recipes of conda packages.
    """
    if loaded.recipe.environment == "conda":
        raise UsageError(
            f"--builder dockerfile installs wheels, and {loaded.recipe.name} is made of conda packages",
            "leave --builder dockerfile out: the native builder makes their layers",
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
        loaded, target, environment, artifact=IMAGE, compile_bytecode=bytecode,
        image=ImageInputs(lock, compiler, source_date(environment)),
        layers=layers, **use,
    )  # fmt: skip
    return PreparedImage(plan, trainer, None, target, layers.builder)


def make_by_dockerfile(
    prepared: Sequence[PreparedImage], wish: ImageOptions, environment: Environment, log: Log, *, offline: bool
) -> dict[str, Any]:
    """Build the image, verify it, and tag it in the daemon; return the object that `--json` prints.

    Raises HostError when docker cannot build for the target, BuildError when the build fails, VerificationError
    before the tag moves from an older image to this one.
    """
    from envbuild.image.daemon import connect
    from envbuild.verify.receipt import receipt_path

    started = time.monotonic()
    _check(prepared, wish)
    one, plan = prepared[0], prepared[0].plan
    command = dockerfile.find_docker(environment.variables)
    with connect(environment.variables) as client:
        _check_daemon(client, one.target)
        image = _build(client, command, one, environment, log, offline)
        beside = DOCKER.default_path(plan.recipe, plan.target)
        if wish.verify and not has_receipt(beside, image.digest, plan, wish.faults):
            verify_image(client, one, image, wish, beside, environment, log)
        name, _, label = wish.tag.rpartition(":")
        client.api.tag(image.image_id, name, label)
    receipt = str(receipt_path(beside).absolute()) if wish.verify else None
    return {
        "path": wish.tag,
        "digest": image.digest,
        "image_id": image.image_id,
        "receipt": receipt,
        "target": plan.target,
        "targets": [{"target": plan.target, "digest": image.digest, "receipt": receipt}],
        "warnings": list(plan.warnings),
        "seconds": round(time.monotonic() - started, 3),
    }


def check_dockerfile(prepared: Sequence[PreparedImage], wish: ImageOptions, environment: Environment) -> None:
    """Raise UsageError for an option that `docker build` does not support, HostError when docker cannot build here."""
    from envbuild.image.daemon import connect

    _check(prepared, wish)
    dockerfile.find_docker(environment.variables)
    with connect(environment.variables) as client:
        _check_daemon(client, prepared[0].target)


def _check(prepared: Sequence[PreparedImage], wish: ImageOptions) -> None:
    if len(prepared) > 1:
        raise UsageError("--builder dockerfile makes the image of one target", "name one, with --target")
    if wish.push:
        raise UsageError(
            "--builder dockerfile leaves the image in the daemon; it does not push",
            f"leave --push out, then: docker push {wish.tag}",
        )
    if wish.out is not None:
        raise UsageError(
            "--builder dockerfile leaves the image in the daemon; it writes none",
            f"leave --out out, then: docker save {wish.tag}",
        )


def _check_daemon(client: Any, target: Target) -> None:
    version = client.version()
    system, arch = str(version.get("Os", "linux")), str(version.get("Arch", ""))
    if (system, arch) != ("linux", GOARCH[target.arch]):
        raise HostError(
            f"the docker daemon builds for {system}/{arch}, {target.name} is linux/{GOARCH[target.arch]}",
            "name a daemon of that architecture with DOCKER_HOST; the native builder builds for all",
        )


def _build(
    client: Any,
    command: dockerfile.DockerCommand,
    one: PreparedImage,
    environment: Environment,
    log: Log,
    offline: bool,
) -> BuiltImage:
    plan = one.plan
    assert plan.base is not None
    log(f"{plan.recipe} for {plan.target}: {len(plan.packages)} packages")
    log(f"{dockerfile.dockerfile_name(one.target)} on {dockerfile.base_name(plan)}")
    wheels, own = locate(plan, one.trainer, environment, offline)
    sources = dockerfile_layers.stage_files(plan, environment, offline=offline)
    builder = dockerfile.image_name(one.builder) if one.builder else None
    created = datetime.fromtimestamp(plan.mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with dockerfile.build_context(plan, one.trainer, wheels, environment, sources) as context:
        image_id = dockerfile.build(
            command, context, dockerfile.build_arguments(plan, builder),
            dockerfile.labels(plan, created), environment, log,
        )  # fmt: skip
    installed = pip_records.read_installed(client, image_id, plan.python)
    packages = pip_records.check_installed(installed, [*wheels, own], plan.python)
    state = state_of(
        plan,
        python_version=installed.python_version,
        interpreter=installed.interpreter,
        packages=packages,
        layers=dockerfile_layers.built_layers(plan, installed.layers),
    )
    return BuiltImage(image_id, state)


def _layers(
    loaded: LoadedRecipe, target: Target, environment: Environment, base: ImageLock, use: LockUse
) -> RequestedLayers:
    """Return the source layers that a stage of the Dockerfile builds, and the image of that stage.

    That image is the recipe's `build_base`, by its locked digest; with the default base of Dockerfile.gpu, its
    BUILD_BASE; else the base itself, into which compilers are installed. Raises UsageError for layers that no
    stage can build.
    """
    found = requested_layers(loaded, target)
    if not found.sources:
        return found
    if loaded.recipe.python == "3.10":
        raise UsageError(
            "--builder dockerfile builds [layers] with Python 3.11 or later", "the native builder takes 3.10"
        )
    hosts = {one.name for one in found.hosts}
    for one in found.sources:
        outside = hosts.intersection(one.requires)
        why = f"with {', '.join(outside)} of the nodes, which" if outside else ""
        why = "as a Python package, which needs torch and" if one.system == "wheel" else why
        if why:
            raise UsageError(
                f"{loaded.where('layers', one.name)}: layer {one.name} is built {why} no stage of the Dockerfile has",
                "leave --builder dockerfile out, or build a venv on a node",
            )
    if loaded.recipe.image.build_base:
        from envbuild.lock.builder import builder_lock

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
            f"{dockerfile.dockerfile_name(target)} builds on {base}, which is not for {target.name}",
            f"name an image with CUDA {target.version}: --base docker.io/nvidia/cuda:TAG",
        )
    return base


def _mirrored(base: str, site: Site) -> str:
    """Return the name of `base` at the site's first mirror of its registry, or `base` without a mirror."""
    reference = parse_reference(base)
    mirrors = site.registry(reference.registry).mirrors
    if not mirrors:
        return base
    place = mirrors[0].partition("://")[2].strip("/")
    return f"{place}/{reference.repository}:{reference.pointer}"
