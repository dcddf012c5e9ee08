"""`envbuild attest` and `envbuild trust`: signed receipts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.base import host
from envbuild.base.atomic import replacing_beside, write_beside, writing
from envbuild.base.errors import UsageError, VerificationError
from envbuild.base.progress import log
from envbuild.bundle import ATTESTATION, attest_bundle, judge_bundle, read_bundle
from envbuild.cli import complete
from envbuild.cli.common import attested_images, run_environment, show
from envbuild.cli.options import PATH, with_options
from envbuild.contract.kinds import ARTIFACTS, FileArtifact
from envbuild.jobs.artifact import FetchAttested, open_artifact
from envbuild.jobs.model import JobInputs
from envbuild.site.settings import load_site

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

    from envbuild.image.registry import Registry
    from envbuild.site.settings import Site
    from envbuild.trust.policy import TrustVerdict

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
    """Sign the passing receipt of ARTIFACT: others, who have your public key, then trust it.

    ARTIFACT is a path, or NAME@sha256:… in a registry; of a RECIPE, it is what was built here. Its content is compared
    with the receipt first. The folder of a bundle has no receipt: all of its files are attested. Writes the attestation
    beside it, as ARTIFACT.sigstore.json: an in-toto statement in a Sigstore bundle, which cosign reads too. That of an
    image in a registry is also attached to it there. A .sif gets its attestations and a signature inside, too:
    `apptainer verify --key PUBLIC ARTIFACT` checks it. A passphrase is asked for, or taken from
    ENVBUILD_KEY_PASSPHRASE. KMS URIs, such as awskms:… or gcpkms:…, are securesystemslib's, and need what it needs for
    them.

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
    from envbuild.trust.keyless import KEYLESS, keyless_signer
    from envbuild.trust.keys import load_signer

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
    if kind.form == "registry":
        from envbuild.kinds.attached import push_bundles

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
@click.option("--recipe", metavar="NAME", help="Refuse it too if it is of another recipe, whoever signed that.")
@with_options("site", "target", "exact", "json")
def trust_command(
    named: str, recipe: str | None, site: str | None, target: str | None, exact: bool, as_json: bool
) -> None:
    """Say whether ARTIFACT is trusted by the [trust] table of the site; exit code 5 if it is not.

    Its content is compared with its receipt, and the receipt with what a signer of the site attested. For an image in
    a registry without an attested receipt here, these are what is attached to it there. `envbuild job` does the same
    where the site names signers. Of a bundle, every file is compared: ask before it is built from.

    ARTIFACT is a path, or NAME@sha256:… in a registry; of a RECIPE, it is what was built here.

    It may be REGISTRY/NAME:TAG, too: an image, or what `envbuild push` pushed, whose content `pull` compares. A
    tag can be moved to something else that is signed: --recipe, or [trust] names of the site, says what it stands for.

    \b
    Examples:
      envbuild trust pytorch.sqsh
      envbuild trust /fsx/bundles/pt_cpu
      envbuild trust registry.example.org/team/pytorch@sha256:…
      envbuild trust registry.example.org/team/pytorch:2.13 --recipe pt_cpu
      envbuild trust pt_cpu --target cpu-x86_64 --site ./cluster.toml
    """
    from envbuild.trust.policy import judge

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
        opened, receipt = _opened(named, target, exact, attested_images(where))
        path, digest = opened.artifact.path, opened.artifact.digest
        verdict = judge(
            opened.place,
            receipt,
            trust,
            datetime.now(UTC),
            digest,
            names=names or opened.names,
            recipe=recipe or opened.named_recipe,
        )
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
    """Return NAME@sha256:… of what a tag names now, and its digest and verdict; no verdict for an image."""
    from envbuild.base.packages import digest_of
    from envbuild.kinds.share import judge_pushed
    from envbuild.recipe.targets import Target
    from envbuild.store.pieces import is_pushed

    name, manifest = registry.reference.name, registry.manifest()[0]
    if not is_pushed(manifest):
        image = registry.image(Target.parse(target).arch if target else None)
        return f"{name}@{image.digest}", image.digest, None
    digest, verdict = judge_pushed(registry, run_environment().store, site.trust, recipe)
    return f"{name}@{digest_of(manifest)}", digest, verdict


def _by_tag(named: str, site: Site) -> Registry | None:
    """Return the registry of REGISTRY/NAME:TAG, None for any other name of an artifact."""
    from envbuild.image.reference import is_host
    from envbuild.store.remote import registry_of

    host, slash, _ = named.partition("/")
    if not slash or "@" in named or Path(named).exists() or Path(host).exists() or not is_host(host):
        return None
    environment = run_environment()
    return registry_of(named, site, environment.pip, environment.variables)


def _embed(path: Path, bundles: Mapping[str, bytes], signer: Signer | None) -> None:
    """Write `bundles` and, with a `signer` that Apptainer knows, a signature into the .sif at `path`."""
    from envbuild.image.sif import METADATA, embed
    from envbuild.trust.bundle import bundle_path, envelope

    # Apptainer computes SHA-256 for every curve, where DSSE's others take the one of the curve's size.
    verifiable = signer if signer and signer.public_key.scheme in ("ed25519", "ecdsa-sha2-nistp256") else None
    if verifiable is None:
        log(f"{path}: Apptainer cannot verify a signature of this kind: it gets the attestations alone")

    def sign(payload: bytes) -> bytes:
        assert verifiable is not None
        return json.dumps(envelope(payload, METADATA, verifiable)).encode()

    named = {bundle_path(Path("envbuild"), name).name: bundle for name, bundle in bundles.items()}
    with writing(path.parent), replacing_beside(path, path.stat().st_mode & 0o777) as new, new.open("r+b") as out:
        if not embed(path, out, named, sign if verifiable else None):
            raise UsageError(
                f"{path} has a PGP signature, and Apptainer accepts none of another kind beside one",
                f"attest first, and sign with PGP no more; or remove it: apptainer sif list {path}",
            )


def _predicate(name: str, opened: JobInputs, receipt: dict[str, Any]) -> dict[str, Any]:
    if name == "provenance":
        from envbuild.trust.bundle import provenance

        return provenance(receipt, os.environ)
    from envbuild.describe import bill_of_materials
    from envbuild.environment import load_environment
    from envbuild.inspect.reader import open_artifact as open_reader

    environment, path = load_environment(), opened.artifact.path
    where = f"docker://{path}" if "@sha256:" in path else path
    with open_reader(where, environment, opened.artifact.target) as reader:
        found: dict[str, Any] = json.loads(bill_of_materials(reader, reader.contents(hashes=False), environment))
    return found


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
