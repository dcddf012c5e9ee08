"""Plan of an artifact, from recipe, lock and target: the ordered steps of the build, with a digest. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from envbuild import __version__
from envbuild.base.packages import json_digest
from envbuild.contract.state import BuiltLayer, State
from envbuild.contract.verification import VerifySettings
from envbuild.lock.conda import CondaLock, CondaPackage
from envbuild.lock.format import Lock
from envbuild.recipe.checks import references
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import ImageTable
from envbuild.recipe.project import OwnCode
from envbuild.recipe.sources import HostLayer, LockedPackage, SourceLayer
from envbuild.recipe.targets import Target
from envbuild.slim import SlimRules, slim_rules

if TYPE_CHECKING:
    from envbuild.lock.image import ImageLock

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan: one part of an artifact, in order. `digest` covers all inputs that determine its bytes.

    `kind` is "python" (an interpreter of version `version`), "base" (the base of an image), "bytecode" (the
    interpreter that compiles modules for an image), "conda" (a locked conda package), "wheel" (a locked
    distribution), "source" (a source layer), "host" (a layer that the nodes provide), "slim" (the rules of [slim] for
    wheels), "fabric" (the network that must be in use), "trainer" (the bundled ddp_train), "config" (the settings of an
    image) or "project" (the user's own code, with its commit as `version`).
    """

    kind: str
    name: str
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All inputs of a build. Equal plans give equal artifacts.

    `packages` are wheels; with `conda` packages, they are the packages that pip adds. `mtime` is the time of an image's
    files (seconds since 1970). `folder` is the recipe's folder; paths of local base images are relative to it.
    `sources` are built from source, in this order; `host_layers` are provided by the nodes. `warnings` are the lock's
    warnings. `bound` maps normalised names of packages to their only source: an index of the site, or the URL of a
    wheel. `project` is the user's own code, which comes last. `slim` are the rules by which files and code are left out
    of wheels.
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
    verify: VerifySettings
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
    bound: Mapping[str, str] = field(default_factory=dict)
    project: OwnCode | None = None
    slim: SlimRules | None = None

    @property
    def digest(self) -> str:
        """sha256 over the inputs of the artifact's content, except the sources of wheels and the verification."""
        steps = [[step.kind, step.name, step.version, step.digest] for step in self.layers]
        return json_digest([FORMAT, self.artifact, self.target, self.python, self.compile_bytecode, steps])

    @property
    def has_torch(self) -> bool:
        """Whether the artifact has torch: from the locks, from source, or from an existing base image."""
        if self.image is not None and self.image.base != "debian" and not self.conda:
            return True
        names = {package.name for package in self.packages} | {layer.name for layer in self.sources}
        return "torch" in names or any(package.name == "pytorch" for package in self.conda)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as `envbuild plan --json` prints it."""
        names = "recipe recipe_digest lock_digest artifact target python platform compile_bytecode"
        return {
            **{name: getattr(self, name) for name in names.split()},
            **({"base": self.base.digest} if self.base else {}),
            "digest": self.digest,
            "fabric": self.fabric,
            "layers": [asdict(layer) for layer in self.layers],
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """Inputs of an image in addition to recipe and wheel lock.

    `base` is the locked base, `compiler` the interpreter that compiles its bytecode (name, version and magic
    number; None for no bytecode), `mtime` the time of its files (seconds since 1970).
    """

    base: ImageLock
    compiler: str | None
    mtime: int


def make_plan(
    loaded: LoadedRecipe,
    lock: Lock | CondaLock,
    target: Target,
    *,
    artifact: str,
    trainer_version: str,
    trainer_digest: str,
    compile_bytecode: bool = False,
    image: ImageInputs | None = None,
    sources: tuple[SourceLayer, ...] = (),
    host_layers: tuple[HostLayer, ...] = (),
    project: OwnCode | None = None,
) -> Plan:
    """Return the plan of one artifact, with its steps in the order of the build."""
    recipe = loaded.recipe
    wheels = lock.pip if isinstance(lock, CondaLock) else lock
    conda = lock.packages if isinstance(lock, CondaLock) else ()
    steps = _base_steps(image) if image else []
    if not conda and image is None:
        steps = [_step("python", "python", wheels.python, wheels.python, wheels.platform)]
    steps += [
        Step("conda", package.name, f"{package.version} {package.build}", f"sha256:{package.sha256}")
        for package in conda
    ]
    steps += [_step("wheel", package.name, package.version, package.hashes) for package in wheels.packages]
    steps += [Step("source", layer.name, layer.version, layer.digest) for layer in sources]
    steps += [_step("host", layer.name, layer.version, layer.name, layer.version, layer.path) for layer in host_layers]
    table = recipe.targets[target.name]
    slim = slim_rules(**asdict(recipe.slim), words=table.gpus)
    if slim is not None:
        steps.append(_step("slim", "wheels", f"rules {slim.version}", slim.as_json()))
    if recipe.fabric != "any":  # the artifact records the network that it is for
        steps.append(_step("fabric", recipe.fabric, "", recipe.fabric))
    steps.append(Step("trainer", "ddp-train", trainer_version, trainer_digest))
    if image is not None:
        settings = [recipe.image.workdir, sorted(recipe.image.env.items()), recipe.image.python]
        steps.append(Step("config", "image", "", json_digest([*settings, image.mtime])))
    if project is not None:
        steps.append(Step("project", project.name or project.root.name, project.commit, project.digest))
    return Plan(
        recipe=recipe.name,
        recipe_digest=loaded.digest,
        lock_digest=lock.digest,
        artifact=artifact,
        target=target.name,
        python=wheels.python,
        platform=wheels.platform,
        indexes=table.indexes,
        packages=wheels.packages,
        layers=tuple(steps),
        verify=replace(
            recipe.verify,
            direct=tuple(sorted({*loaded.direct(target, bool(conda)), *([project.name] if project else [])} - {""})),
            script_text=loaded.script[1] if loaded.script else "",
            gpus=table.gpus,
        ),
        compile_bytecode=compile_bytecode,
        base=image.base if image else None,
        image=recipe.image if image else None,
        mtime=image.mtime if image else 0,
        folder=loaded.folder,
        conda=conda,
        sources=sources,
        host_layers=host_layers,
        fabric=recipe.fabric,
        warnings=wheels.warnings,
        bound=loaded.bound | _urls(loaded, loaded.requirements(target, bool(conda))),
        project=project,
        slim=slim,
    )


class Named(Protocol):
    """A package with its name and version."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


def state_of(
    plan: Plan,
    python_version: str,
    interpreter: str,
    packages: Iterable[tuple[str, str, str]],
    layers: Sequence[BuiltLayer] = (),
    own: Sequence[Named] = (),
    python_build: str = "",
) -> State:
    """Return the state of an environment built from `plan`; `layers` are its source layers as installed.

    `own` are the wheels of own code, the project's last. `python_build` is as in State.
    """
    code, project = plan.project, dict[str, Any]()
    if code is not None:
        project = {"name": own[-1].name, "version": own[-1].version, "commit": code.commit}
        project |= {"digest": code.digest, "editable": code.editable}
    hosts = (BuiltLayer(layer.name, layer.version, "", layer.path) for layer in plan.host_layers)
    return State(
        artifact=plan.artifact,
        recipe=plan.recipe,
        recipe_digest=plan.recipe_digest,
        lock_digest=plan.lock_digest,
        plan_digest=plan.digest,
        target=plan.target,
        python=plan.python,
        python_version=python_version,
        interpreter=interpreter,
        packages=tuple(sorted(packages)),
        verify=plan.verify,
        envbuild=__version__,
        environment="conda" if plan.conda else "venv",
        layers=(*layers, *hosts),
        fabric=plan.fabric,
        project=project,
        slim=plan.slim.as_json() if plan.slim else {},
        python_build=python_build,
    )


def _urls(loaded: LoadedRecipe, requirements: Iterable[str]) -> dict[str, str]:
    return {
        name: reference.source(loaded.folder)
        for name, reference in references(requirements).items()
        if reference.is_wheel
    }


def _base_steps(image: ImageInputs) -> list[Step]:
    first = Step("base", *image.base.step)
    if image.compiler is None:
        return [first]
    tag, version, *_ = image.compiler.split(" ")
    return [first, _step("bytecode", tag, version, image.compiler)]


def _step(kind: str, name: str, version: str, *inputs: object) -> Step:
    return Step(kind, name, version, json_digest([kind, *inputs]))
