"""The artifact that a job runs (of a recipe, at a path or in a registry), and its verification receipt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.base.errors import UsageError, VerificationError
from envbuild.base.files import absolute_path, build_folder, named_path
from envbuild.build.built import check_lock, find_built, unknown
from envbuild.build.kinds import kind_at, read_artifact
from envbuild.contract.kinds import ARTIFACTS, DOCKER
from envbuild.contract.manifest import shown
from envbuild.contract.receipt import is_quick, passing_receipt, read_receipt, receipt_path, recorded_gpu_code
from envbuild.contract.state import PREFIX, BuiltLayer
from envbuild.contract.verification import parse_settings
from envbuild.describe import changed_files
from envbuild.fabrics import find_fabric
from envbuild.gpus import chips_named, gpu_faults
from envbuild.jobs.model import LAYOUT, JobArtifact, JobInputs
from envbuild.recipe.find import search_folders
from envbuild.recipe.targets import Target
from envbuild.site.settings import Site
from envbuild.site.tables import TrustTable
from envbuild.verify.image_file import holds_file
from envbuild.verify.model import listed
from envbuild.verify.static_checks import read_gpu_files

if TYPE_CHECKING:
    from envbuild.trust.policy import TrustVerdict

# Name or path of an image, and its digest → the place beside which its attested receipt lies, None without one.
FetchAttested = Callable[[str, str], Path | None]


def open_artifact(
    named: str | None,
    kinds: tuple[str, ...],
    target: str | None,
    *,
    shared: str = "",
    unverified: bool = False,
    exact: bool = False,
    fetch: FetchAttested | None = None,
    prefer: bool = True,
    locked: bool = False,
    site_folders: Sequence[Path] = (),
    quick: bool = False,
) -> JobInputs:
    """Return the artifact that `named` refers to; with `quick`, a receipt of --verify quick is enough.

    `named` is a folder, a .sqsh or .sif file, NAME@sha256:… in a registry, oci:FOLDER@sha256:…, or a recipe, None for
    the default recipe. For a recipe, `find_built` finds the artifact; with `locked`, it must have the packages of the
    recipe's current lock. With `exact`, all of its files are read again and compared. `fetch` finds the receipt of an
    image that was attested elsewhere, in its registry or its file.

    Raises UsageError without an artifact, VerificationError without a passing receipt, unless `unverified`, and
    LockError.
    """
    if named is not None and "@sha256:" in named:
        opened = _image(named, target, unverified, fetch=fetch)
    elif built := find_built(named, kinds, target=target, shared=shared, prefer=prefer, site_folders=site_folders):
        if built.kind.form == "registry":
            opened = _pushed(built.path, built.target, unverified)
        else:
            opened = _local(built.path, target, unverified, exact, fetch)
        if locked:
            check_lock(built, opened.lock)
        opened = replace(opened, named_recipe=built.recipe)
    else:
        assert named is not None, "there is a default recipe"
        path = named_path(Path(named))
        if not path.exists():
            raise unknown(named, search_folders(site_folders))
        opened = _local(path, target, unverified, exact, fetch)
    if not quick and not unverified and opened.receipt is not None and is_quick(opened.receipt):
        raise VerificationError(f"{opened.artifact.path} was verified with --verify quick only", full_hint(opened))
    return opened


def full_hint(opened: JobInputs) -> str:
    """Return how to verify an artifact in full."""
    artifact = opened.artifact
    if ARTIFACTS[artifact.kind].form == "registry":
        return f"build it again: `envbuild docker {artifact.recipe} --tag {artifact.path.partition('@')[0]}:TAG --push`"
    return f"verify it in full: `envbuild verify {artifact.path}`"


def _local(path: Path, target: str | None, unverified: bool, exact: bool, fetch: FetchAttested | None) -> JobInputs:
    """Return the folder or image file at `path`, which nodes see at the same path."""
    kind = kind_at(path)
    if kind is None:
        raise UsageError(
            f"{path} is not an artifact of envbuild", "pass the path that the build printed as its last line"
        )
    built = read_artifact(path)
    state, digest = built.state, built.digest
    _check_target(path, state.target, target)
    place = path
    if fetch is not None and kind.form == "file" and not _has_bundle(path):
        place = fetch(str(path), digest) or path
    receipt = passing_receipt(place, digest)
    if receipt is None and not unverified:
        raise _refusal(str(path), receipt_path(path), f"envbuild verify {path}")
    manifest = receipt["artifact"].get("manifest", "") if receipt else ""
    changed = changed_files(path, kind, manifest, exact=exact) if receipt else []
    if changed and not unverified:
        raise VerificationError(
            f"{path}: {shown(changed)} changed since it was verified",
            f"build it again; `envbuild verify {path}` lists all changes",
        )
    artifact = JobArtifact(
        kind=kind.name,
        path=str(path.absolute()),
        digest=digest,
        recipe=state.recipe,
        target=state.target,
        python=built.python,
        fabric=state.fabric,
        provider=find_fabric(state.fabric).provider,
        verified_at=receipt.get("verified_at", "") if receipt and not changed else "",
        manifest=manifest if not changed else "",
        chips=tuple(state.slim.get("gpus", ())),
    )
    return JobInputs(
        artifact,
        state.layers,
        state.nccl,
        state.verify,
        frozenset(name for name, _, _ in state.packages),
        receipt if not changed else None,
        place,
        state.lock_digest,
        holds_file=partial(holds_file, kind.form, str(path)),
    )


def _pushed(place: Path, target: str, unverified: bool) -> JobInputs:
    """Return the pushed image whose receipt lies beside `place`. Raises UsageError when envbuild did not push it."""
    receipt = _receipt(receipt_path(place))
    pushed = receipt["artifact"].get("pushed")
    if not isinstance(pushed, str) or "@sha256:" not in pushed:
        raise UsageError(
            f"{receipt['artifact']['path']} was not pushed by envbuild, and nodes pull from a registry",
            f"`envbuild docker {receipt['recipe']['name']} --target {target} --tag REGISTRY/NAME:TAG --push`; or, of "
            "what something else pushed, the manifest's digest: NAME@sha256:…",
        )
    return _image(pushed, target, unverified, (place, receipt))


def _image(
    named: str,
    target: str | None,
    unverified: bool,
    known: tuple[Path, dict[str, Any]] | None = None,
    fetch: FetchAttested | None = None,
) -> JobInputs:
    """Return an image in a registry, or in the OCI layout oci:FOLDER, by its digest.

    Its receipt is searched in the folders to which builds write it, and, if it is not attested there, by `fetch`.
    """
    from envbuild.image.reference import parse_reference

    name, _, digest = named.partition("@")
    if name.startswith(LAYOUT):
        name = repository = f"{LAYOUT}{absolute_path(Path(name.removeprefix(LAYOUT)))}"
        fetch = None
    else:
        reference = parse_reference(named)
        name, repository, digest = reference.name, reference.repository, str(reference.digest)
    known = known or _receipt_of(digest, target)
    if fetch is not None:
        here = known is not None and _has_bundle(known[0])
        attested = None if here else fetch(name, digest)
        known = known if attested is None else (attested, _receipt(receipt_path(attested)))
    place, receipt = known or (Path(), None)
    passed = receipt is not None and receipt["passed"]
    if not passed and not unverified:
        if fetch is not None and receipt is None:
            raise VerificationError(
                f"{named}: it has no receipt attested by a signer of the site",
                f"attest it where it was built: `envbuild attest {named} --key KEY`",
            )
        raise _refusal(
            named,
            Path("build/RECIPE/TARGET/docker.receipt.json"),
            "envbuild docker RECIPE --tag REGISTRY/NAME:TAG --push",
        )
    if receipt is None and target is None:
        raise UsageError(f"cannot determine the target of {named}", "say it with --target")
    fabric = receipt.get("fabric", "any") if receipt else "any"
    artifact = JobArtifact(
        kind=DOCKER.name,
        path=f"{name}@{digest}",
        digest=digest,
        recipe=receipt["recipe"]["name"] if receipt else repository.rpartition("/")[2],
        target=receipt["target"] if receipt else str(target),
        python=f"/{PREFIX}/bin/python",
        fabric=fabric,
        provider=find_fabric(fabric).provider,
        verified_at=receipt.get("verified_at", "") if receipt and passed else "",
        chips=tuple((receipt or {}).get("slim", {}).get("gpus", ())),
    )
    _check_target(named, artifact.target, target)
    layers = tuple(
        BuiltLayer(row["name"], row["version"], "", row.get("path", "")) for row in (receipt or {}).get("layers", ())
    )
    nccl = (receipt or {}).get("versions", {}).get("nccl") or ""
    names = (receipt or {}).get("packages")
    packages = frozenset(names) if isinstance(names, list) else None
    try:
        settings = parse_settings((receipt or {})["settings"])
    except (LookupError, ValueError):  # no receipt, or of another form
        settings = None
    lock = str((receipt or {}).get("lock", {}).get("digest", ""))
    return JobInputs(artifact, layers, nccl, settings, packages, receipt if passed else None, place, lock)


def _receipt_of(digest: str | None, target: str | None) -> tuple[Path, dict[str, Any]] | None:
    """Return the receipt of the image `digest`, and its place, of local builds; unreadable ones are skipped."""
    for place in sorted(folder / "docker" for folder in build_folder().glob(f"*/{target or '*'}")):
        path = receipt_path(place)
        try:
            receipt = _receipt(path)
        except UsageError:
            continue
        pushed = str(receipt["artifact"].get("pushed") or "")
        if digest in (receipt["artifact"]["digest"], pushed.partition("@")[2]):
            return place, receipt
    return None


def _has_bundle(place: Path) -> bool:
    from envbuild.trust.bundle import bundle_path

    return bundle_path(place).exists()


def _receipt(path: Path) -> dict[str, Any]:
    try:
        receipt = read_receipt(path)
        receipt["target"], receipt["recipe"]["name"], receipt["artifact"]["path"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path}: invalid: {error}", "build the image again") from error
    return receipt


def check_trust(opened: JobInputs, trust: TrustTable) -> None:
    """Check that the artifact is trusted, if the site names signers. Raises VerificationError and UsageError."""
    if trust.restricts:
        judge_trust(opened, trust)


def judge_trust(opened: JobInputs, trust: TrustTable, names: Sequence[str] = (), recipe: str = "") -> TrustVerdict:
    """Return the verdict on a trusted artifact; `names` and `recipe` go over its own. Raises as `check_trust`."""
    from envbuild.trust.policy import judge

    if opened.receipt is None:
        raise VerificationError(
            f"{opened.artifact.path} has no passing receipt, and the site trusts only attested artifacts",
            "let a signer of [trust] in the site file verify and attest it",
        )
    names, recipe = names or opened.names, recipe or opened.named_recipe
    now, digest = datetime.now(UTC), opened.artifact.digest
    return judge(opened.place, opened.receipt, trust, now, digest, names=names, recipe=recipe)


def check_gpus(opened: JobInputs, site: Site) -> None:
    """Raise VerificationError for an artifact without code for the GPUs of the site.

    The receipt lists the code of its libraries; without a passing receipt, the files of a local artifact are read.
    """
    artifact, words = opened.artifact, site.node.gpu_types
    if not words or not artifact.accelerator.gpu:
        return
    hint = f"build it for {', '.join(words)}, or correct {site.origin('node', 'gpu_types')}"
    if foreign := [word for word in words if chips_named(word)[0].accelerator != artifact.accelerator.name]:
        raise VerificationError(
            f"{artifact.path} is for {artifact.target}, and the GPUs of site {site.name} are {', '.join(foreign)}", hint
        )
    if opened.receipt is not None:
        libraries = recorded_gpu_code(opened.receipt)
    else:
        path = Path(artifact.path)
        libraries = read_gpu_files(path, Target.parse(artifact.target), site.limits) if path.exists() else {}
    if faults := gpu_faults(libraries, words):
        raise VerificationError(f"{artifact.path} does not run on the GPUs of site {site.name}: {listed(faults)}", hint)


def _check_target(named: object, target: str, requested: str | None) -> None:
    if requested is not None and target != requested:
        raise UsageError(f"{named} is for {target}, not for {requested}", "leave out --target")


def _refusal(named: str, receipt: Path, command: str) -> VerificationError:
    return VerificationError(
        f"{named} has no passing receipt ({receipt})", f"verify it (`{command}`), or pass --unverified"
    )
