"""An offline bundle: one folder with everything that builds of one recipe for one target read.

A bundle can be copied to a shared file system. Its layout:

bundle.json      recipe, target, artifact kinds and digests of the content
recipes/NAME/    the recipe and its locks
store/           wheels, conda packages and sources by their digests: a store (store/store.py)
envbuild/        envbuild and its dependencies, for the target's platform and Python
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import envbuild
from envbuild import atomic, process
from envbuild.environment import Environment
from envbuild.errors import BuildError, UsageError
from envbuild.files import link_or_copy, parse_json
from envbuild.kinds import ARTIFACTS
from envbuild.kinds.prepare import prepare
from envbuild.layers.trainer import Trainer
from envbuild.plan.plan import Plan
from envbuild.progress import Log
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

FILE, FORMAT = "bundle.json", 1
# The dependencies of envbuild are installed for this glibc: each has a wheel that needs no newer one.
_GLIBC = "2.28"
_LEAST_PYTHON = (3, 11)


def make_bundle(
    loaded: LoadedRecipe,
    target: Target,
    environment: Environment,
    path: Path,
    log: Log,
    *,
    kinds: Sequence[str] = ("venv",),
    tools: bool = True,
    offline: bool = False,
) -> dict[str, Any]:
    """Write the bundle of `loaded` for `target` to the folder `path`, and return the content of bundle.json.

    The bundle holds what builds of the artifact kinds `kinds` (venv, conda) read; with `tools`, also envbuild itself.
    An existing bundle with the same content is left unchanged. Raises UsageError when `path` holds something other than
    a bundle, LockError or BuildError when a lock or a file is not available.
    """
    if loaded.code is not None:
        raise UsageError(
            f"{loaded.code.where}: a bundle has no [project]",
            "publish the project on an index that the bundle's host reaches, and name it in `requirements`",
        )
    if loaded.script is not None and not loaded.script[0].resolve().is_relative_to(loaded.folder.resolve()):
        raise UsageError(
            f"{loaded.where('verify', 'script')}: {loaded.script[0]} is outside of the folder that is bundled",
            "move the script into the folder of the recipe",
        )
    plans = [
        prepare(
            loaded, target, environment, artifact=kind, locked=False, offline=offline, log=log,
            conda=ARTIFACTS[kind].of_conda,
        )
        for kind in kinds
    ]  # fmt: skip
    python = tools_python(loaded) if tools else ""
    about = {
        "format": FORMAT,
        "recipe": loaded.recipe.name,
        "target": target.name,
        "kinds": list(kinds),
        "plans": [plan.digest for plan, _ in plans],
        # All files of the recipe: a plan's digest leaves out tables that do not change the content, such as [verify].
        "files": _digest((file, str(file.relative_to(loaded.folder))) for file in _files(loaded.folder)),
        "python": python,
        "envbuild": _digest(_own_files()) if tools else "",
    }
    with atomic.exclusive(path, log):
        taken = path.exists() and not (path / FILE).is_file()
        if taken and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} holds something that is no bundle", "choose another folder")
        if read_bundle(path) == about:
            log(f"{path}: nothing changed")
            return about
        with atomic.staged(path) as staged:
            with atomic.writing(staged):
                shutil.copytree(loaded.folder, staged / "recipes" / loaded.recipe.name)
                for source, place in _read_by(plans, environment, offline):
                    link_or_copy(source, staged / "store" / place)
                if tools:
                    log(f"envbuild {envbuild.__version__} and what it imports, for Python {python}")
                    _put_tools(staged / "envbuild", target, python, environment, offline)
                (staged / FILE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            atomic.replace(staged, path)
    return about


def read_bundle(path: Path) -> dict[str, Any] | None:
    """Return bundle.json of the bundle at `path`, None when there is none in this FORMAT."""
    try:
        about = parse_json((path / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and about.get("format") == FORMAT else None


def _read_by(
    plans: Sequence[tuple[Plan, Trainer]], environment: Environment, offline: bool
) -> Iterator[tuple[Path, str]]:
    """Yield each file that builds of `plans` read, and its path in a store."""
    from envbuild.layers.conda_package import locate_conda
    from envbuild.layers.source_build import fetch_source
    from envbuild.layers.wheels import fetch_wheels, locate
    from envbuild.store.archives import KIND

    for plan, trainer in plans:
        for wheel in locate(plan, trainer, environment, offline)[0]:
            yield wheel.path, f"wheels/{wheel.sha256}/{wheel.path.name}"
        for package, archive in locate_conda(plan.conda, environment, offline=offline):
            yield archive, f"conda/archives/{package.sha256}/{archive.name}"
    for layer in {layer.digest: layer for plan, _ in plans for layer in plan.sources}.values():
        archive = fetch_source(layer, environment, offline=offline)
        yield archive, f"{KIND}/{layer.sha256}/{archive.name}"
        for path in fetch_wheels((*layer.wheels, *layer.build), environment, layer.indexes, offline=offline):
            yield path, f"wheels/{environment.store.file_digest(path)}/{path.name}"


def tools_python(loaded: LoadedRecipe) -> str:
    """Return the Python version for the bundled envbuild: the recipe's, which nodes need anyway, but at least 3.11."""
    python = tuple(map(int, loaded.recipe.python.split(".")))
    return ".".join(map(str, max(python, _LEAST_PYTHON)))


def _put_tools(folder: Path, target: Target, python: str, environment: Environment, offline: bool) -> None:
    """Install envbuild and its dependencies into `folder`, for use in PYTHONPATH."""
    wanted = [text for text in metadata.requires("envbuild") or () if "extra ==" not in text]
    settings = folder.parent / ".uv.toml"
    environment.write_uv_settings(settings, ())
    try:
        done = process.run(
            [environment.uv, "pip", "install", "--config-file", settings, "--quiet", "--target", folder,
             "--python-platform", target.platform(_GLIBC), "--python-version", python,
             "--only-binary", ":all:", "--python", sys.executable,
             *(["--offline"] if offline else []), *wanted],
            env=environment.uv_environment(),
            check=False,
        )  # fmt: skip
    finally:
        settings.unlink(missing_ok=True)
    if done.returncode != 0:
        raise BuildError(
            f"what envbuild imports cannot be had for Python {python} on {target.arch}:\n{process.tail(done)}",
            "install envbuild on the nodes' file system and make the bundle with --no-tools",
        )
    for top, name in _own_files():
        destination = folder / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(top, destination)


def _own_files() -> Iterator[tuple[Path, str]]:
    """Yield envbuild's own files and their paths in an installation; a checkout's data goes to `_bundled`."""
    package = Path(envbuild.__file__).parent
    for file in _files(package):
        yield file, f"envbuild/{file.relative_to(package)}"
    if (package / "_bundled").is_dir():
        return
    for name in ("recipes", "ddp_train", "sites", "Dockerfile.cpu", "Dockerfile.gpu"):
        whole = package.parent / name
        for file in _files(whole) if whole.is_dir() else [whole]:
            yield file, f"envbuild/_bundled/{file.relative_to(package.parent)}"


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def _digest(files: Iterable[tuple[Path, str]]) -> str:
    """Return one digest of the names, sizes and contents of (file, name) pairs."""
    digest = hashlib.sha256()
    for file, name in files:
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return f"sha256:{digest.hexdigest()}"
