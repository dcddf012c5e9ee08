"""Reader of an existing venv or conda environment. It reads files alone: no program of the environment runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from envbuild.artifacts.conda_survey import is_conda
from envbuild.base.files import parse_json, read_small
from envbuild.base.packages import CHANNEL_ALIAS
from envbuild.base.text import normalise
from envbuild.base.toml import table_at
from envbuild.environment import load_environment
from envbuild.imports.statement import SOURCE, Statement, lost
from envbuild.inspect.facts import PythonPackage
from envbuild.inspect.folder_reader import is_venv
from envbuild.inspect.reader import open_artifact
from envbuild.recipe.accelerators import VERSION_FILE, torch_builds


def is_environment(path: Path) -> bool:
    """Return whether `path` is the folder of a venv or conda environment."""
    return path.is_dir() and (is_conda(path) or is_venv(path))


def read_installed(path: Path) -> Iterator[Statement]:
    """Yield a pin for each package, and a requirement for those that a user requested. Raises EnvbuildError."""
    with open_artifact(str(path.absolute()), load_environment(), None) as opened:
        found, about = opened.contents(hashes=False), opened.about
    if about.python:
        yield Statement("python", f"=={about.python}.*", f"{path}/pyvenv.cfg")
    for package in found.own_conda:
        place = f"{path}/conda-meta/{package.name}-{package.version}-{package.build}.json"
        yield Statement("conda-pin", f"{package.name} {package.version} {package.build}", place)
    for channel in dict.fromkeys(package.channel for package in found.own_conda if package.channel):
        yield Statement("channel", channel.removeprefix(f"{CHANNEL_ALIAS}/"), f"{path}/conda-meta")
    requested = {one.name for one in found.python if f"{one.info}/REQUESTED" in found.files}
    for one in found.python:
        place = f"{path}/{one.info}"
        if _content(path, one, "INSTALLER").strip() == "conda":
            continue
        if normalise(one.name) == "ddp-train":
            yield lost(f"{one.name}=={one.version}", place, "envbuild's trainer, which every artifact gets")
            continue
        try:
            origin = table_at(parse_json(_content(path, one, "direct_url.json") or "{}"))
        except ValueError:
            origin = {}
        if origin:
            yield lost(f"{one.name} @ {origin.get('url')}", place, SOURCE)
            continue
        if one.name in requested:
            yield Statement("requirement", one.name, place)
        yield Statement("pin", f"{one.name}=={one.version}", place)
        if normalise(one.name) == "torch":
            for name, version in torch_builds(_content(path, one, f"../{VERSION_FILE}")).items():
                parts = version.split(".")
                tag = f"cu{''.join(parts)}" if name == "cuda" else f"rocm{'.'.join(parts[:2])}"
                yield Statement("accelerator", tag, place)


def _content(path: Path, package: PythonPackage, name: str) -> str:
    try:
        return read_small(path / package.info / name).decode(errors="replace") if package.info else ""
    except OSError:
        return ""
