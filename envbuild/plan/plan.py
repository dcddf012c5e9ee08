"""Recipe + lock + target → plan: what a builder does, in order, with a digest. Pure, no I/O."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from envbuild.lock.format import Lock, LockedPackage
from envbuild.recipe.model import Recipe, VerifyTable
from envbuild.recipe.targets import Target

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Layer:
    """One ordered part of an artifact. `digest` covers all that determines its bytes.

    `kind` is "python" (an interpreter of version `version`), "wheel" (a locked distribution) or
    "trainer" (the bundled ddp_train).
    """

    kind: str
    name: str
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a builder needs. Equal plans give equal artifacts."""

    recipe: str
    recipe_digest: str
    lock_digest: str
    artifact: str
    target: str
    python: str
    platform: str
    indexes: tuple[str, ...]
    packages: tuple[LockedPackage, ...]
    layers: tuple[Layer, ...]
    verify: VerifyTable
    compile_bytecode: bool = False

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
            "digest": self.digest,
            "layers": [asdict(layer) for layer in self.layers],
        }


def make_plan(
    recipe: Recipe,
    recipe_digest: str,
    lock: Lock,
    target: Target,
    *,
    artifact: str,
    trainer_version: str,
    trainer_digest: str,
    compile_bytecode: bool = False,
) -> Plan:
    """The plan of one artifact: the interpreter, every locked wheel by name, then the trainer."""
    layers = [
        Layer("python", "python", lock.python, _digest(["python", lock.python, lock.platform]))
    ]
    layers += [
        Layer("wheel", package.name, package.version, _digest(["wheel", package.hashes]))
        for package in lock.packages
    ]
    layers.append(Layer("trainer", "ddp-train", trainer_version, trainer_digest))
    table = recipe.targets[target.name]
    return Plan(
        recipe=recipe.name,
        recipe_digest=recipe_digest,
        lock_digest=lock.digest,
        artifact=artifact,
        target=target.name,
        python=lock.python,
        platform=lock.platform,
        indexes=table.indexes,
        packages=lock.packages,
        layers=tuple(layers),
        verify=recipe.verify,
        compile_bytecode=compile_bytecode,
    )


def _digest(value: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value).encode()).hexdigest()
