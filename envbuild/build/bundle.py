"""The files that builds of environments read, and an offline bundle of them: one folder for one recipe and target.

A bundle can be copied to a shared file system. Its layout:

bundle.json      recipe, target, artifact kinds and digests of the content
bundle.sigstore.json    after `envbuild attest`: an attestation of all other files, which envbuild.manifest lists
recipes/NAME/    the recipe and its locks
blobs/           wheels, conda packages and sources by their digests: with index.json, a vault (store/vault.py)
envbuild/        envbuild and its dependencies, for the target's platform and Python
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import envbuild
from envbuild.base import atomic, process
from envbuild.base.errors import BuildError, LockError, UsageError, VerificationError
from envbuild.base.files import parse_json
from envbuild.base.packages import files_digest, json_digest
from envbuild.base.progress import Log, log
from envbuild.base.text import human_size
from envbuild.build.image import prepare_image
from envbuild.build.prepare import prepare
from envbuild.contract.kinds import ARTIFACTS, VENV, FolderArtifact
from envbuild.contract.kinds import CONDA as CONDA_KIND
from envbuild.contract.manifest import FILE as MANIFEST
from envbuild.contract.manifest import list_tree, read_manifest, shown
from envbuild.environment import Environment
from envbuild.image.layout import Blobs
from envbuild.lock.base import base_blobs, has_base
from envbuild.lock.lifecycle import LockUse
from envbuild.locks import needed_locks
from envbuild.plan import Plan
from envbuild.pythons import pack_python
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target
from envbuild.store.archives import KIND as SOURCES
from envbuild.store.remote import cache_of, keep_inputs
from envbuild.store.vault import Vault

if TYPE_CHECKING:
    from envbuild.lock.image import ImageLock
    from envbuild.site.tables import TrustTable

FILE, FORMAT = "bundle.json", 2
ATTESTATION, PREDICATE = "bundle.sigstore.json", "urn:envbuild:bundle:1"
# The dependencies of envbuild are installed for this glibc: each has a wheel that needs no newer one.
_GLIBC = "2.28"
_LEAST_PYTHON = (3, 11)
WHEELS, CONDA = "wheels", "conda/archives"
# A plan, and the lock of the builder image of its source layers.
LockedPlan = tuple[Plan, "ImageLock | None"]


def check_portable(loaded: LoadedRecipe, kind: str) -> None:
    """Raise UsageError if a build of `loaded` reads own code, or a script outside its folder; `kind` names the use."""
    if loaded.code is not None:
        raise UsageError(
            f"{loaded.code.where}: {kind} has no [project]",
            "publish the project on an index that every host reaches, and name it in `requirements`",
        )
    if loaded.script is not None and not loaded.script[0].resolve().is_relative_to(loaded.folder.resolve()):
        raise UsageError(
            f"{loaded.where('verify', 'script')}: {loaded.script[0]} is outside of the recipe's folder",
            "move the script into the folder of the recipe",
        )


def recipe_files(folder: Path) -> list[Path]:
    """Return the files below `folder` in order, without caches of Python."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def lock_plans(loaded: LoadedRecipe, target: Target, environment: Environment) -> list[LockedPlan]:
    """Return the plans of builds of `loaded` for `target`: each environment, and the image with its builder's lock.

    Plans whose locks are not current are left out. Raises LockError if there is no other one.
    """
    use: LockUse = {"locked": True, "offline": False, "log": lambda _: None, "write": False}
    others = (loaded.for_python(target, python) for python in loaded.recipe.targets[target.name].pythons)
    plans: list[LockedPlan] = []
    faults = []
    for recipe in filter(None, (loaded, *others)):
        kinds: list[FolderArtifact | None] = [VENV] * recipe.has_wheels(target)
        kinds += ([CONDA_KIND] * recipe.has_conda + [None] * has_base(recipe.recipe)) if recipe is loaded else []
        for kind in kinds:
            try:
                if kind is None:
                    image = prepare_image(recipe, target, environment, bytecode=False, here=False, **use)
                    plans.append((image.plan, image.builder))
                else:
                    about: dict[str, Any] = {"artifact": kind.name, "conda": kind.of_conda}
                    plans.append((prepare(recipe, target, environment, **about, **use)[0], None))
            except LockError as error:
                faults.append(error)
    if faults and not plans:
        raise faults[0]
    return plans


def plan_files(loaded: LoadedRecipe, locked: LockedPlan, environment: Environment, *, offline: bool) -> dict[str, Path]:
    """Return the files that builds of a plan of `loaded` read, and the recipe's own, by their names in store/entry.py.

    They are in the store, or in local find-links. Raises BuildError for an unavailable file.
    """
    from envbuild.layers.conda_package import locate_conda
    from envbuild.layers.source_build import fetch_source
    from envbuild.layers.wheels import fetch_wheels, published_wheels

    (plan, builder), digest_of = locked, environment.store.digests.of
    wheels = [wheel.path for wheel in published_wheels(plan, environment, offline)]
    archives = locate_conda(plan.conda, environment, offline=offline)
    files = {f"{CONDA}/{package.sha256}/{archive.name}": archive for package, archive in archives}
    for layer in plan.sources:
        archive = fetch_source(layer, environment, offline=offline)
        files[f"{SOURCES}/{layer.sha256}/{archive.name}"] = archive
        wheels += fetch_wheels((*layer.wheels, *layer.build), environment, layer.indexes, offline=offline)
    files |= {f"{WHEELS}/{digest_of(path)}/{path.name}": path for path in wheels}
    for base in filter(None, (plan.base, builder)):
        for digest in base_blobs(base, plan.folder, environment, offline=offline):
            files[f"blobs/sha256/{digest.partition(':')[2]}"] = environment.store.blobs.path(digest)
    own = {str(path.relative_to(loaded.folder)): path for path in recipe_files(loaded.folder)}
    for state in (kind.inspect() for kind in needed_locks(loaded, Target.parse(plan.target))):
        if state.lock is not None:  # maybe in another folder than the recipe
            own[state.path.name] = state.path
    # One lock may be of several recipes, and of one recipe with several locks of its base.
    key = json_digest([[name, digest_of(path)] for name, path in sorted(own.items())])
    return {**{f"recipes/{key.partition(':')[2]}/{name}": path for name, path in own.items()}, **files}


def keep_plan(
    vault: Vault, loaded: LoadedRecipe, locked: LockedPlan, environment: Environment, *, offline: bool
) -> tuple[int, int, int]:
    """Keep the inputs of builds of a plan in `vault`, and the Python that envbuild downloaded for its environments.

    Returns the number of files, their bytes, and those that the vault lacked. Raises BuildError.
    """
    plan, store = locked[0], environment.store
    files = plan_files(loaded, locked, environment, offline=offline)
    size, sent = keep_inputs(vault, plan.lock_digest, files, store)
    kind = ARTIFACTS.get(plan.artifact)  # an image and a conda environment have Pythons of their own
    linked = isinstance(kind, FolderArtifact) and not kind.of_conda
    if linked and (packed := pack_python(plan.python, environment)):
        build, archive = packed
        place = {f"{SOURCES}/{archive.parent.name}/{archive.name}": archive}
        more = keep_inputs(vault, build, place, store, "python")
        return len(files) + 1, size + more[0], sent + more[1]
    return len(files), size, sent


def keep_built(loaded: LoadedRecipe, plans: Sequence[LockedPlan], environment: Environment, *, offline: bool) -> None:
    """Keep the inputs of builds of `plans` in a vault whose mode is readwrite, but not in a bundle; log a failure."""
    vault = environment.store.vault
    if vault is None or cache_of(environment.site, environment.variables, "vault")[1] != "readwrite":
        return
    if isinstance(vault.source, Blobs) and (vault.source.root.parent / FILE).exists():
        return
    try:
        for plan in plans:
            count, _, sent = keep_plan(vault, loaded, plan, environment, offline=offline)
            log(f"{vault.name} keeps the {count} files of this build; {human_size(sent)} uploaded")
    except (BuildError, UsageError) as error:
        log(f"warning: {vault.name} does not keep the files of this build: {error.message}")


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
    use: LockUse = {"locked": False, "offline": offline, "log": log}
    plans = [
        prepare(loaded, target, environment, artifact=kind, conda=ARTIFACTS[kind].of_conda, **use)[0] for kind in kinds
    ]
    python = tools_python(loaded) if tools else ""
    about = {
        "format": FORMAT,
        "recipe": loaded.recipe.name,
        "target": target.name,
        "kinds": list(kinds),
        "plans": [plan.digest for plan in plans],
        # All files of the recipe: a plan's digest leaves out tables that do not change the content, such as [verify].
        "files": files_digest(
            (str(file.relative_to(loaded.folder)), file.read_bytes()) for file in recipe_files(loaded.folder)
        ),
        "python": python,
        "envbuild": files_digest((name, file.read_bytes()) for file, name in _own_files()) if tools else "",
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
                vault = Vault(f"oci:{path}", Blobs(staged / "blobs"))
                for plan in plans:
                    files = plan_files(loaded, (plan, None), environment, offline=offline)
                    keep_inputs(vault, plan.lock_digest, files, environment.store)
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
        line: list[str | Path] = [environment.uv, "pip", "install", "--config-file", settings, "--quiet"]
        line += ["--target", folder, "--python-platform", target.platform(_GLIBC), "--python-version", python]
        line += ["--only-binary", ":all:", "--python", sys.executable, *(["--offline"] if offline else [])]
        done = process.run([*line, *requirements], env=environment.uv_environment(), check=False)
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
