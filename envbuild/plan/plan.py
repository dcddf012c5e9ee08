"""Recipe + lock + target → plan: what a builder does, in order, with a digest. Pure, no I/O."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envbuild.lock.conda import CondaLock, CondaPackage
from envbuild.lock.format import Lock, LockedPackage
from envbuild.lock.image import ImageLock, OciLock
from envbuild.recipe.image import ImageTable
from envbuild.recipe.model import Recipe, VerifyTable
from envbuild.recipe.sources import HostLayer, SourceLayer
from envbuild.recipe.targets import Target

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One ordered part of an artifact. `digest` covers all that determines its bytes.

    `kind` is "python" (an interpreter of version `version`), "base" (what an image is built on),
    "bytecode" (the interpreter that compiles modules for an image), "conda" (a locked conda package),
    "wheel" (a locked distribution), "source" (built from source), "host" (what the nodes have), "fabric" (the
    network that must be in use), "trainer" (the bundled ddp_train) or "config" (an image's settings).
    """

    kind: str
    name: str
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a builder needs. Equal plans give equal artifacts.

    `packages` are wheels; where there are `conda` packages they are what pip adds to those. `mtime` is the
    time of an image's files (seconds since 1970), `folder` the recipe's: paths of local base images begin there.
    `sources` are built from source, in this order; `host_layers` are what the nodes have.
    `warnings` are those of the lock.
    """

    recipe: str
    recipe_digest: str
    lock_digest: str
    artifact: str
    target: str
    python: str
    platform: str
    indexes: tuple[str, ...]
    packages: tuple[LockedPackage, ...]
    layers: tuple[Step, ...]
    verify: VerifyTable
    compile_bytecode: bool = False
    base: ImageLock | None = None
    image: ImageTable | None = None
    mtime: int = 0
    folder: Path = Path()
    conda: tuple[CondaPackage, ...] = ()
    sources: tuple[SourceLayer, ...] = ()
    host_layers: tuple[HostLayer, ...] = ()
    fabric: str = "any"
    warnings: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 of what decides the artifact's content: not where wheels come from, nor how it is verified."""
        return _digest(
            [
                FORMAT,
                self.artifact,
                self.target,
                self.python,
                self.compile_bytecode,
                [[layer.kind, layer.name, layer.version, layer.digest] for layer in self.layers],
            ]
        )

    @property
    def has_torch(self) -> bool:
        """Whether the artifact has torch: from its locks, from source, or from an existing image that it is built on,
        whose packages an environment of wheels sees."""
        if self.image is not None and self.image.base != "debian" and not self.conda:
            return True
        names = {one.name for one in self.packages} | {one.name for one in self.sources}
        return "torch" in names or any(one.name == "pytorch" for one in self.conda)

    def verify_settings(self) -> dict[str, Any]:
        """The recipe's [verify] table as plain data, for the artifact's own record."""
        return asdict(self.verify)

    def as_json(self) -> dict[str, Any]:
        """The plan as `envbuild plan --json` prints it."""
        return {
            "recipe": self.recipe,
            "recipe_digest": self.recipe_digest,
            "lock_digest": self.lock_digest,
            "artifact": self.artifact,
            "target": self.target,
            "python": self.python,
            "platform": self.platform,
            "compile_bytecode": self.compile_bytecode,
            **({"base": self.base.digest} if self.base else {}),
            "digest": self.digest,
            "fabric": self.fabric,
            "layers": [asdict(layer) for layer in self.layers],
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """What decides an image besides recipe and wheel lock: its locked base, the interpreter that makes its
    bytecode (name, version and magic number; None for no bytecode), and the time of its files (seconds since 1970)."""

    base: ImageLock
    compiler: str | None
    mtime: int


def make_plan(
    recipe: Recipe,
    recipe_digest: str,
    lock: Lock | CondaLock,
    target: Target,
    *,
    artifact: str,
    trainer_version: str,
    trainer_digest: str,
    compile_bytecode: bool = False,
    image: ImageInputs | None = None,
    folder: Path = Path(),
    sources: tuple[SourceLayer, ...] = (),
    host_layers: tuple[HostLayer, ...] = (),
) -> Plan:
    """The plan of one artifact: interpreter or base, every locked package by name, what is built from source, then
    the trainer."""
    wheels = lock.pip if isinstance(lock, CondaLock) else lock
    conda = lock.packages if isinstance(lock, CondaLock) else ()
    layers = _base_layers(image) if image else []
    if not conda and image is None:
        python = _digest(["python", wheels.python, wheels.platform])
        layers = [Step("python", "python", wheels.python, python)]
    layers += [
        Step(
            "conda", package.name, f"{package.version} {package.build}", f"sha256:{package.sha256}"
        )
        for package in conda
    ]
    layers += [
        Step("wheel", package.name, package.version, _digest(["wheel", package.hashes]))
        for package in wheels.packages
    ]
    layers += [Step("source", one.name, one.version, one.digest) for one in sources]
    layers += [
        Step("host", one.name, one.version, _digest(["host", one.name, one.version, one.path]))
        for one in host_layers
    ]
    if recipe.fabric != "any":  # what is built says which network it is for
        layers.append(Step("fabric", recipe.fabric, "", _digest(["fabric", recipe.fabric])))
    layers.append(Step("trainer", "ddp-train", trainer_version, trainer_digest))
    if image is not None:
        settings = [recipe.image.workdir, sorted(recipe.image.env.items()), recipe.image.python]
        layers.append(Step("config", "image", "", _digest([*settings, image.mtime])))
    table = recipe.targets[target.name]
    return Plan(
        recipe=recipe.name,
        recipe_digest=recipe_digest,
        lock_digest=lock.digest,
        artifact=artifact,
        target=target.name,
        python=wheels.python,
        platform=wheels.platform,
        indexes=table.indexes,
        packages=wheels.packages,
        layers=tuple(layers),
        verify=recipe.verify,
        compile_bytecode=compile_bytecode,
        base=image.base if image else None,
        image=recipe.image if image else None,
        mtime=image.mtime if image else 0,
        folder=folder,
        conda=conda,
        sources=sources,
        host_layers=host_layers,
        fabric=recipe.fabric,
        warnings=wheels.warnings,
    )


def _base_layers(image: ImageInputs) -> list[Step]:
    base = image.base.base
    if isinstance(base, OciLock):
        first = Step("base", base.reference, base.digest.removeprefix("sha256:")[:12], base.digest)
    else:
        version = f"{len(base.packages)} packages"
        first = Step("base", f"debian {base.suite}", version, image.base.digest)
    if image.compiler is None:
        return [first]
    tag, version, _ = image.compiler.split(" ")
    return [first, Step("bytecode", tag, version, _digest(["bytecode", image.compiler]))]


def _digest(value: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value).encode()).hexdigest()
