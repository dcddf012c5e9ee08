"""An image from a plan: base layers, wheels, environment; the same bytes on every machine.

Docker, enroot and Apptainer artifacts all come from what `assemble` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from envbuild import __version__
from envbuild.artifacts.state import State, state_of
from envbuild.environment import Environment
from envbuild.errors import BuildError
from envbuild.image.blobs import Blobs
from envbuild.image.layer import Layer
from envbuild.image.model import (
    GOARCH,
    OCI_CONFIG,
    OCI_MANIFEST,
    Descriptor,
    Manifest,
    canonical,
    digest_of,
    parse,
)
from envbuild.layers.base import BaseImage, base_image
from envbuild.layers.bytecode import Compiler
from envbuild.layers.compose import PREFIX, Part, WheelFile, environment_part, wheel_parts
from envbuild.layers.made import Made, make_part
from envbuild.layers.trainer import Trainer
from envbuild.layers.wheel import Scheme, wheel_record
from envbuild.layers.wheels import locate
from envbuild.plan.plan import Plan
from envbuild.recipe.targets import Target
from envbuild.record import record_digest

Say = Callable[[str], None]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CUDA = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}


@dataclass(frozen=True, slots=True)
class Image:
    """An assembled image: its manifest, configuration, layers from the base up, and where their blobs are."""

    manifest: Manifest
    config: bytes
    layers: tuple[Made, ...]
    state: State
    arch: str
    base_name: str
    blobs: Blobs

    @property
    def digest(self) -> str:
        """The manifest's digest: the name under which a registry knows the image."""
        return self.manifest.digest

    @property
    def image_id(self) -> str:
        """The configuration's digest: the name under which a docker daemon knows the image."""
        return self.manifest.config.digest

    @property
    def descriptor(self) -> Descriptor:
        """The manifest with its platform, for an index."""
        one = self.manifest.descriptor
        return Descriptor(one.media_type, one.digest, one.size, self.arch, "linux")


def assemble(
    plan: Plan,
    trainer: Trainer,
    compiler: Compiler | None,
    environment: Environment,
    say: Say,
    *,
    offline: bool,
) -> Image:
    """Make the image of `plan` in the store; layers that were made before are taken as they are.

    Raises BuildError or LockError (a wheel, package or base image that no source has).
    """
    assert plan.image is not None and plan.base is not None
    target, store = Target.parse(plan.target), environment.store
    store.clean_stale()
    scheme = Scheme(PREFIX, plan.python)
    base = base_image(plan, compiler, environment, say, offline=offline)
    wheels, own = locate(plan, trainer, environment, offline)
    made = list(base.layers)
    for part in wheel_parts(wheels, scheme, compiler, plan.mtime):
        made.append(make_part(part, store, say))
    last, state = _environment_layer(plan, base, own, compiler, made)
    made.append(make_part(last, store, say))
    blobs = store.blobs
    config = canonical(_config(plan, base, made, target))
    manifest = _manifest(config, [m.layer for m in made])
    for data in (config, manifest.raw):
        blobs.add(data)
    return Image(manifest, config, tuple(made), state, GOARCH[target.arch], base.name, blobs)


def _environment_layer(
    plan: Plan, base: BaseImage, own: WheelFile, compiler: Compiler | None, made: list[Made]
) -> tuple[Part, State]:
    """The last layer, and the record of the whole that it holds."""
    found = [distribution for layer in made for distribution in layer.distributions]
    wanted = {(package.name, package.version) for package in plan.packages}
    if {(name, version) for name, version, _ in found} != wanted:
        names = sorted({f"{n} {v}" for n, v, _ in found} ^ {f"{n} {v}" for n, v in wanted})
        raise BuildError(f"the wheels do not hold what is locked: {', '.join(names)}")
    scheme = Scheme(PREFIX, plan.python)
    trainer = (own.name, own.version, record_digest(wheel_record(own.path, scheme)))
    state = state_of(
        plan,
        python_version=base.python_version,
        interpreter=base.interpreter,
        packages=tuple(sorted([*found, trainer])),
    )
    assert plan.image is not None
    part = environment_part(
        own, scheme, base.interpreter, base.python_version, state.render(),
        compiler, plan.mtime, system_packages=base.system_packages, folders=[plan.image.workdir],
    )  # fmt: skip
    return part, state


def _config(plan: Plan, base: BaseImage, made: list[Made], target: Target) -> dict[str, Any]:
    """The image's configuration (OCI image-spec 1.1, config.md)."""
    assert plan.image is not None and plan.base is not None
    created = datetime.fromtimestamp(plan.mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    run = dict(base.config)
    labels = dict(run.get("Labels") or {})
    labels |= {
        "org.opencontainers.image.title": plan.recipe,
        "org.opencontainers.image.created": created,
        "org.opencontainers.image.base.name": base.name,
        "org.envbuild.recipe": plan.recipe,
        "org.envbuild.recipe.digest": plan.recipe_digest,
        "org.envbuild.lock.digest": plan.lock_digest,
        "org.envbuild.base.digest": plan.base.digest,
        "org.envbuild.plan.digest": plan.digest,
        "org.envbuild.target": plan.target,
        "org.envbuild.version": __version__,
    }
    if base.digest:
        labels["org.opencontainers.image.base.digest"] = base.digest
    run |= {
        "Env": [f"{name}={value}" for name, value in _variables(plan, base, target).items()],
        "WorkingDir": plan.image.workdir,
        "Labels": labels,
    }
    if not run.get("Cmd") and not run.get("Entrypoint"):
        run["Cmd"] = ["/bin/bash"]
    history = [
        {"created": created, "created_by": f"envbuild: {layer.title}", "comment": "envbuild"}
        for layer in made
    ]
    return {
        "created": created,
        "architecture": GOARCH[target.arch],
        "os": "linux",
        "config": run,
        "rootfs": {"type": "layers", "diff_ids": [layer.layer.diff_id for layer in made]},
        "history": history,
    }


def _variables(plan: Plan, base: BaseImage, target: Target) -> Mapping[str, str]:
    assert plan.image is not None
    variables = dict(pair.partition("=")[::2] for pair in base.config.get("Env") or [])
    path = variables.get("PATH") or _PATH
    variables["PATH"] = f"/{PREFIX}/bin:{path}"
    variables["VIRTUAL_ENV"] = f"/{PREFIX}"
    variables.setdefault("LANG", "C.UTF-8")
    torch = next((p.version for p in plan.packages if p.name == "torch"), None)
    if torch:
        variables["PYTORCH_VERSION"] = torch
    if target.is_cuda:
        variables = {**_CUDA, **variables}
    return {**variables, **plan.image.env}


def _manifest(config: bytes, layers: list[Layer]) -> Manifest:
    raw = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": Descriptor(OCI_CONFIG, digest_of(config), len(config)).as_json(),
            "layers": [layer.blob.as_json() for layer in layers],
        }
    )
    manifest = parse(raw, "the image's manifest")
    assert isinstance(manifest, Manifest)
    return manifest
