"""`envbuild push`, `pull`, `attest` and `trust`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.base import host
from envbuild.base.atomic import replacing_beside, write_beside, writing
from envbuild.base.errors import UsageError, VerificationError
from envbuild.base.files import absolute_path, named_path
from envbuild.base.packages import digest_of
from envbuild.base.progress import log, transfer
from envbuild.base.text import human_size
from envbuild.build.built import find_built
from envbuild.build.bundle import ATTESTATION, attest_bundle, judge_bundle, read_bundle
from envbuild.build.kinds import kind_at, read_artifact
from envbuild.cli import complete
from envbuild.cli.common import PATH, attested_images, check_out, open_recipe, run_environment, show, with_options
from envbuild.contract.kinds import ARTIFACTS, FileArtifact, FolderArtifact, kinds_of
from envbuild.describe import bill_of_materials
from envbuild.environment import Environment
from envbuild.image.layout import layout_image
from envbuild.image.reference import folder_and_tag, is_host
from envbuild.image.registry import Pushed, Registry
from envbuild.image.sif import METADATA, embed
from envbuild.job_inputs import FetchAttested, judge_trust, open_artifact
from envbuild.jobs.model import JobInputs
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment
from envbuild.site.settings import Site, load_site
from envbuild.store.remote import registry_of

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

    from envbuild.trust.policy import TrustVerdict


@click.command("push")
@click.argument("named", metavar="RECIPE|ARTIFACT", shell_complete=complete.recipes_or_artifacts)
@click.argument("reference", metavar="REF")
@with_options("json")
def push_command(named: str, reference: str, as_json: bool) -> None:
    """Push ARTIFACT, with its receipt and attestations, to REF in a registry.

    ARTIFACT is a .sqsh or .sif file, the folder of a venv or conda environment, oci:DIR (a layout that `envbuild docker
    --out` wrote), or a RECIPE whose artifact is in ./build. It needs a passing receipt, except for a layout.

    Files are pushed as the segments of their layers, and environments as the packages they were built from. A registry
    stores shared blobs once, and `envbuild pull` downloads only what the store lacks. `docker pull` can pull a pushed
    layout.

    \b
    Examples:
      envbuild push pytorch.sqsh registry.example.org/team/pytorch:2.13
      envbuild push build/pt_cpu/cpu-x86_64/venv registry.example.org/team/pytorch:2.13-venv
      envbuild push oci:pytorch registry.example.org/team/pytorch:2.13-docker
    """
    environment = run_environment()
    registry = environment.registry(reference)
    if registry.reference.digest:
        raise UsageError(
            f"{reference}: --to takes a tag; the registry computes the digest", "give a tag: REGISTRY/NAME:TAG"
        )
    content, digest, pushed = _pushed(named, registry, environment)
    where = f"{registry.reference.name}@{digest}"
    log(f"{registry.reference}: {human_size(pushed.uploaded_bytes)} uploaded, {pushed.present} pieces already present")
    value = {"path": where, "digest": content, "manifest": digest, "uploaded_bytes": pushed.uploaded_bytes}
    show(as_json, value, where)


@click.command("pull")
@click.argument("reference", metavar="REF")
@click.option("--out", type=PATH, metavar="PATH", required=True, help="The .sqsh or .sif file, or the folder.")
@click.option("--no-verify", is_flag=True, help="Only build the environment; leave no receipt.")
@with_options("json")
def pull_command(reference: str, out: Path, no_verify: bool, as_json: bool) -> None:
    """Pull what `envbuild push` pushed to REF, with its receipt and attestations.

    Downloads only what the store lacks. A file is byte-identical to the one that was pushed. A venv or conda
    environment is built again from the same packages by the same plan, and verified, since its files contain its path.
    If the site names signers ([trust]), only artifacts that one of them attested are pulled.

    \b
    Examples:
      envbuild pull registry.example.org/team/pytorch:2.13 --out /fsx/images/pytorch.sqsh
      envbuild pull registry.example.org/team/pytorch:2.13-venv --out /fsx/envs/pytorch
    """
    from envbuild.build.rebuild import pull_environment
    from envbuild.build.share import open_pushed, pull_file
    from envbuild.store.pieces import INPUT

    check_out(out)
    environment = run_environment()
    registry = environment.registry(reference)
    data, blobs = open_pushed(registry, environment.store)
    if any(blob.media_type == INPUT for blob in blobs):
        made = pull_environment(data, blobs, registry, absolute_path(out), environment, verify=not no_verify)
    else:
        made = pull_file(data, blobs, registry, out, environment)
    log(f"{out}: {human_size(made.size)}, {human_size(made.fetched_bytes)} of it downloaded")
    value = {
        "path": str(made.path),
        "digest": made.digest,
        "target": made.target,
        "bytes": made.size,
        "fetched_bytes": made.fetched_bytes,
        "receipt": str(made.receipt) if made.receipt else None,
    }
    show(as_json, value, made.path)


def _pushed(named: str, registry: Registry, environment: Environment) -> tuple[str, str, Pushed]:
    """Push the artifact `named`; return its digest, the digest of its manifest, and the uploads."""
    if named.startswith("oci:"):
        return _push_layout(named.removeprefix("oci:"), registry, environment)
    built = find_built(named, kinds_of("folder", "file"), site_folders=environment.site.recipe_folders)
    path = named_path(Path(named)) if built is None else built.path
    kind = kind_at(path)
    if kind is None:
        raise UsageError(
            f"{named} is no artifact of envbuild", "give the file or folder that a build wrote, or oci:DIR, a layout"
        )
    artifact = open_artifact(f"{path.parent}/{path.name}", tuple(ARTIFACTS), None).artifact
    if isinstance(kind, FolderArtifact):
        from envbuild.build.rebuild import push_environment

        loaded = open_recipe(artifact.recipe, environment)
        done = push_environment(path, kind, read_artifact(path).state, loaded, registry, environment)
    else:
        from envbuild.build.share import push_file

        done = push_file(path, artifact.kind, artifact.target, artifact.digest, registry, environment.store)
    return artifact.digest, *done


def _push_layout(text: str, registry: Registry, environment: Environment) -> tuple[str, str, Pushed]:
    folder, tag = folder_and_tag(text)
    pulled = layout_image(folder, tag)
    manifest = pulled.manifest
    descriptors = [manifest.config, *manifest.layers]
    with transfer(f"pushing to {registry.reference}", sum(blob.size for blob in descriptors)) as on_progress:
        pushed = registry.push(
            pulled.blobs,
            descriptors,
            manifest.raw,
            manifest.media_type,
            registry.reference.pointer,
            on_progress=on_progress,
        )
    return manifest.digest, manifest.digest, pushed


# For an encrypted key where nobody can type: of CI.
_PASSPHRASE = "ENVBUILD_KEY_PASSPHRASE"


@click.command("attest")
@click.argument("named", metavar="RECIPE|ARTIFACT", shell_complete=complete.recipes_or_artifacts)
@click.option(
    "--key",
    "key",
    required=True,
    metavar="KEY",
    help="The private key: a PEM file, ssh-agent, the URI of a KMS; or sigstore, for none.",
)
@click.option("--public-key", type=PATH, metavar="FILE", help="The public key of a key in an ssh-agent or a KMS.")
@click.option(
    "--with",
    "names",
    multiple=True,
    type=click.Choice(["sbom", "provenance"]),
    help="Also attest its bill of materials (CycloneDX), or its provenance (SLSA); repeatable.",
)
@with_options("target", "exact", "json")
def attest_command(
    named: str,
    key: str,
    public_key: Path | None,
    names: tuple[str, ...],
    target: str | None,
    exact: bool,
    as_json: bool,
) -> None:
    """Sign the passing receipt of ARTIFACT, so that others who have your public key trust it.

    ARTIFACT is a path, NAME@sha256:… in a registry, or a RECIPE whose artifact is in ./build. Its content is compared
    with the receipt first. A bundle has no receipt: all of its files are attested. The attestation is written beside
    it, as ARTIFACT.sigstore.json: an in-toto statement in a Sigstore bundle, which cosign can read. The attestation of
    an image in a registry is also attached to it there. A .sif also gets its attestations and a signature inside the
    file: `apptainer verify --key PUBLIC ARTIFACT` checks it. envbuild asks for a passphrase, or takes it from
    ENVBUILD_KEY_PASSPHRASE. KMS URIs, such as awskms:… or gcpkms:…, are handled by securesystemslib, which needs the
    extras of each KMS.

    \b
    Examples:
      envbuild attest pytorch.sqsh --key key.pem
      envbuild attest pytorch.sqsh --key key.pem --with sbom --with provenance
      envbuild attest registry.example.org/team/pytorch@sha256:… --key key.pem
      envbuild attest pytorch.sqsh --key ssh-agent --public-key ~/.ssh/id_ed25519.pub
      envbuild attest pt_cpu --target cpu-x86_64 --key awskms:alias/envbuild --public-key ci.pub
      envbuild attest /fsx/bundles/pt_cpu --key key.pem
      envbuild attest pytorch.sqsh --key sigstore
    """
    from envbuild.trust.bundle import sign
    from envbuild.trust.keys import KEYLESS, keyless_signer, load_signer

    with ExitStack() as stack:
        signer = None
        if key == KEYLESS:
            keyid, write = stack.enter_context(keyless_signer(load_site(os.environ).trust.sigstore, os.environ))
        else:
            signer = load_signer(key, public_key, lambda: _passphrase(key))
            keyid, write = signer.public_key.keyid, partial(sign, signer=signer)
        if (about := read_bundle(Path(named))) is not None:
            digest = attest_bundle(Path(named), about, write, host.workers(os.environ))
            place = Path(named, ATTESTATION)
            value: dict[str, Any] = {"path": str(place.absolute()), "digest": digest}
        else:
            place, value = _attest(named, target, exact, names, write, signer)
    show(as_json, {**value, "key": keyid}, place)


def _attest(
    named: str,
    target: str | None,
    exact: bool,
    names: Sequence[str],
    write: Callable[[bytes], bytes],
    signer: Signer | None,
) -> tuple[Path, dict[str, Any]]:
    """Attest an artifact with a receipt by `write`; return the attestation's path, and what --json prints."""
    from envbuild.trust.bundle import bundle_path
    from envbuild.trust.policy import attested

    opened, receipt = _opened(named, target, exact)
    place = bundle_path(opened.place)
    bundles = {name: write(attested(receipt, name, _predicate(name, opened, receipt))) for name in names}
    bundles[""] = write(attested(receipt))
    with writing(place.parent):
        for name, bundle in bundles.items():
            write_beside(bundle_path(opened.place, name), bundle.decode())
    kind = ARTIFACTS[opened.artifact.kind]
    if isinstance(kind, FileArtifact) and kind.format == "sif":
        _embed(opened.place, bundles, signer)
    _, _, digest = opened.artifact.path.partition("@")
    if kind.form == "registry" and not opened.artifact.place:
        from envbuild.build.attached import push_bundles

        environment = run_environment()
        push_bundles(environment.registry(opened.artifact.path), digest, bundles, environment.store)
        log(f"{opened.artifact.path}: {len(bundles)} attached")
    value = {
        "path": str(place.absolute()),
        "digest": opened.artifact.digest,
        "with": {name: str(bundle_path(opened.place, name).absolute()) for name in names},
    }
    return place, value


@click.command("trust")
@click.argument("named", metavar="RECIPE|ARTIFACT", shell_complete=complete.recipes_or_artifacts)
@click.option("--recipe", metavar="NAME", help="Refuse an artifact of another recipe, even if it is signed.")
@with_options("site", "target", "exact", "json")
def trust_command(
    named: str, recipe: str | None, site: str | None, target: str | None, exact: bool, as_json: bool
) -> None:
    """Check whether the [trust] table of the site trusts ARTIFACT; exit code 5 if it does not.

    Compares the artifact's content with its receipt, and the receipt with the attestation of a signer of the site. For
    an image in a registry without an attested receipt on this host, envbuild reads those attached to it in the
    registry. `envbuild job` does the same if the site names signers. Of a bundle, every file is compared: run this
    before you build from it.

    ARTIFACT is a path, NAME@sha256:… in a registry, or a RECIPE whose artifact is in ./build.

    REGISTRY/NAME:TAG is accepted too: an image, or an artifact that `envbuild push` pushed, whose content `pull`
    compares. A tag can be moved to another signed artifact: --recipe, or [trust] names in the site file, sets the
    recipe that it must be of.

    \b
    Examples:
      envbuild trust pytorch.sqsh
      envbuild trust /fsx/bundles/pt_cpu
      envbuild trust registry.example.org/team/pytorch@sha256:…
      envbuild trust registry.example.org/team/pytorch:2.13 --recipe pt_cpu
      envbuild trust pt_cpu --target cpu-x86_64 --site ./cluster.toml
    """
    if recipe == "":  # of a variable that is not set
        raise UsageError("--recipe names no recipe", "leave it out to take one of any recipe")
    shown, recipe = named, recipe or ""
    names: tuple[str, ...] = ()
    where = load_site(os.environ, site)
    trust = where.trust
    if not trust.restricts:
        raise UsageError(
            "the site names no signers", "give files of public keys as `signers` in [trust] of the site file"
        )
    if read_bundle(Path(named)) is not None:
        digest, by = judge_bundle(Path(named), trust, host.workers(os.environ), recipe)
        show(as_json, {"path": named, "digest": digest, "signer": by}, f"{named}: trusted: attested by {by}")
        return
    verdict = None
    if (registry := _by_tag(named, where)) is not None:
        path, digest, verdict = _judge_tag(registry, where, target, recipe)
        names, named = registry.reference.names, path
    if verdict is None:
        opened, _ = _opened(named, target, exact, attested_images(where))
        path, digest = opened.artifact.path, opened.artifact.digest
        verdict = judge_trust(opened, trust, names, recipe)
    others = f", with its {' and its '.join(verdict.others)}" if verdict.others else ""
    value = {
        "path": path,
        "digest": digest,
        "recipe": verdict.recipe,
        "signer": verdict.signer,
        "verified_at": verdict.verified_at,
        "with": verdict.others,
    }
    text = f"attested by {verdict.signer}, verified at {verdict.verified_at}, of the recipe {verdict.recipe}{others}"
    show(as_json, value, f"{shown}: trusted: {text}")


def _judge_tag(registry: Registry, site: Site, target: str | None, recipe: str) -> tuple[str, str, TrustVerdict | None]:
    """Return NAME@sha256:… of a tag's current manifest, and its digest and verdict; no verdict for an image."""
    from envbuild.build.share import judge_pushed
    from envbuild.store.pieces import is_pushed

    name, manifest = registry.reference.name, registry.manifest()[0]
    if not is_pushed(manifest):
        image = registry.image(Target.parse(target).arch if target else None)
        return f"{name}@{image.digest}", image.digest, None
    digest, verdict = judge_pushed(registry, run_environment().store, site.trust, recipe)
    return f"{name}@{digest_of(manifest)}", digest, verdict


def _by_tag(named: str, site: Site) -> Registry | None:
    """Return the registry of REGISTRY/NAME:TAG, None for any other name of an artifact."""
    host, slash, _ = named.partition("/")
    if not slash or "@" in named or Path(named).exists() or Path(host).exists() or not is_host(host):
        return None
    environment = run_environment()
    return registry_of(named, site, environment.pip, environment.variables)


def _embed(path: Path, bundles: Mapping[str, bytes], signer: Signer | None) -> None:
    """Write `bundles` and, with a `signer` that Apptainer knows, a signature into the .sif at `path`."""
    from envbuild.trust.bundle import bundle_path, envelope

    # Apptainer computes SHA-256 for every curve, where DSSE's others take the one of the curve's size.
    verifiable = signer if signer and signer.public_key.scheme in ("ed25519", "ecdsa-sha2-nistp256") else None
    if verifiable is None:
        log(f"{path}: Apptainer cannot verify a signature of this kind; only the attestations are added")

    def sign(payload: bytes) -> bytes:
        assert verifiable is not None
        return json.dumps(envelope(payload, METADATA, verifiable)).encode()

    named = {bundle_path(Path("envbuild"), name).name: bundle for name, bundle in bundles.items()}
    with writing(path.parent), replacing_beside(path, path.stat().st_mode & 0o777) as new, new.open("r+b") as out:
        if not embed(path, out, named, sign if verifiable else None):
            raise UsageError(
                f"{path} has a PGP signature, and Apptainer accepts no signature of another kind beside it",
                f"attest before you sign with PGP; or remove that signature: apptainer sif list {path}",
            )


def _predicate(name: str, opened: JobInputs, receipt: dict[str, Any]) -> dict[str, Any]:
    if name == "provenance":
        from envbuild.trust.bundle import provenance

        return provenance(receipt, os.environ)
    from envbuild.inspect.reader import open_artifact as open_reader

    environment, path = load_environment(), opened.artifact.path
    where = f"docker://{path}" if "@sha256:" in path else path
    with open_reader(where, environment, opened.artifact.target) as reader:
        document: dict[str, Any] = json.loads(bill_of_materials(reader, reader.contents(hashes=False), environment))
    return document


def _opened(
    named: str, target: str | None, exact: bool, fetch: FetchAttested | None = None
) -> tuple[JobInputs, dict[str, Any]]:
    # Without signers of its own, `attest` takes a receipt of this host alone.
    folders = load_site(os.environ).recipe_folders
    opened = open_artifact(
        named, tuple(ARTIFACTS), target, exact=exact, fetch=fetch, prefer=False, site_folders=folders
    )
    if opened.receipt is None:
        raise VerificationError(f"{named} has no passing receipt", "verify it first")
    return opened, opened.receipt


def _passphrase(key: str) -> str:
    known = os.environ.get(_PASSPHRASE)
    return known if known is not None else str(click.prompt(f"passphrase of {key}", hide_input=True, err=True))
