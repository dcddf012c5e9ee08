"""Whether a receipt is trusted: of this content, attested by a signer of the site, young enough, with its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from securesystemslib.signer import Key

from envbuild.base.errors import VerificationError
from envbuild.base.text import seconds
from envbuild.site.tables import TrustTable
from envbuild.trust.bundle import PREDICATES, bundle_path, opened, read_bundle, statement
from envbuild.trust.keys import load_public, signed_by

RECEIPT = PREDICATES[""]
# Fields that change after a receipt was attested: an artifact may be pushed or copied.
_MAY_CHANGE = ("path", "pushed")
CLOCK_S = 300  # by which the signer's clock may be ahead


@dataclass(frozen=True, slots=True)
class TrustVerdict:
    """The signer of a trusted artifact (the file of a key, or an identity) and the time of the verification.

    `others` are the names of its other attestations that a signer has signed.
    """

    signer: str
    verified_at: str
    recipe: str = ""
    others: tuple[str, ...] = ()


def attested(receipt: Mapping[str, Any], name: str = "", predicate: Mapping[str, Any] | None = None) -> bytes:
    """Return the statement of `receipt` about its subjects: the artifact, and the manifest of its files.

    `name` and `predicate` are given for another attestation of the same content.
    """
    artifact = receipt["artifact"]
    subjects = {f"{receipt['recipe']['name']}/{receipt['target']}/{artifact['kind']}": artifact["digest"]}
    if artifact.get("manifest"):
        subjects["manifest of its files"] = artifact["manifest"]
    if "@sha256:" in str(artifact.get("pushed")):
        where, _, digest = artifact["pushed"].partition("@")
        subjects[where] = digest
    return statement(subjects, PREDICATES[name], receipt if predicate is None else predicate)


@dataclass(frozen=True, slots=True)
class Signers:
    """The signers that a site trusts: `keys` by their files, and `identities` by Sigstore's `config`."""

    keys: Mapping[str, Key]
    identities: tuple[str, ...] = ()
    config: str = ""

    @classmethod
    def of(cls, trust: TrustTable) -> Signers:
        """Return the signers of a site. Raises UsageError for a faulty key."""
        return cls({path: load_public(Path(path)) for path in trust.signers}, trust.identities, trust.sigstore)

    def opened(self, bundle: bytes) -> tuple[dict[str, Any], str]:
        """Return the statement in `bundle`, and its signer, "" if it is none of these.

        Raises ValueError for an invalid bundle, and HostError for a keyless one without sigstore-python.
        """
        signed_statement, key = opened(bundle, list(self.keys.values()))
        if key is not None:
            return signed_statement, next(path for path, known_key in self.keys.items() if known_key is key)
        return signed_statement, signed_by(bundle, signed_statement, self.identities, self.config)


def judge(
    artifact: Path,
    receipt: Mapping[str, Any],
    trust: TrustTable,
    now: datetime,
    digest: str = "",
    *,
    names: Sequence[str] = (),
    recipe: str = "",
) -> TrustVerdict:
    """Return the verdict on `receipt`, for the content of `artifact`, at the time `now`.

    `digest` is the image's digest in a registry, "" to use the artifact's own: the field `pushed` of a receipt is not
    signed. `names` are the names by which the artifact was found, `recipe` is the required recipe, "" for any.

    Raises VerificationError with the reason if it is not trusted, and UsageError for a faulty key of the site.
    """
    signers, digest, others = Signers.of(trust), digest or receipt["artifact"]["digest"], []
    attested_receipt, signer = signed(artifact, bundle_path(artifact), RECEIPT, "attestation", digest, signers)
    check_recipe(artifact, attested_receipt.get("recipe"), trust, names, recipe)
    for name in PREDICATES:
        place = bundle_path(artifact, name)
        if name and (name in trust.attestations or place.exists()):
            signed(artifact, place, PREDICATES[name], f"attestation of its {name}", digest, signers)
            others.append(name)
    # They are the same JSON: read_receipt has checked the parts that are read here.
    if attested_receipt.keys() != receipt.keys() or _fixed(receipt) != {
        **attested_receipt,
        "artifact": _fixed(attested_receipt)["artifact"],
    }:
        raise _refused(artifact, "its receipt is another one than was attested")
    if attested_receipt["passed"] is not True:
        raise _refused(artifact, "its verification did not pass")
    if (attested_receipt.get("settings") or {}).get("quick"):
        raise _refused(artifact, "it was verified with --verify quick only")
    passed = {check["name"] for check in attested_receipt["checks"] if check["status"] == "pass"}
    if missing := [name for name in trust.checks if name not in passed]:
        raise _refused(artifact, f"its receipt lacks checks that passed: {', '.join(missing)}")
    try:
        verified_at = datetime.fromisoformat(attested_receipt["verified_at"]).astimezone(UTC)
    except (ValueError, OverflowError):
        raise _refused(artifact, "the time in its receipt is malformed") from None
    age, most = (now - verified_at).total_seconds(), seconds(trust.max_age)
    if age < -CLOCK_S:
        raise _refused(artifact, f"its verification is of the future: {attested_receipt['verified_at']}")
    if most is not None and age > most:
        raise _refused(artifact, f"it was verified at {attested_receipt['verified_at']}, more than {trust.max_age} ago")
    recipe_name = str((attested_receipt.get("recipe") or {}).get("name", ""))
    return TrustVerdict(signer, attested_receipt["verified_at"], recipe_name, tuple(others))


def check_recipe(artifact: Path, recipe_of: object, trust: TrustTable, names: Sequence[str], recipe: str) -> None:
    """Raise VerificationError unless `recipe_of`, the recipe in an attestation, matches `names` and `recipe`.

    A signature covers only content: whoever may move a tag or a file could replace it with other signed content.
    """
    recipe_name = recipe_of.get("name") if isinstance(recipe_of, Mapping) else recipe_of
    expectations = [
        ("[trust] names of the site says", name, trust.names[name]) for name in names if name in trust.names
    ][:1]
    expectations += [("it was asked for as", "", recipe)] if recipe else []
    for why, name, expected in expectations:
        if recipe_name != expected:
            raise VerificationError(
                f"{names[0] if names else artifact} is not trusted: it is of the recipe {recipe_name!r:.80}, and "
                f"{why} {f'{name} = ' if name else ''}{expected!r}",
                "another signed artifact has replaced it: ask whoever moved the tag or wrote the file",
            )


def signed(
    artifact: Path, place: Path, kind: str, title: str, digest: str, signers: Signers
) -> tuple[dict[str, Any], str]:
    """Return the predicate of type `kind` of the attestation at `place`, and its signer among `signers`.

    Raises VerificationError without a signer, and for an attestation of other content than `artifact` with `digest`;
    `title` names the attestation in messages.
    """
    try:
        signed_statement, by = signers.opened(read_bundle(place))
    except FileNotFoundError:
        raise _refused(artifact, f"it has no {title}") from None
    except (OSError, ValueError) as error:
        raise _refused(artifact, f"{place} cannot be read: {error}") from error
    if not by:
        raise _refused(artifact, f"no signer of the site has signed {place.name}")
    if signed_statement["predicateType"] != kind:
        raise _refused(artifact, f"{place.name} is no {title}: it has {signed_statement['predicateType']!r:.80}")
    if digest not in [f"sha256:{row['digest']['sha256']}" for row in signed_statement["subject"]]:
        raise _refused(artifact, f"{place.name} is of another artifact")
    return signed_statement["predicate"], by


def _fixed(receipt: Mapping[str, Any]) -> dict[str, Any]:
    artifact = {name: value for name, value in receipt["artifact"].items() if name not in _MAY_CHANGE}
    return {**receipt, "artifact": artifact}


def _refused(artifact: Path, why: str) -> VerificationError:
    return VerificationError(
        f"{artifact} is not trusted: {why}",
        f"let a signer of [trust] in the site file verify and attest it: `envbuild attest {artifact} --key KEY`",
    )
