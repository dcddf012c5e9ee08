"""Attestations: in-toto statements in signed envelopes (DSSE), stored as Sigstore bundles beside their subjects.

Sources: in-toto Statement v1 (github.com/in-toto/attestation, spec/v1/statement.md), DSSE v1 (secure-systems-lab/dsse,
protocol.md), Sigstore bundle v0.3 (sigstore/protobuf-specs, sigstore_bundle.proto) with a public key's hint in place of
a certificate, SLSA's provenance v1 (slsa.dev/spec/v1.0/provenance). Neither a certificate nor an entry in a
transparency log is written or read.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.base.files import open_regular, parse_json

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

STATEMENT = "https://in-toto.io/Statement/v1"
PAYLOAD = "application/vnd.in-toto+json"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MOST = 16 << 20  # bytes of a bundle; that of a receipt has below 1 MB
_MOST_SIGNATURES = 64  # each costs time
# Name of an attestation beside an artifact → type of its predicate: the receipt has none, as the receipt itself.
PREDICATES = {
    "": "urn:envbuild:receipt:1",
    "sbom": "https://cyclonedx.org/bom",
    "provenance": "https://slsa.dev/provenance/v1",
}
_BUILD = "urn:envbuild:build:1"
# The builder outside of the CIs that envbuild knows.
_ANYBODY = "urn:envbuild:builder"


def bundle_path(artifact: Path, name: str = "") -> Path:
    """Return the path of a bundle beside `artifact`; `name` is one of PREDICATES."""
    return artifact.with_name(".".join(filter(None, (artifact.name, name, "sigstore.json"))))


def statement(subjects: Mapping[str, str], kind: str, predicate: Mapping[str, Any]) -> bytes:
    """Return an in-toto statement: `predicate`, of the type `kind`, on `subjects`: digests (sha256:…) by name."""
    rows = [{"name": name, "digest": {"sha256": digest.partition(":")[2]}} for name, digest in subjects.items()]
    value = {"_type": STATEMENT, "subject": rows, "predicateType": kind, "predicate": predicate}
    return json.dumps(value, sort_keys=True).encode()


def sign(payload: bytes, signer: Signer) -> bytes:
    """Return the bundle of a statement, signed."""
    return (
        json.dumps(
            {
                "mediaType": BUNDLE,
                "verificationMaterial": {"publicKey": {"hint": signer.public_key.keyid}, "tlogEntries": []},
                "dsseEnvelope": envelope(payload, PAYLOAD, signer, signer.public_key.keyid),
            },
            indent=1,
        ).encode()
        + b"\n"
    )


def envelope(payload: bytes, kind: str, signer: Signer, keyid: str = "") -> dict[str, Any]:
    """Return the DSSE envelope of a `payload` of the type `kind`, signed. `keyid` is a hint to the key."""
    from securesystemslib.dsse import Envelope  # with cryptography, which builds without keys need not load

    signature = bytes.fromhex(Envelope(payload, kind, {}).sign(signer).signature)
    return {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": kind,
        "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": keyid}],
    }


def read_bundle(path: Path) -> bytes:
    """Return the content of a bundle. Raises OSError, and ValueError for a file that is too large for one."""
    with open_regular(path) as stream:
        data = stream.read(MOST + 1)
    if len(data) > MOST:
        raise ValueError(f"more than {MOST} bytes")
    return data


def opened(bundle: bytes, keys: Sequence[Key]) -> tuple[dict[str, Any], Key | None]:
    """Return the statement in `bundle`, and the key among `keys` that signed it, None without one.

    The bundle's hint to its key is not trusted: every key is tried. Raises ValueError for an invalid bundle.
    """
    from securesystemslib.dsse import Envelope

    try:
        envelope = parse_json(bundle)["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        if envelope["payloadType"] != PAYLOAD:
            raise ValueError(f"its payload is {envelope['payloadType']!r:.80}")
        if len(envelope["signatures"]) > _MOST_SIGNATURES:
            raise ValueError(f"it has {len(envelope['signatures'])} signatures")
        signatures = [base64.b64decode(row["sig"], validate=True).hex() for row in envelope["signatures"]]
        fields = parse_json(payload)
        if fields["_type"] != STATEMENT or not isinstance(fields["predicateType"], str):
            raise ValueError(f"its statement is {fields['_type']!r:.80}")
        if not isinstance(fields["predicate"], dict):
            raise ValueError("its predicate is not an object")
        for row in fields["subject"]:
            if not isinstance(row["digest"]["sha256"], str):
                raise ValueError("a subject without sha256")
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is invalid: {error!r:.80}") from error
    signed_bytes = Envelope(payload, PAYLOAD, {}).pae()
    by = next((key for key in keys for signature in signatures if _signed(key, signature, signed_bytes)), None)
    statement: dict[str, Any] = fields
    return statement, by


def _signed(key: Key, signature: str, signed_bytes: bytes) -> bool:
    from securesystemslib.exceptions import Error
    from securesystemslib.signer import Signature

    try:
        key.verify_signature(Signature(key.keyid, signature), signed_bytes)
    except Error:
        return False
    return True


def provenance(receipt: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Return the provenance of the artifact of `receipt`, built by the CI that `env` describes.

    The signer vouches for its content: envbuild does not check the facts about the CI.
    """
    digests = {name: receipt[name]["digest"] for name in ("recipe", "lock", "plan")}
    materials: list[dict[str, Any]] = [
        {"name": name, "digest": {"sha256": digest.partition(":")[2]}} for name, digest in digests.items()
    ]
    if commit := receipt.get("project", {}).get("commit"):
        materials.append({"name": receipt["project"]["name"], "digest": {"gitCommit": commit}})
    builder, invocation = _ci(env)
    parameters = {
        "recipe": receipt["recipe"]["name"],
        "target": receipt["target"],
        "artifact": receipt["artifact"]["kind"],
    }
    return {
        "buildDefinition": {
            "buildType": _BUILD,
            "externalParameters": parameters,
            "internalParameters": {},
            "resolvedDependencies": materials,
        },
        "runDetails": {
            "builder": {"id": builder, "version": {"envbuild": receipt["versions"]["envbuild"]}},
            "metadata": {**({"invocationId": invocation} if invocation else {}), "finishedOn": receipt["verified_at"]},
        },
    }


def _ci(env: Mapping[str, str]) -> tuple[str, str]:
    """Return (builder, invocation) as URIs, as GitHub's and GitLab's own provenance names them."""
    if env.get("GITHUB_ACTIONS") == "true" and "GITHUB_WORKFLOW_REF" in env:
        server, run = env.get("GITHUB_SERVER_URL", "https://github.com"), env.get("GITHUB_RUN_ID", "")
        job = f"{env.get('GITHUB_REPOSITORY', '')}/actions/runs/{run}/attempts/{env.get('GITHUB_RUN_ATTEMPT', '1')}"
        return f"{server}/{env['GITHUB_WORKFLOW_REF']}", f"{server}/{job}"
    if env.get("GITLAB_CI") == "true" and "CI_PROJECT_URL" in env:
        return f"{env['CI_PROJECT_URL']}/-/runners/{env.get('CI_RUNNER_ID', '')}", env.get("CI_JOB_URL", "")
    return _ANYBODY, ""
