"""An offline bundle: one folder with all inputs of builds of one recipe for one target.

A bundle can be copied to a shared file system. Its layout:

bundle.json      recipe, target, artifact kinds and digests of the content
bundle.sigstore.json    after `envbuild attest`: an attestation of all other files, which envbuild.manifest lists
recipes/NAME/    the recipe and its locks
store/           wheels, conda packages and sources by their digests: a store (store/store.py)
envbuild/        envbuild and its dependencies, for the target's platform and Python
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import envbuild
from envbuild.base import atomic, process
from envbuild.base.errors import BuildError, UsageError, VerificationError
from envbuild.base.files import link_or_copy, parse_json
from envbuild.base.progress import Log
from envbuild.build.inputs import check_portable, read_by, recipe_files
from envbuild.build.prepare import prepare
from envbuild.contract.kinds import ARTIFACTS
from envbuild.contract.manifest import FILE as MANIFEST
from envbuild.contract.manifest import list_tree, read_manifest, shown
from envbuild.environment import Environment
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.site.tables import TrustTable

FILE, FORMAT = "bundle.json", 1
ATTESTATION, PREDICATE = "bundle.sigstore.json", "urn:envbuild:bundle:1"
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
    check_portable(loaded, "a bundle")
    plans = [
        prepare(
            loaded,
            target,
            environment,
            artifact=kind,
            locked=False,
            offline=offline,
            log=log,
            conda=ARTIFACTS[kind].of_conda,
        )
        for kind in kinds
    ]
    python = tools_python(loaded) if tools else ""
    about = {
        "format": FORMAT,
        "recipe": loaded.recipe.name,
        "target": target.name,
        "kinds": list(kinds),
        "plans": [plan.digest for plan, _ in plans],
        # All files of the recipe: a plan's digest leaves out tables that do not change the content, such as [verify].
        "files": _digest((file, str(file.relative_to(loaded.folder))) for file in recipe_files(loaded.folder)),
        "python": python,
        "envbuild": _digest(_own_files()) if tools else "",
    }
    with atomic.exclusive(path, log):
        taken = path.exists() and not (path / FILE).is_file()
        if taken and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} exists and is not a bundle", "choose another folder")
        if read_bundle(path) == about:
            log(f"{path}: nothing changed")
            return about
        with atomic.staged(path) as staged:
            with atomic.writing(staged):
                shutil.copytree(loaded.folder, staged / "recipes" / loaded.recipe.name)
                for source, place in read_by([plan for plan, _ in plans], environment, offline=offline):
                    link_or_copy(source, staged / "store" / place)
                if tools:
                    log(f"envbuild {envbuild.__version__} and its dependencies, for Python {python}")
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


def attest_bundle(path: Path, about: Mapping[str, Any], sign: Callable[[bytes], bytes], workers: int) -> str:
    """Write the manifest of the bundle at `path`, described by `about`, and its attestation; return its digest."""
    from envbuild.trust.bundle import statement

    manifest, text, _ = list_tree(path, workers, without=ATTESTATION)
    bundle = sign(statement({f"{about['recipe']}/{about['target']}/bundle": manifest.digest}, PREDICATE, about))
    with atomic.writing(path):
        atomic.write_beside(path / MANIFEST, text)
        atomic.write_beside(path / ATTESTATION, bundle.decode())
    return manifest.digest


def judge_bundle(path: Path, trust: TrustTable, workers: int, recipe: str = "") -> tuple[str, str]:
    """Return the digest of the bundle at `path`, and the file of the site's key that attested it.

    Reads every file. Raises VerificationError for a bundle without an attestation by a key of the site, for a changed,
    added or missing file, and for a bundle of another recipe than `recipe` ("" for any).
    """
    from envbuild.trust.policy import Signers, check_recipe, signed

    signed_as, manifest = read_manifest(path), list_tree(path, workers, without=ATTESTATION)[0]
    digest = signed_as.digest if signed_as else ""
    about, by = signed(path, path / ATTESTATION, PREDICATE, "attestation", digest, Signers.of(trust))
    check_recipe(path, about.get("recipe"), trust, (str(path.absolute()), str(path.resolve())), recipe)
    assert signed_as is not None, "its digest was signed"
    both = signed_as.rows.keys() | manifest.rows.keys()
    if changed := sorted(
        path_text for path_text in both if signed_as.rows.get(path_text) != manifest.rows.get(path_text)
    ):
        raise VerificationError(
            f"{path}: {shown(changed)} changed since it was attested",
            "copy the bundle again, with its modes (cp -a). Builds write into it: verify it before the first one",
        )
    return digest, by


def tools_python(loaded: LoadedRecipe) -> str:
    """Return the Python version for the bundled envbuild: the recipe's, which nodes need anyway, but at least 3.11."""
    python = tuple(map(int, loaded.recipe.python.split(".")))
    return ".".join(map(str, max(python, _LEAST_PYTHON)))


def _put_tools(folder: Path, target: Target, python: str, environment: Environment, offline: bool) -> None:
    """Install envbuild and its dependencies into `folder`, for use in PYTHONPATH."""
    requirements = [text for text in metadata.requires("envbuild") or () if "extra ==" not in text]
    settings = folder.parent / ".uv.toml"
    environment.write_uv_settings(settings, ())
    try:
        done = process.run(
            [
                environment.uv,
                "pip",
                "install",
                "--config-file",
                settings,
                "--quiet",
                "--target",
                folder,
                "--python-platform",
                target.platform(_GLIBC),
                "--python-version",
                python,
                "--only-binary",
                ":all:",
                "--python",
                sys.executable,
                *(["--offline"] if offline else []),
                *requirements,
            ],
            env=environment.uv_environment(),
            check=False,
        )
    finally:
        settings.unlink(missing_ok=True)
    if done.returncode != 0:
        raise BuildError(
            f"cannot fetch envbuild's dependencies for Python {python} on {target.arch}:\n{process.tail(done)}",
            "install envbuild on the nodes' file system and make the bundle with --no-tools",
        )
    for top, name in _own_files():
        destination = folder / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(top, destination)


def _own_files() -> Iterator[tuple[Path, str]]:
    """Yield envbuild's own files and their paths in an installation; a checkout's data goes to `_bundled`."""
    package = Path(envbuild.__file__).parent
    for file in recipe_files(package):
        yield file, f"envbuild/{file.relative_to(package)}"
    if (package / "_bundled").is_dir():
        return
    for name in ("recipes", "ddp_train", "sites"):
        for file in recipe_files(package.parent / name):
            yield file, f"envbuild/_bundled/{file.relative_to(package.parent)}"


def _digest(files: Iterable[tuple[Path, str]]) -> str:
    """Return one digest of the names, sizes and contents of (file, name) pairs."""
    digest = hashlib.sha256()
    for file, name in files:
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return f"sha256:{digest.hexdigest()}"
