"""Artifacts built again: an environment that was pushed to a registry, or an artifact from the vault by its receipt.

An environment contains its own path, so it cannot be copied. `push` uploads the inputs of its build: its manifest lists
the recipe's files with the locks, the wheels and packages, each as a blob; registries and stores keep shared blobs
once. `pull` builds the same environment from them. `rebuild` builds what a receipt describes, from the vault alone.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.base import atomic
from envbuild.base.errors import BuildError, LockError, UsageError, VerificationError
from envbuild.base.files import is_file_name, parse_json
from envbuild.base.progress import log
from envbuild.base.toml import read
from envbuild.build import docker
from envbuild.build.bundle import check_portable, lock_plans, plan_files
from envbuild.build.commit import Result
from envbuild.build.folder import make_environment, prepare_folder
from envbuild.build.image import image_layers, prepare_image
from envbuild.build.image_layers import PreparedImage, assemble
from envbuild.build.share import MOST, PulledArtifact, attested_receipt, push_blobs
from envbuild.build.squash import ImageFileOptions, OutputFile, make_from_recipe
from envbuild.contract.kinds import ARTIFACTS, Artifact, FolderArtifact
from envbuild.contract.state import State
from envbuild.environment import Environment
from envbuild.image.limits import Quota
from envbuild.image.model import Descriptor
from envbuild.image.registry import Pushed, Registry
from envbuild.image.squashfs.model import codec_of
from envbuild.layers.layer_cache import TarCache
from envbuild.lock.lifecycle import LockUse
from envbuild.plan import Plan
from envbuild.recipe.load import LoadedRecipe, decode_recipe
from envbuild.recipe.targets import Target
from envbuild.store.client import SourceAnswer, from_vault
from envbuild.store.entry import CacheEntry, EntryFile, is_further
from envbuild.store.pieces import INPUT
from envbuild.store.remote import kept_inputs, named_vault
from envbuild.store.store import Store
from envbuild.store.vault import Vault

# Returns the layer or package that made each file of an artifact.
Titles = Callable[[], Mapping[str, str]]
_Planned = tuple[Plan, Callable[[], Result], Titles]
_RECIPES = "recipes/"
# Bytes of all files of a recipe, and of the path of one.
_MOST_RECIPE, _LONGEST = 4 * MOST, 512


@dataclass(frozen=True, slots=True)
class EnvironmentInputs:
    """Inputs of an environment's build: `files` maps the name of each file (store/entry.py) to its digest.

    `digest` is the environment's, `plan` and `lock` are those of its plan and its lock.
    """

    kind: str
    target: str
    digest: str
    plan: str
    lock: str
    files: Mapping[str, str]


def push_environment(
    path: Path, kind: FolderArtifact, state: State, loaded: LoadedRecipe, registry: Registry, environment: Environment
) -> tuple[str, Pushed]:
    """Push the inputs of the environment at `path`, with its receipt and attestations, to the reference.

    Returns the digest of the manifest, and the uploads. Raises UsageError when `loaded`, its locks or envbuild changed
    since it was built, LockError and BuildError.
    """
    check_portable(loaded, "a pushed environment")
    for plan, _ in lock_plans(loaded, Target.parse(state.target), environment):
        if state.plan_digest in (plan.digest, replace(plan, compile_bytecode=True).digest):
            break
    else:
        raise UsageError(
            f"{path} was built from another recipe, lock or version of envbuild than {loaded.folder} has now",
            f"build it again: envbuild {kind.name} {loaded.recipe.name} --out {path}",
        )
    paths = plan_files(loaded, (plan, None), environment, offline=False)
    files = {name: f"sha256:{environment.store.digests.of(file)}" for name, file in paths.items()}
    places = {files[name]: file for name, file in paths.items()}
    about = EnvironmentInputs(kind.name, state.target, state.digest, state.plan_digest, plan.lock_digest, files)
    blobs = [Descriptor(INPUT, digest, place.stat().st_size) for digest, place in places.items()]
    return push_blobs(path, asdict(about), blobs, places, registry, environment.store)


def pull_environment(
    data: bytes, blobs: Sequence[Descriptor], registry: Registry, out: Path, environment: Environment, *, verify: bool
) -> PulledArtifact:
    """Build the environment that the configuration `data` of a manifest with `blobs` describes, at `out`.

    With `verify`, it is verified on this host and gets a new receipt. Raises the errors of a build, BuildError for a
    damaged manifest or a plan of another version of envbuild, UsageError for `out` of an image file, and
    VerificationError when the site requires an attestation that it lacks.
    """
    where, store = str(registry.reference), environment.store
    if out.suffix in (".sqsh", ".sif"):
        raise UsageError(f"{where} is an environment", "give the path of a folder")
    about, files = _read(data, blobs, where)
    kind = ARTIFACTS.get(about.kind)
    if not isinstance(kind, FolderArtifact):
        raise BuildError(f"{where}: {about.kind!r:.40} is no kind of environment")
    # As they are written out: one blob may be named for many files.
    Quota(environment.site.limits).content(where, sum(file.size for file in files))

    with store.working("opened") as folder:
        # Nothing of the environment is run, or kept by a name, before all of it is known to be what was attested.
        receipt = attested_receipt(blobs, folder / "environment", about.digest, out, registry.reference, environment)
        texts = {file.digest for file in files if file.name.startswith(_RECIPES)}
        missing = [blob for blob in blobs if blob.digest in texts and not store.blobs.has(blob)]
        registry.fetch_blobs(missing, store.blobs, lambda _: None)
        # Nothing else of the repository is read: the plan names each file by its digest.
        vault = Vault(f"oci://{where}", registry, Quota(environment.site.limits))
        pulling = replace(environment, store=replace(store, vault=vault))
        (loaded,) = _recipes_of(files, folder, pulling)
        plans = list(_plans(kind, loaded, about.target, out, pulling, verify=verify, digest=about.digest))
        if not (chosen := [row for row in plans if row[0].digest == about.plan]):
            raise BuildError(
                f"{where} was built from the plan {about.plan[:19]}, and the plan here is {plans[0][0].digest[:19]}",
                "use the version of envbuild that built it, with its Python and SOURCE_DATE_EPOCH",
            )
        plan, make, _ = chosen[0]
        if environment.site.trust.restricts and receipt is not None:
            _check_attested(receipt, plan, where)
        made = make()
    size = sum(blob.size for blob in blobs if blob.digest in about.files.values())
    fetched = vault.fetched_bytes + sum(blob.size for blob in missing)
    return PulledArtifact(made.path, made.digest, made.target, size, fetched, made.receipt)


def _check_attested(receipt: Mapping[str, Any], plan: Plan, where: str) -> None:
    """Raise VerificationError unless the attested `receipt` is for the same `plan`, whose digest covers all packages.

    The environment itself can be compared with the receipt only after its code has run.
    """
    # The lock also has the hashes of the wheels that builds from source run.
    digests = {"recipe": plan.recipe_digest, "plan": plan.digest, "lock": plan.lock_digest}
    for part, digest in digests.items():
        if (attested := receipt.get(part, {}).get("digest")) != digest:
            raise VerificationError(
                f"{where} is not trusted: its {part} is {digest[:19]}, but its receipt says {attested!s:.19}",
                "ask a signer of the site to attest the environment, and push it again",
            )


def _read(data: bytes, blobs: Sequence[Descriptor], where: str) -> tuple[EnvironmentInputs, list[EntryFile]]:
    """Return the inputs in a configuration, whose files are among `blobs`. Raises BuildError if it is damaged."""
    sizes = {blob.digest: blob.size for blob in blobs}
    try:
        fields = parse_json(data)
        about = EnvironmentInputs(**{name: fields[name] for name in EnvironmentInputs.__slots__})
        if not all(isinstance(getattr(about, name), str) for name in EnvironmentInputs.__slots__[:-1]):
            raise ValueError("a name or a digest")
        files = [EntryFile(name, digest, sizes[digest]) for name, digest in about.files.items()]
        entry = CacheEntry("lock", about.lock.partition(":")[2])
        for file in files:
            if not is_further(file, entry) or not _is_safe(file.name) or len(file.name.encode()) > _LONGEST:
                raise ValueError(f"a file at {file.name!r:.80}")
        recipes = [file for file in files if file.name.startswith(_RECIPES)]
        if len({_key(file) for file in recipes}) != 1 or sum(file.size for file in recipes) > _MOST_RECIPE:
            raise ValueError(f"no recipe, or one of more than {_MOST_RECIPE} bytes")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BuildError(f"{where}: invalid configuration: {error!r:.80}") from error
    return about, files


def rebuild(receipt: Mapping[str, Any], path: Path, environment: Environment) -> tuple[str, Titles]:
    """Build the artifact of `receipt` at `path`, from the store and the vault alone; an image as an OCI layout.

    Returns its digest, and a function that says which layer made each of its files. Without the receipt's plan, which
    also has envbuild's trainer and the Python of bytecode, the usual plan of the same recipe and lock is built. Raises
    BuildError when the vault lacks a file, UsageError without a vault, and for a recipe with own code.
    """
    kind = ARTIFACTS.get(str(receipt["artifact"].get("kind")))
    lock, recipe, wanted = (str((receipt.get(part) or {}).get("digest", "")) for part in ("lock", "recipe", "plan"))
    if kind is None or not (lock and recipe and wanted):
        raise UsageError("the receipt names no lock, or an artifact that is not built again", "give one of a build")
    with environment.store.working("opened") as folder:
        kept = [loaded for loaded in kept_recipes(lock, folder, environment) if loaded.digest == recipe]
        plans: list[_Planned] = []
        for loaded in kept:  # the same recipe with several locks of its base, or before it had one
            with suppress(LockError):
                plans += _plans(kind, loaded, str(receipt.get("target")), path, environment)
        if not plans:
            raise BuildError(
                f"the vault does not have the recipe {recipe[:19]} with the lock {lock[:19]}",
                "where the lock is current, run: envbuild vault push RECIPE",
            )
        plan, make, titles = next((row for row in plans if row[0].digest == wanted), plans[0])
        if plan.digest != wanted:
            text = f"the artifact was built from the plan {wanted[:19]}, and the plan here is {plan.digest[:19]}"
            log(f"warning: {text}: another version of envbuild or Python, another base or SOURCE_DATE_EPOCH")
        return make().digest, titles


def _plans(
    kind: Artifact, loaded: LoadedRecipe, name: str, path: Path, environment: Environment, **options: Any
) -> Iterator[_Planned]:
    """Yield the plans of `loaded` for the target `name`, the usual one first, and the build of an artifact at `path`.

    Also yields a function that maps each path in the artifact to the title of its layer, once it is built. `options`
    are those of make_environment.
    """
    target, use = loaded.target(name)[0], LockUse(locked=True, offline=True, log=log)
    options = {"offline": True, "verify": False, **options}
    for unusual in (False, True):
        if isinstance(kind, FolderArtifact):
            plan, trainer = prepare_folder(kind, loaded, target, environment, compile_bytecode=unusual, **use)
            make = partial(make_environment, kind, plan, trainer, environment, path, **options)
            yield plan, make, partial(_packages, path)
        else:
            prepared = prepare_image(loaded, target, environment, bytecode=not unusual, **use)
            make = partial(_make_image, kind, prepared, path, environment)
            yield prepared.plan, make, partial(_layers, prepared, environment)


def _make_image(kind: Artifact, prepared: PreparedImage, path: Path, environment: Environment) -> Result:
    if kind.form != "registry":
        options = ImageFileOptions((OutputFile(kind.name, path),), codec_of("zstd"), verify=False)
        return make_from_recipe(prepared, options, environment, offline=True)[0]
    image = assemble(prepared, image_layers(prepared, environment, offline=True), environment, offline=True)
    docker.write([image], None, docker.ImageOutput("oci", path), "rebuilt")
    return Result(path, image.digest, prepared.plan.target, None, 0.0, True, False)


def _layers(prepared: PreparedImage, environment: Environment) -> dict[str, str]:
    """Return the title of the layer that made each file of an image; an upper layer replaces files of lower ones."""
    image = assemble(prepared, image_layers(prepared, environment, offline=True), environment, offline=True)
    cache = TarCache(environment.store, log, environment.site.limits)
    return {member.name: made.title for made in image.layers for member in cache.members(made)}


def _packages(path: Path) -> dict[str, str]:
    """Return the package that has each file of an environment in its RECORD (PEP 376)."""
    titles: dict[str, str] = {}
    for record in path.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as rows:
            places = [os.path.normpath(record.parents[1] / row[0]) for row in csv.reader(rows) if row]
        titles |= {os.path.relpath(place, path): record.parent.name.removesuffix(".dist-info") for place in places}
    return titles


def kept_recipes(lock: str, folder: Path, environment: Environment) -> Iterator[LoadedRecipe]:
    """Yield the recipes that the vault keeps with the lock of this digest, after writing their files below `folder`.

    Raises BuildError for a file that the vault lacks, RecipeError for a recipe that this envbuild cannot read, and
    UsageError without a vault.
    """
    yield from _recipes_of(kept_inputs(named_vault(environment), lock)[0], folder, environment)


def _recipes_of(files: Sequence[EntryFile], folder: Path, environment: Environment) -> Iterator[LoadedRecipe]:
    """Yield the recipes among `files`, which others wrote: one with own code or a foreign script is refused."""
    rows = [file for file in files if file.name.startswith(_RECIPES)]
    for key in dict.fromkeys(map(_key, rows)):
        with atomic.writing(folder):
            for file in (file for file in rows if _key(file) == key):
                _write_kept(file, folder / file.name.removeprefix(_RECIPES), environment.store)
        document = read(folder / key / "recipe.toml")
        if "project" in document.data:
            raise BuildError(
                f"the kept recipe {key[:12]} has [project], which envbuild does not keep",
                "envbuild did not write it: do not use it, and ask who did",
            )
        loaded = decode_recipe(document)
        check_portable(loaded, "an artifact that is built again")
        yield loaded


def _key(file: EntryFile) -> str:
    return file.name.split("/")[1]


def _is_safe(name: str) -> bool:
    # A folder .git would make the recipe's one a repository, with programs in its configuration.
    return all(is_file_name(part) and part.lower() != ".git" for part in name.split("/"))


def _write_kept(file: EntryFile, place: Path, store: Store) -> None:
    """Write a recipe's file that the vault keeps. Raises BuildError if the vault lacks it, or its name is unsafe."""
    if not _is_safe(file.name):
        raise BuildError(f"the vault's {file.name!r:.120} is no file of a recipe")
    answers: list[SourceAnswer] = []
    if file.content is None and not store.blobs.has(Descriptor("", file.digest, file.size)):
        from_vault({file.digest.partition(":")[2]}, store, answers)
    if answers:
        raise BuildError(f"{file.name}: {answers[0]}", "keep it again: envbuild vault push")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(store.blobs.read(file.digest) if file.content is None else file.content)
