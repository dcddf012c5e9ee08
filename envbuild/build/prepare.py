"""Preparation of an artifact's build: its plan, with current locks, and its source layers, built here if needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Unpack

from envbuild.base import process
from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.progress import log
from envbuild.environment import Environment
from envbuild.layers.project import check_name, collect
from envbuild.layers.requested import RequestedLayers, bind_to_lock, for_host, other_host
from envbuild.layers.wheel import Trainer, load_trainer
from envbuild.lock.conda import CondaLock
from envbuild.lock.format import Lock
from envbuild.lock.lifecycle import LockUse, ensure
from envbuild.lock.wheels import wheel_lock
from envbuild.plan import ImageInputs, Plan, make_plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target, host_arch

if TYPE_CHECKING:
    from envbuild.build.installing import LayerFolder
    from envbuild.layers.source_job import BuildHost, BuildPython

# Runs a command in the folder that is its first argument; a shell exits with 127 if there is no such program.
_IN_FOLDER = 'cd "$1" || exit; shift; exec "$@"'


def prepare(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    artifact: str,
    compile_bytecode: bool = False,
    image: ImageInputs | None = None,
    conda: bool = False,
    layers: RequestedLayers | None = None,
    editable: bool = False,
    lock: Lock | CondaLock | None = None,
    verify: bool | None = None,
    **use: Unpack[LockUse],
) -> tuple[Plan, Trainer]:
    """Return the plan of `artifact` and its trainer; a missing or stale lock is updated first.

    With `conda`, the artifact consists of the recipe's conda packages. `layers` are its source layers, None for the
    ones that this host builds. An environment refers to an `editable` project. `lock` overrides the recipe's lock.
    `verify` is whether the artifact will be verified, None if nothing is built: then torch may be missing.
    """
    layers = layers or for_host(loaded, target, environment)
    if lock is None and conda:
        from envbuild.lock.conda_kind import conda_lock

        lock = ensure(conda_lock(loaded, target), environment, **use)
    elif lock is None:
        lock = ensure(wheel_lock(loaded, target), environment, **use)
    layers = bind_to_lock(layers, lock)
    trainer = load_trainer()
    plan = make_plan(
        loaded,
        lock,
        target,
        artifact=artifact,
        trainer_version=trainer.version,
        trainer_digest=trainer.digest,
        compile_bytecode=compile_bytecode,
        image=image,
        sources=layers.sources,
        host_layers=layers.hosts,
        project=collect(loaded, environment, editable=editable),
    )
    if plan.project is not None and plan.project.name:
        check_name(plan, plan.project.name)
    if verify is not None:
        _check_torch(loaded, plan, verify)
    return plan, trainer


def _check_torch(loaded: LoadedRecipe, plan: Plan, verify: bool) -> None:
    """Raise RecipeError when the artifact of `plan` will be verified and its locks lack torch.

    Raises UsageError for a virtual environment of a recipe that takes torch from its base image. Images for
    another architecture pass, because this host does not verify them.
    """
    if plan.has_torch or (verify and not plan.verify.trainer):
        return
    name, base = loaded.recipe.name, loaded.recipe.image.base
    if plan.image is None and not plan.conda and base != "debian":
        raise UsageError(
            f"recipe {name} takes torch from {base}; a virtual environment would have no torch",
            f"build it with `envbuild docker {name}`",
        )
    foreign = plan.image is not None and Target.parse(plan.target).arch != host_arch()
    if verify and not foreign:
        raise RecipeError(
            f"{loaded.path}: an artifact for {plan.target} cannot be verified: its lock has no torch, and verification "
            "trains with torch",
            f"add torch to {'[conda] dependencies' if plan.conda else '`requirements`'}; or set `trainer = false` in "
            "[verify], which leaves the imports and the command; or build without verification: --no-verify",
        )


def build_layers(
    layers: RequestedLayers, folder: Path, environment: Environment, *, offline: bool, python: BuildPython | None = None
) -> list[LayerFolder]:
    """Return every source layer of `layers`, from the store, or built and stored; `folder` is the recipe's folder.

    `python` is the Python that Python projects are built for. Raises BuildError for a build that fails, HostError when
    no build can run here.
    """
    if not layers.sources:
        return []
    # Imported here: most recipes have no source layers and need none of this.
    from envbuild.build.installing import check_free, layer_folder
    from envbuild.layers.source_build import build_layer

    build_host = partial(open_build_host, layers, folder, environment, offline=offline)
    hosts = {layer.name: layer.path for layer in layers.hosts}
    done: dict[str, LayerFolder] = {}
    for source in layers.sources:
        requires = {name: done[name].folder for name in source.requires if name in done}
        built = build_layer(source, requires, build_host, environment, log, offline=offline, hosts=hosts, python=python)
        done[source.name] = layer_folder(source, built, environment.store.digests.of)
    check_free(list(done.values()), ())
    return list(done.values())


def image_python(plan: Plan, environment: Environment, *, offline: bool) -> BuildPython:
    """Return the Python of an image of `plan` in its builder image; its packages are added when a build needs them."""
    from envbuild.layers.source_job import BuildPython

    assert plan.image is not None

    def packages(root: Path) -> None:
        from envbuild.layers.source_steps import unpack_wheel
        from envbuild.layers.wheels import fetch_wheels

        for wheel in fetch_wheels(plan.packages, environment, plan.indexes, plan.bound, offline=offline):
            unpack_wheel(wheel, root, plan.python)

    def conda(root: Path, inside: PurePath) -> None:
        from envbuild.build.conda_install import Prefix, install_packages
        from envbuild.layers.conda_package import locate_conda

        find = partial(locate_conda, environment=environment, offline=offline)
        install_packages(plan.conda, Prefix(root, os.fspath(inside)), environment.store, find, lambda: None)

    if plan.conda:
        return BuildPython("", plan.python, packages, conda)
    existing = plan.image.base != "debian"
    interpreter = plan.image.python if existing else f"/usr/bin/python{plan.python}"
    return BuildPython(interpreter, plan.python, packages, system=existing)


@contextmanager
def open_build_host(
    layers: RequestedLayers, folder: Path, environment: Environment, work: Path, *, offline: bool
) -> Iterator[BuildHost]:
    """Yield the build host of `layers` with the folder `work` shared: this host, or the builder image.

    The image is started with enroot, or else in namespaces. Raises HostError when neither can run on this host.
    """
    arch = Target.parse(layers.sources[0].target).arch
    if arch != host_arch():
        raise other_host(layers.sources, arch)
    if layers.builder is None:
        from envbuild.layers.local_build_host import local_build_host

        with local_build_host(work, environment.variables) as local:
            yield local
        return
    from envbuild.build.builder_image import builder_file
    from envbuild.verify.image_file import open_image_file
    from envbuild.verify.image_runtime import passed, runtime_for

    path = builder_file(layers.builder, folder, environment, offline=offline)
    # A build must not depend on variables that the caller has set for the programs of a job.
    kept = environment.variables.keys() - passed(environment.variables).keys()
    plain = replace(environment, variables={name: environment.variables[name] for name in kept})
    runtime = runtime_for(open_image_file(path), None, plain)
    log(f"  layers are built in {path.name[:12]}… by {runtime.name}")
    with runtime.open(work) as launch:
        yield _ImageBuildHost(work, PurePosixPath(runtime.work), launch)


@dataclass(frozen=True, slots=True)
class _ImageBuildHost:
    """A `BuildHost` in the builder image. `launch` starts a program in the runtime (verify/host.py)."""

    work: Path
    inside: PurePath
    launch: Callable[[str, Sequence[str], Mapping[str, str]], tuple[list[str], Mapping[str, str]]]

    def run(self, command: Sequence[str], cwd: PurePath, variables: Mapping[str, str], log: Path) -> int:
        words = ["-c", _IN_FOLDER, "sh", os.fspath(cwd), *command]
        line, own = self.launch("/bin/sh", words, variables)
        with log.open("ab") as stream:
            child = process.start(line, env=own, cwd=self.work, stdout=stream.fileno(), stderr=stream.fileno())
        return process.finish(child)
