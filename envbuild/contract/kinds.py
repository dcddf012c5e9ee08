"""Facts about the kinds of artifacts: names, files, sources, runtimes. A new kind is a new entry in ARTIFACTS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from envbuild.base.files import build_folder, parse_json
from envbuild.contract.state import State, read_state

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
    `default_name` is the name of an artifact in build/RECIPE/TARGET. With `of_conda`, the artifact consists of the
    packages in the recipe's [conda].

    For doctor: `sources` are the sources from which a build reads besides the store, `imports` the modules that it
    imports, and `by_uv` says whether uv installs the wheels. The runtimes that start it are in envbuild/runtimes.
    """

    name: str
    help: str
    default_name: str
    sources: tuple[str, ...]
    imports: tuple[str, ...]
    of_conda: bool = False
    by_uv: bool = True

    form: ClassVar[Form]

    def default_path(self, recipe: str, target: str) -> Path:
        """Return the path of the artifact without --out."""
        return build_folder() / recipe / target / self.default_name.format(recipe=recipe)

    def job_variables(self, path: str) -> Mapping[str, str]:
        """Return the variables that jobs set for the artifact's processes, as conda's activation does."""
        return set_variables(Path(path)) if self.of_conda else {}


@dataclass(frozen=True, slots=True)
class FolderArtifact(Artifact):
    """An environment in a folder of this host.

    `states` are other names that an envbuild.json of this kind may contain.
    """

    states: tuple[str, ...] = ()
    form: ClassVar[Form] = "folder"


class FolderPrograms(Protocol):
    """A kind of environments in folders, called TITLE, whose programs can be started."""

    TITLE: str

    # The command line of a program (torchrun, python) in the environment at `path`, and its variables.
    def command(self, path: Path, program: str, *arguments: str) -> list[str]: ...
    def launch_environment(self, path: Path, env: Mapping[str, str]) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class FileArtifact(Artifact):
    """An image in one file.

    `format` is its format, a key of FORMATS in verify/image_file.py; `mode` are its permissions. The default file name
    of an image that envbuild did not build consists of the last `last_words` words of its name (0 for all), joined by
    `joint`.
    """

    format: str = "squashfs"
    mode: int = 0o644
    joint: str = "+"
    last_words: int = 0
    form: ClassVar[Form] = "file"

    @property
    def suffix(self) -> str:
        """The suffix of its files, such as `.sqsh`."""
        return Path(self.default_name).suffix


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
)
APPTAINER = FileArtifact(
    name="apptainer",
    help="Build a verified SIF image for Apptainer, without it or root.",
    default_name="{recipe}.sif",
    sources=_IMAGE_SOURCES,
    imports=_FILE_IMPORTS,
    format="sif",
    mode=0o755,  # as Apptainer's own are
    joint="_",
    last_words=2,
)
ARTIFACTS: Mapping[str, Artifact] = {kind.name: kind for kind in (VENV, CONDA, DOCKER, ENROOT, APPTAINER)}


def kinds_of(*forms: str) -> tuple[str, ...]:
    """Return the names of the kinds whose form is one of `forms`, in the order of ARTIFACTS."""
    return tuple(name for name, kind in ARTIFACTS.items() if kind.form in forms)


def file_kind(name: str) -> FileArtifact:
    """Return the kind `name` of image files."""
    kind = ARTIFACTS[name]
    assert isinstance(kind, FileArtifact), name
    return kind


def folder_kind(path: Path) -> FolderArtifact | None:
    """Return the kind of the environment at `path`, None without one. Raises BuildError for a damaged one."""
    state = read_state(path)
    if state is None:
        return None
    folders = (kind for kind in ARTIFACTS.values() if isinstance(kind, FolderArtifact))
    return next((kind for kind in folders if state.artifact in (kind.name, *kind.states)), None)


def read_folder(path: Path) -> BuiltArtifact | None:
    """Return the environment in the folder `path`, None without one. Raises BuildError for a damaged one."""
    state = read_state(path)
    return BuiltArtifact(state, state.digest, str(path.absolute() / "bin" / "python")) if state else None


def set_variables(root: Path) -> dict[str, str]:
    """Return the variables that packages and users (`conda env config vars set`) set; damaged files are skipped."""
    variables: dict[str, str] = {}
    files = sorted((root / "etc" / "conda" / "env_vars.d").glob("*.json"))
    for file in [*files, root / "conda-meta" / "state"]:
        try:
            data = parse_json(file.read_bytes())
        except (OSError, ValueError):
            continue
        values = data.get("env_vars") if file.name == "state" and isinstance(data, dict) else data
        if isinstance(values, dict):
            variables |= {str(name): str(value) for name, value in values.items()}
    return variables
