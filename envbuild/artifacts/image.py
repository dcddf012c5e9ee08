"""An image from a plan: base layers, wheels, environment; the same bytes on every machine.

One plan serves every kind of image: docker, enroot and Apptainer artifacts consist of the same layers from
`fill`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic

from envbuild import __version__
from envbuild.artifacts.layers_in import LayerFolder, check_paths, layer_parts
from envbuild.artifacts.state import State, state_of
from envbuild.environment import Environment
from envbuild.errors import BuildError
from envbuild.fingerprint import record_digest
from envbuild.image.blobs import Blobs
from envbuild.image.layer import Layer
from envbuild.image.model import (
    GOARCH,
    OCI_CONFIG,
    OCI_MANIFEST,
    Descriptor,
    ImageManifest,
    canonical,
    digest_of,
    parse,
)
from envbuild.layers.base import BaseImage, base_image
from envbuild.layers.bytecode import Compiler
from envbuild.layers.compose import PREFIX, LayerRequest, WheelFile, alone, environment_part, wheel_parts
from envbuild.layers.layer_cache import CachedLayer, LayerCache, M, TarCache
from envbuild.layers.trainer import Trainer
from envbuild.layers.wheel import Scheme, wheel_record
from envbuild.layers.wheels import locate
from envbuild.plan.plan import Plan
from envbuild.progress import Log
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.layers.conda_paths import CondaFile
    from envbuild.layers.conda_shared import Shared

# PATH of images whose base sets none.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class AssembledImage:
    """An assembled image: its manifest, configuration, layers from the lowest up, and the store of their blobs."""

    manifest: ImageManifest
    config: bytes
    layers: tuple[CachedLayer, ...]
    state: State
    arch: str
    base_name: str
    blobs: Blobs

    @property
    def digest(self) -> str:
        """The manifest's digest, by which a registry knows the image."""
        return self.manifest.digest

    @property
    def image_id(self) -> str:
        """The configuration's digest, by which a docker daemon knows the image."""
        return self.manifest.config.digest

    @property
    def descriptor(self) -> Descriptor:
        """The manifest with its platform, for an index."""
        one = self.manifest.descriptor
        return Descriptor(one.media_type, one.digest, one.size, self.arch, "linux")


@dataclass(frozen=True)
class Filled(Generic[M]):
    """The layers of a plan's image from the lowest up, and the state that the last one contains."""

    layers: tuple[M, ...]
    state: State
    base: BaseImage[M]


def assemble(
    plan: Plan,
    trainer: Trainer,
    compiler: Compiler | None,
    environment: Environment,
    log: Log,
    *,
    offline: bool,
    layers: Sequence[LayerFolder] = (),
) -> AssembledImage:
    """Assemble the image of `plan` in the store, from cached layers if possible; `layers` are its source layers.

    Raises BuildError or LockError for a wheel, package or base image that no source has.
    """
    store = environment.store
    maker = TarCache(store, log)
    filled = fill(plan, trainer, compiler, environment, maker, offline=offline, layers=layers)
    blobs, arch = store.blobs, GOARCH[Target.parse(plan.target).arch]
    config = canonical(_config(plan, filled, arch))
    manifest = _manifest(config, [made.layer for made in filled.layers])
    for data in (config, manifest.raw):
        blobs.add(data)
    return AssembledImage(manifest, config, filled.layers, filled.state, arch, filled.base.name, blobs)


def fill(
    plan: Plan,
    trainer: Trainer,
    compiler: Compiler | None,
    environment: Environment,
    maker: LayerCache[M],
    *,
    offline: bool,
    layers: Sequence[LayerFolder] = (),
) -> Filled[M]:
    """Return all layers of `plan`'s image in the form that `maker` makes. Raises BuildError or LockError."""
    environment.store.clean_stale()
    scheme = Scheme(PREFIX, plan.python)
    base = base_image(plan, compiler, environment, maker, offline=offline)
    wheels, own = locate(plan, trainer, environment, offline)
    files = _conda_files(plan, environment, offline=offline)
    conda_layers, wheel_layers = alone(files, wheels)
    parts = wheel_parts(wheels, scheme, compiler, plan.mtime, wheel_layers)
    if files:
        from envbuild.layers.conda_parts import conda_parts
        from envbuild.layers.conda_shared import shared_paths

        shared = shared_paths(files, wheels, scheme, environment.store)
        _say_scripts(shared, maker.log)
        own_parts = conda_parts(files, shared, scheme, compiler, plan.mtime, conda_layers)
        parts = own_parts + parts
    check_paths(layers, wheels, files, scheme, store=environment.store)
    parts += layer_parts(layers, PREFIX, plan.mtime)
    made = [*base.layers, *(maker.part(part) for part in parts)]
    last, state = _environment_layer(plan, base, own, compiler, made, layers)
    made.append(maker.part(last))
    return Filled(tuple(made), state, base)


def _conda_files(plan: Plan, environment: Environment, *, offline: bool) -> list[CondaFile]:
    """Return the conda packages of `plan`, if any. Raises BuildError for one that no source has."""
    if not plan.conda:
        return []
    from envbuild.layers.conda_files import locate_conda
    from envbuild.layers.conda_paths import CondaFile

    found = locate_conda(plan, environment, offline=offline)
    return [CondaFile(package, path, path.stat().st_size) for package, path in found]


def _say_scripts(shared: Shared, log: Log) -> None:
    """Report the packages with scripts of conda's that nothing runs in an image."""
    if shared.activated:
        names = ", ".join(shared.activated)
        log(f"  not activated in the image: variables that conda's scripts of {names} set; see [image] env")
    if shared.linked:
        log(f"  link scripts are not run: {', '.join(shared.linked)}")


def _environment_layer(
    plan: Plan,
    base: BaseImage[M],
    own: WheelFile,
    compiler: Compiler | None,
    made: list[M],
    layers: Sequence[LayerFolder],
) -> tuple[LayerRequest, State]:
    """Return the last layer, and the state of the whole environment, which that layer contains."""
    found = [distribution for layer in made for distribution in layer.distributions]
    wanted = {(conda.name, conda.version) for conda in plan.conda}
    wanted |= {(package.name, package.version) for package in plan.packages}
    wanted |= {distribution for layer in layers for distribution in layer.distributions}
    if {(name, version) for name, version, _ in found} != wanted:
        names = sorted({f"{n} {v}" for n, v, _ in found} ^ {f"{n} {v}" for n, v in wanted})
        raise BuildError(f"the packages differ from the lock: {', '.join(names)}")
    scheme = Scheme(PREFIX, plan.python)
    trainer = (own.name, own.version, record_digest(wheel_record(own.path, scheme)))
    state = state_of(
        plan,
        python_version=base.python_version,
        interpreter=base.interpreter,
        packages=tuple(sorted([*found, trainer])),
        layers=[layer.built for layer in layers],
    )
    assert plan.image is not None
    part = environment_part(
        own, scheme, base.interpreter, base.python_version, state.render(),
        compiler, plan.mtime, system_packages=base.system_packages, conda=bool(plan.conda),
        folders=[plan.image.workdir],
    )  # fmt: skip
    return part, state


def run_config(plan: Plan, base: BaseImage[M]) -> dict[str, Any]:
    """Return the `config` object of the image's configuration (OCI image-spec 1.1, config.md)."""
    assert plan.image is not None and plan.base is not None
    run = dict(base.config)
    labels = dict(run.get("Labels") or {})
    labels |= {
        "org.opencontainers.image.title": plan.recipe,
        "org.opencontainers.image.created": _created(plan),
        "org.opencontainers.image.base.name": base.name,
        "org.envbuild.recipe": plan.recipe,
        "org.envbuild.recipe.digest": plan.recipe_digest,
        "org.envbuild.lock.digest": plan.lock_digest,
        "org.envbuild.base.digest": plan.base.digest,
        "org.envbuild.plan.digest": plan.digest,
        "org.envbuild.target": plan.target,
        "org.envbuild.version": __version__,
    }
    if plan.conda:
        labels["org.envbuild.environment"] = "conda"
    if base.digest:
        labels["org.opencontainers.image.base.digest"] = base.digest
    run |= {
        "Env": [f"{name}={value}" for name, value in _variables(plan, base).items()],
        "WorkingDir": plan.image.workdir,
        "Labels": labels,
    }
    if not run.get("Cmd") and not run.get("Entrypoint"):
        run["Cmd"] = ["/bin/bash"]
    return run


def _created(plan: Plan) -> str:
    return datetime.fromtimestamp(plan.mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _config(plan: Plan, filled: Filled[CachedLayer], arch: str) -> dict[str, Any]:
    created = _created(plan)
    history = [
        {"created": created, "created_by": f"envbuild: {layer.title}", "comment": "envbuild"} for layer in filled.layers
    ]
    return {
        "created": created,
        "architecture": arch,
        "os": "linux",
        "config": run_config(plan, filled.base),
        "rootfs": {"type": "layers", "diff_ids": [made.layer.diff_id for made in filled.layers]},
        "history": history,
    }


def _variables(plan: Plan, base: BaseImage[M]) -> Mapping[str, str]:
    assert plan.image is not None
    variables = dict(pair.partition("=")[::2] for pair in base.config.get("Env") or [])
    path = variables.get("PATH") or _PATH
    variables["PATH"] = f"/{PREFIX}/bin:{path}"
    if plan.conda:
        variables.pop("VIRTUAL_ENV", None)
        variables |= {"CONDA_PREFIX": f"/{PREFIX}", "CONDA_DEFAULT_ENV": f"/{PREFIX}"}
    else:
        variables["VIRTUAL_ENV"] = f"/{PREFIX}"
    variables.setdefault("LANG", "C.UTF-8")
    torch = next((p.version for p in plan.packages if p.name == "torch"), None)
    torch = next((p.version for p in plan.conda if p.name == "pytorch"), torch)
    if torch:
        variables["PYTORCH_VERSION"] = torch
    own = dict(Target.parse(plan.target).family.container_variables)
    return {**own, **variables, **plan.image.env}


def _manifest(config: bytes, layers: list[Layer]) -> ImageManifest:
    raw = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": Descriptor(OCI_CONFIG, digest_of(config), len(config)).as_json(),
            "layers": [layer.blob.as_json() for layer in layers],
        }
    )
    manifest = parse(raw, "the image's manifest")
    assert isinstance(manifest, ImageManifest)
    return manifest
