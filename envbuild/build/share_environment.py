"""Environments in registries: `push` uploads the inputs of their build, `pull` builds the same environment again.

An environment contains its own path, so it cannot be copied. Its manifest lists the recipe's files with the locks, the
wheels and packages, each as a blob; registries and stores keep shared blobs once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from envbuild.base import atomic
from envbuild.base.errors import BuildError, UsageError, VerificationError
from envbuild.base.files import is_file_name, link_or_copy, parse_json
from envbuild.base.packages import is_digest
from envbuild.base.progress import log, transfer
from envbuild.base.toml import read
from envbuild.build.folder import make_environment, prepare_folder
from envbuild.build.inputs import BY_DIGEST, build_inputs, check_portable, count_files, read_by, recipe_files
from envbuild.build.prepare import prepare
from envbuild.build.share import MOST, PulledArtifact, attested_receipt, push_blobs
from envbuild.contract.kinds import ARTIFACTS, FolderArtifact
from envbuild.contract.state import State
from envbuild.environment import Environment
from envbuild.image.layout import file_digest
from envbuild.image.limits import Quota
from envbuild.image.model import Descriptor
from envbuild.image.registry import Pushed, Registry
from envbuild.layers.trainer import Trainer
from envbuild.plan import Plan
from envbuild.recipe.load import LoadedRecipe, decode_recipe
from envbuild.recipe.targets import Target
from envbuild.store.pieces import INPUT

_RECIPE = "recipe"
_MOST_RECIPE = 4 * MOST  # bytes of all files of a recipe
_LONGEST = 512  # bytes of the path of a recipe's file
# The name at the end is not used: it is the word of whoever wrote the configuration.
_PLACE = re.compile(rf"(?:{'|'.join(BY_DIGEST)})/([0-9a-f]{{64}})/[^/]+")


@dataclass(frozen=True, slots=True)
class EnvironmentInputs:
    """Inputs of an environment's build: `files` maps the path of each file to its digest.

    A path is `recipe/PATH`, or a path in a store. `digest` is the environment's, `plan` the digest of its plan.
    """

    kind: str
    name: str
    target: str
    digest: str
    plan: str
    compile_bytecode: bool
    files: Mapping[str, str]


def push_environment(
    path: Path, kind: FolderArtifact, state: State, loaded: LoadedRecipe, registry: Registry, environment: Environment
) -> tuple[str, Pushed]:
    """Push the inputs of the environment at `path`, with its receipt and attestations, to the reference.

    Returns the digest of the manifest, and the uploads. Raises UsageError when `loaded`, its locks or envbuild changed
    since it was built, LockError and BuildError.
    """
    check_portable(loaded, "a pushed environment")
    target = Target.parse(state.target)
    for compiled in (False, True):
        plan, _ = prepare(
            loaded,
            target,
            environment,
            artifact=kind.name,
            conda=kind.of_conda,
            compile_bytecode=compiled,
            locked=True,
            offline=False,
            log=log,
        )
        if plan.digest == state.plan_digest:
            break
    else:
        raise UsageError(
            f"{path} was built from another recipe, lock or version of envbuild than {loaded.folder} has now",
            f"build it again: envbuild {kind.name} {loaded.recipe.name} --out {path}",
        )
    places: dict[str, Path] = {}
    files: dict[str, str] = {}
    for file in recipe_files(loaded.folder):
        files[f"{_RECIPE}/{file.relative_to(loaded.folder)}"] = digest = file_digest(file)
        places[digest] = file
    for file, place in read_by([plan], environment, offline=False):
        files[place] = digest = f"sha256:{place.split('/')[-2]}"
        places[digest] = file
    about = EnvironmentInputs(kind.name, loaded.recipe.name, target.name, state.digest, plan.digest, compiled, files)
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
    about = _read(data, blobs, where)
    kind = ARTIFACTS.get(about.kind)
    if not isinstance(kind, FolderArtifact):
        raise BuildError(f"{where}: {about.kind!r:.40} is no kind of environment")
    sizes = {blob.digest: blob for blob in blobs}
    # As they are written out: one blob may be named for many files.
    Quota(environment.site.limits).content(where, sum(sizes[digest].size for digest in about.files.values()))

    def fetch(digests: Sequence[str]) -> int:
        missing = [sizes[digest] for digest in dict.fromkeys(digests) if not store.blobs.has(sizes[digest])]
        size = sum(blob.size for blob in missing)
        with transfer(f"pulling {where}: {len(missing)} of {len(about.files)} files", size) as on_progress:
            registry.fetch_blobs(missing, store.blobs, on_progress)
        return size

    with store.working("opened") as folder:
        # Nothing of the environment is run, or kept by a name, before all of it is known to be what was attested.
        receipt = attested_receipt(blobs, folder / "environment", about.digest, out, registry.reference, environment)
        own = {place: digest for place, digest in about.files.items() if place.startswith(f"{_RECIPE}/")}
        fetched = fetch(list(own.values()))
        plan, trainer = _planned(about, own, kind, folder / "recipe" / about.name, environment, where)
        if environment.site.trust.restricts and receipt is not None:
            _check_attested(receipt, plan, where)
        inputs = {(item.folder, item.sha256): item for item in build_inputs(plan)}
        missing_inputs = []
        for place in about.files.keys() - own.keys():
            home, sha256, _ = place.rsplit("/", 2)
            if (home, sha256) not in inputs:
                raise BuildError(f"{where}: its plan has no file {place!r:.120}", "push it again")
            if store.find(home, sha256, inputs[home, sha256].fits) is None:
                missing_inputs.append(inputs[home, sha256])
        fetched += fetch([f"sha256:{item.sha256}" for item in missing_inputs])
        quota, names = Quota(environment.site.limits), list[str]()
        for build_input in missing_inputs:
            names.append(build_input.named(blob := store.blobs.path(f"sha256:{build_input.sha256}")))
            count_files(blob, names[-1], quota)
        for build_input, name in zip(missing_inputs, names, strict=True):
            link_or_copy(store.blobs.path(f"sha256:{build_input.sha256}"), folder / "new")
            store.adopt(folder / "new", build_input.sha256, name, build_input.folder)
        made = make_environment(kind, plan, trainer, environment, out, offline=True, verify=verify, digest=about.digest)
    size = sum(sizes[digest].size for digest in set(about.files.values()))
    return PulledArtifact(made.path, made.digest, made.target, size, fetched, made.receipt)


def _planned(
    about: EnvironmentInputs,
    files: Mapping[str, str],
    kind: FolderArtifact,
    folder: Path,
    environment: Environment,
    where: str,
) -> tuple[Plan, Trainer]:
    """Write the recipe's `files`, which the store has, to `folder`; return its plan and its trainer.

    Raises BuildError for a plan that differs from the one in `about`, and for a recipe with own code: `push` refuses
    these, so the manifest was forged.
    """
    with atomic.writing(folder):
        for place, digest in files.items():
            file = folder / PurePosixPath(place).relative_to(_RECIPE)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(environment.store.blobs.read(digest))
    document = read(folder / "recipe.toml")
    if "project" in document.data:
        raise BuildError(
            f"{where}: its recipe has [project], which no pushed environment has",
            "`envbuild push` did not write it: do not use it, and ask who did",
        )
    loaded = decode_recipe(document)
    check_portable(loaded, "a pulled environment")
    plan, trainer = prepare_folder(
        kind,
        loaded,
        loaded.target(about.target)[0],
        environment,
        compile_bytecode=about.compile_bytecode,
        locked=True,
        offline=True,
        log=log,
    )
    if plan.digest != about.plan:
        raise BuildError(
            f"{where} was pushed from the plan {about.plan[:19]}, but the plan on this host is {plan.digest[:19]}",
            "use the version of envbuild that pushed it, or build it from its recipe",
        )
    return plan, trainer


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


def _read(data: bytes, blobs: Sequence[Descriptor], where: str) -> EnvironmentInputs:
    """Return the inputs in a configuration, whose files are among `blobs`. Raises BuildError if it is damaged."""
    sizes = {blob.digest: blob.size for blob in blobs}
    try:
        fields = parse_json(data)
        about = EnvironmentInputs(**{name: fields[name] for name in EnvironmentInputs.__slots__})
        texts = (about.kind, about.name, about.target, about.digest, about.plan)
        if not all(isinstance(text, str) for text in texts) or not is_file_name(about.name):
            raise ValueError("a name or a digest")
        for place, digest in about.files.items():
            if not is_digest(digest) or digest not in sizes:
                raise ValueError("a file without a blob")
            if place.startswith(f"{_RECIPE}/"):
                parts = place.split("/")[1:]
                # A folder .git would make the recipe's one a repository, with programs in its configuration.
                fine = all(is_file_name(part) and part.lower() != ".git" for part in parts)
                fine = fine and sizes[digest] <= MOST and len(place.encode()) <= _LONGEST
            else:
                found_place = _PLACE.fullmatch(place)
                fine = found_place is not None and digest == f"sha256:{found_place[1]}"
            if not fine:
                raise ValueError(f"a file at {place!r:.80}")
        recipe = sum(sizes[digest] for place, digest in about.files.items() if place.startswith(f"{_RECIPE}/"))
        if recipe > _MOST_RECIPE:
            raise ValueError(f"a recipe of {recipe} bytes")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BuildError(f"{where}: invalid configuration: {error!r:.80}") from error
    return about


def is_environment(data: bytes) -> bool:
    """Return whether the configuration of a manifest describes an environment."""
    try:
        return isinstance(parse_json(data)["files"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
