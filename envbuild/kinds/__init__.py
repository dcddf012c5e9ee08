"""The kinds of artifacts: all that the rest of the package knows of them. A new kind is a new entry in ARTIFACTS.

Everything but data is imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Unpack

from envbuild.base.files import build_folder

if TYPE_CHECKING:
    from envbuild.artifacts.folder import FolderModule
    from envbuild.artifacts.state import State
    from envbuild.environment import Environment
    from envbuild.lock.lifecycle import LockUse
    from envbuild.plan.plan import Plan
    from envbuild.recipe.load import LoadedRecipe
    from envbuild.recipe.targets import Target
    from envbuild.verify.model import Subject

Form = Literal["folder", "file", "registry"]


@dataclass(frozen=True, slots=True)
class BuiltArtifact:
    """An existing artifact: its state, the digest of its content, and the path of python for its own processes."""

    state: State
    digest: str
    python: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """A kind of artifact; each subclass below is one form.

    `name` is the name of the command, and of the kind in states and receipts; `help` is the command's line in --help.
    `default_name` is the name of an artifact in build/RECIPE/TARGET. `of_conda` says that the artifact consists of the
    packages in the recipe's [conda].

    For doctor: `sources` are the sources from which a build reads besides the store, `imports` the modules that it
    imports, and `by_uv` says whether uv installs the wheels; `starters` are the programs that start the artifact, best
    first. For jobs: `containers` are the values of the site's [container] runtime that start the artifact on nodes; the
    last one needs no srun.
    """

    name: str
    help: str
    default_name: str
    sources: tuple[str, ...]
    imports: tuple[str, ...]
    of_conda: bool = False
    by_uv: bool = True
    starters: tuple[str, ...] = ()
    containers: tuple[Literal["pyxis", "enroot", "apptainer"], ...] = ()

    form: ClassVar[Form]

    def default_path(self, recipe: str, target: str) -> Path:
        """Return the path of the artifact without --out."""
        return build_folder() / recipe / target / self.default_name.format(recipe=recipe)

    def holds(self, path: Path) -> bool:
        """Return whether `path` holds an artifact of this kind. Raises BuildError for a damaged one."""
        return False

    def read(self, path: Path) -> BuiltArtifact:
        """Return the artifact at `path`. Raises UsageError when envbuild did not build it."""
        raise NotImplementedError(f"{self.name} artifacts have no path")

    def subject(self, path: Path, environment: Environment, runtime: str | None) -> Subject:
        """Return the artifact at `path` as the subject of a verification.

        `runtime` starts it, None for the best one on this host. Raises UsageError when envbuild did not build it or it
        has no such runtime, HostError when it cannot run here.
        """
        raise NotImplementedError(f"{self.name} artifacts have no path")

    def changed(self, path: Path, manifest: str, *, exact: bool = False) -> list[str]:
        """Return the files of the artifact at `path` that are not those of its manifest, whose sha256 is `manifest`.

        "" stands for the manifest inside of the artifact. With `exact`, files are read again whose stat has not changed
        since they were last compared. Raises BuildError for a damaged manifest.
        """
        return []  # the digest of an image covers all of it

    def job_variables(self, path: str) -> Mapping[str, str]:
        """Return the variables that jobs set for the artifact's processes: those that conda's activation sets."""
        if not self.of_conda:
            return {}
        from envbuild.artifacts.conda import set_variables

        return set_variables(Path(path))


@dataclass(frozen=True, slots=True)
class FolderArtifact(Artifact):
    """An environment in a folder of this host, built by the module of `artifacts` with its name.

    `states` are other names that an envbuild.json of this kind may contain.
    """

    states: tuple[str, ...] = ()
    form: ClassVar[Form] = "folder"

    def module(self) -> FolderModule:
        """Return the module of `artifacts` that builds and starts environments of this kind."""
        import importlib

        module: FolderModule = importlib.import_module(f"envbuild.artifacts.{self.name}")
        return module

    def holds(self, path: Path) -> bool:
        from envbuild.artifacts.state import read_state

        state = read_state(path)
        return state is not None and state.artifact in (self.name, *self.states)

    def read(self, path: Path) -> BuiltArtifact:
        from envbuild.artifacts.state import read_state

        state = read_state(path)
        assert state is not None, "holds() said so"
        return BuiltArtifact(state, state.digest, str(path.absolute() / "bin" / "python"))

    def changed(self, path: Path, manifest: str, *, exact: bool = False) -> list[str]:
        from envbuild.artifacts.manifest import changes
        from envbuild.base import host
        from envbuild.environment import load_environment

        environment = load_environment()
        workers = host.workers(environment.variables)
        return changes(path, self.read(path).state, manifest, environment.store, workers, exact=exact)

    def subject(self, path: Path, environment: Environment, runtime: str | None) -> Subject:
        from envbuild.base.errors import UsageError
        from envbuild.verify.host import folder_subject

        if runtime is not None:
            raise UsageError(f"{path} is no .sqsh or .sif file: it has no runtime to choose")
        return folder_subject(path, self.read(path).state, self.module(), environment)


@dataclass(frozen=True, slots=True)
class FileArtifact(Artifact):
    """An image in one file."""

    form: ClassVar[Form] = "file"

    def holds(self, path: Path) -> bool:
        from envbuild.verify.image_file import image_kind

        return image_kind(path) == self.name

    def read(self, path: Path) -> BuiltArtifact:
        from envbuild.image.sif_signed import content_digest
        from envbuild.layers.compose import PREFIX
        from envbuild.verify.image_file import image_state, open_image_file

        state = image_state(open_image_file(path))
        return BuiltArtifact(state, content_digest(path), f"/{PREFIX}/bin/python")

    def subject(self, path: Path, environment: Environment, runtime: str | None) -> Subject:
        from envbuild.verify.runtimes import open_file_subject

        return open_file_subject(path, environment, runtime)


@dataclass(frozen=True, slots=True)
class RegistryArtifact(Artifact):
    """An image in a daemon or a registry; its receipt is beside the default path."""

    form: ClassVar[Form] = "registry"


_IMAGE_SOURCES = ("package index", "Debian's archive")
_FILE_IMPORTS = ("deflate", "zstandard", "isal", "lz4", "pysequoia", "requests")

VENV = FolderArtifact(
    name="venv",
    help="Build a verified virtual environment.",
    default_name="venv",
    sources=("package index",),
    imports=("requests",),
    states=("image",),  # the state of an image, seen from inside it
)
CONDA = FolderArtifact(
    name="conda",
    help="Build a verified conda environment, without conda.",
    default_name="conda",
    of_conda=True,
    sources=("conda-forge",),
    imports=("rattler", "zstandard", "requests"),
    by_uv=False,
)
DOCKER = RegistryArtifact(
    name="docker",
    help="Build a verified container image, without a daemon or root.",
    default_name="docker",
    sources=_IMAGE_SOURCES,
    imports=("deflate", "zstandard", "isal", "pysequoia", "requests"),
)
ENROOT = FileArtifact(
    name="enroot",
    help="Build a verified squashfs image for enroot and pyxis, without root.",
    default_name="{recipe}.sqsh",
    sources=_IMAGE_SOURCES,
    imports=_FILE_IMPORTS,
    starters=("enroot",),
    containers=("pyxis", "enroot", "apptainer"),
)
APPTAINER = FileArtifact(
    name="apptainer",
    help="Build a verified SIF image for Apptainer, without it or root.",
    default_name="{recipe}.sif",
    sources=_IMAGE_SOURCES,
    imports=_FILE_IMPORTS,
    starters=("apptainer", "singularity"),
    containers=("apptainer",),
)
ARTIFACTS: Mapping[str, Artifact] = {one.name: one for one in (VENV, CONDA, DOCKER, ENROOT, APPTAINER)}


def kinds_of(*forms: str) -> tuple[str, ...]:
    """Return the names of the kinds whose form is one of `forms`, in the order of ARTIFACTS."""
    return tuple(name for name, one in ARTIFACTS.items() if one.form in forms)


def kind_at(path: Path) -> Artifact | None:
    """Return the kind of the artifact at `path`, None when there is none. Raises BuildError for a damaged one."""
    return next((one for one in ARTIFACTS.values() if one.holds(path)), None)


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

    Raises the errors of that build; without `verify`, those of a build without verification; without `here`, none that
    depend on this host. `bytecode` says whether to look for the interpreter that compiles an image's bytecode.
    """
    if isinstance(kind, FolderArtifact):
        from envbuild.kinds.folder import prepare_folder

        plan, _ = prepare_folder(kind, loaded, target, environment, here=here, verify=verify, **use)
    else:
        from envbuild.kinds.image import prepare_image

        plan = prepare_image(loaded, target, environment, bytecode=bytecode, here=here, verify=verify, **use).plan
    return plan
