"""`envbuild.json` in an environment: the origin of its content, for checks without the recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from envbuild.base.errors import BuildError, UsageError
from envbuild.base.packages import json_digest
from envbuild.contract.verification import VerifySettings, parse_settings

FILE = "envbuild.json"
LAYER_LISTS = "share/envbuild/layers"
# The folder of the environment in every image.
PREFIX = "opt/env"
# The time of the files of images and of the trainer: 2020-01-01. zipfile inside an image refuses times before 1980.
FIXED_TIME = 1577836800
# The name of an image in a state; every kind of image artifact is made from one.
IMAGE = "image"
_NCCL_WHEEL = re.compile(r"nvidia-nccl-cu\d+|nccl")
FORMAT = 1


@dataclass(frozen=True, slots=True)
class BuiltLayer:
    """A layer of the recipe's [layers] in an environment.

    `files` is the sha256 of the list of its files (path, sha256), "" for a layer at `path` on the host. `check` is a
    command of the environment that proves that the layer works, () for none.
    """

    name: str
    version: str
    files: str
    path: str = ""
    check: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """The state of a built environment; `digest` covers its content, `plan_digest` the request.

    `packages` holds [name, version, sha256 of the sorted RECORD] of each distribution; in a conda `environment` also
    the conda packages, with the sha256 of their list of files. `verify` are the settings at the time of the build.
    `project` is the user's own code: its name, version, commit (`-dirty` if tracked files were changed), the digest of
    its files, and whether the environment only refers to its folder (`editable`); {} without one. `slim` are the rules
    by which wheels are without something, {} for none. `python_build` is uv's name of the Python that it downloaded
    into the store for the environment, "" for any other Python.
    """

    artifact: str
    recipe: str
    recipe_digest: str
    lock_digest: str
    plan_digest: str
    target: str
    python: str
    python_version: str
    interpreter: str
    packages: tuple[tuple[str, str, str], ...]
    verify: VerifySettings = field(default_factory=VerifySettings)
    envbuild: str = ""
    environment: str = "venv"
    layers: tuple[BuiltLayer, ...] = ()
    fabric: str = "any"
    project: dict[str, Any] = field(default_factory=dict)
    slim: dict[str, Any] = field(default_factory=dict)
    python_build: str = ""

    @property
    def digest(self) -> str:
        """sha256 over kind, target, interpreter version, and the recorded content of every package and layer."""
        content: list[Any] = [self.artifact, self.target, self.python_version, [list(p) for p in self.packages]]
        if self.layers:  # the digest of environments without layers must not change
            content.append([[layer.name, layer.version, layer.files, layer.path] for layer in self.layers])
        return json_digest(content)

    @property
    def has_torch(self) -> bool:
        """Whether torch is among its packages; the torch of an image's base does not count."""
        return any(name in ("torch", "pytorch") for name, _, _ in self.packages)

    @property
    def nccl(self) -> str:
        """The version of NCCL that the artifact was built with; "" if torch contains its own NCCL."""
        built = next((layer.version for layer in self.layers if layer.name == "nccl"), "")
        return built.split("-")[0] or next((v for name, v, _ in self.packages if _NCCL_WHEEL.fullmatch(name)), "")

    @property
    def of_conda(self) -> bool:
        """Whether it consists of conda packages."""
        return "conda" in (self.artifact, self.environment)

    def render(self) -> str:
        """Return the text of the state file; newer fields are left out if they have their defaults."""
        data = {"format": FORMAT, **asdict(self), "verify": self.verify.as_state()}
        if not self.layers:
            del data["layers"]
        if self.fabric == "any":
            del data["fabric"]
        for name in ("project", "slim", "python_build"):
            if not data[name]:
                del data[name]
        return json.dumps(data, indent=1) + "\n"


def list_path(name: str) -> str:
    """Return the path of the list of the layer `name`, below the environment's root."""
    return f"{LAYER_LISTS}/{name}.json"


def site_packages(path: Path, python: str) -> Path:
    """Return the site-packages folder of the environment at `path` with Python `python` ("3.11")."""
    return path / "lib" / f"python{python}" / "site-packages"


def has_packages(root: Path, state: State, names: Iterable[tuple[str, str]]) -> bool:
    """Return whether `names`, (name, version) of the packages in the environment at `root`, match its `state`.

    The lists of its source layers must exist, too; their content is not read.
    """
    packages = {(name, version) for name, version, _ in state.packages}
    return set(names) == packages and all(
        (root / list_path(layer.name)).exists() for layer in state.layers if layer.files
    )


def read_state(folder: Path) -> State | None:
    """Return the state of the environment in `folder`, None without one. Raises BuildError for an invalid file."""
    path = folder / FILE
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BuildError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_state(text, str(path))


def parse_state(text: bytes, where: str) -> State:
    """Return the state in the text of a state file. Raises BuildError, naming `where`, for an invalid text."""
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        data["packages"] = tuple((str(n), str(v), str(r)) for n, v, r in data["packages"])
        data["layers"] = tuple(_layer(**table) for table in data.get("layers", ()))
        data["verify"] = parse_settings(data.get("verify"))
        kinds = {"packages": tuple, "layers": tuple, "verify": VerifySettings, "project": dict, "slim": dict}
        for name, value in data.items():
            if type(value) is not kinds.get(name, str):
                raise ValueError(f"{name} is {value!r}")
        return State(**data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BuildError(f"{where}: invalid: {error}", "build the environment again") from error


def _layer(name: str, version: str, files: str, path: str = "", check: Iterable[str] = ()) -> BuiltLayer:
    return BuiltLayer(str(name), str(version), str(files), str(path), tuple(map(str, check)))


def check_place(path: Path) -> State | None:
    """Return the state of the environment at `path`, None if the path is free. Raises UsageError for other content."""
    state = read_state(path)
    if state is None and path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(
            f"{path} exists and was not made by envbuild; it is left as it is",
            "remove it, or choose another path with --out",
        )
    return state
