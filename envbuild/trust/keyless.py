"""Keyless signatures: with a certificate that Sigstore gives an identity for ten minutes, by sigstore-python.

An identity is a workflow of a CI or a person, as their OpenID Connect provider (the issuer) names it. The signature is
recorded in a transparency log. Bundles are checked without a network, by the roots of trust that sigstore-python brings
or the site's own trust configuration has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.base.errors import HostError, UsageError
from envbuild.base.files import parse_json
from envbuild.trust.bundle import PAYLOAD

if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig

KEYLESS = "sigstore"
_TOKEN = "SIGSTORE_ID_TOKEN"


@contextmanager
def keyless_signer(config: str, env: Mapping[str, str]) -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    """Yield the identity of this process, and a function from an in-toto statement to its signed bundle.

    The identity's token is in SIGSTORE_ID_TOKEN, or is asked of the CI. `config` is the file of a client trust
    configuration, "" for that of the public Sigstore, which is fetched. Raises HostError without sigstore-python, and
    UsageError without an identity, or when Sigstore refuses it.
    """
    _check()
    from sigstore.dsse import Statement
    from sigstore.errors import Error
    from sigstore.oidc import IdentityError, IdentityToken, detect_credential
    from sigstore.sign import SigningContext

    try:
        token = env.get(_TOKEN) or detect_credential()
        if not token:
            raise UsageError(
                "nothing tells the identity of this process",
                f"sign in a CI that gives its jobs a token (GitHub: permissions: id-token: write), or set {_TOKEN}",
            )
        identity = IdentityToken(token)
        with SigningContext.from_trust_config(_config(config, offline=False)).signer(identity) as signer:
            yield identity.identity, lambda payload: signer.sign_dsse(Statement(payload)).to_json().encode()
    except (Error, IdentityError, OSError) as error:  # requests' are OSErrors
        raise UsageError(f"Sigstore does not sign: {error}", "see its status, or use a key: --key FILE") from error


def signed_by(bundle: bytes, statement: Mapping[str, Any], identities: Sequence[str], config: str) -> str:
    """Return which of `identities` ("IDENTITY ISSUER") has signed the `statement` in `bundle`, "" if none has.

    Raises HostError without sigstore-python, UsageError for an unreadable `config`.
    """
    material = parse_json(bundle).get("verificationMaterial")
    if not identities or not isinstance(material, dict) or "publicKey" in material:
        return ""
    _check()
    from sigstore.errors import Error
    from sigstore.models import Bundle
    from sigstore.verify import Verifier
    from sigstore.verify.policy import Identity

    try:
        verifier = Verifier(trusted_root=_config(config, offline=True).trusted_root)
        found = Bundle.from_json(bundle)
    except (Error, ValueError):
        return ""
    for one in identities:
        name, _, issuer = one.partition(" ")
        try:
            kind, payload = verifier.verify_dsse(found, Identity(identity=name, issuer=issuer.strip()))
            if kind == PAYLOAD and parse_json(payload) == statement:
                return one
        except (Error, ValueError):
            continue
    return ""


def _check() -> None:
    try:
        import sigstore  # noqa: F401
    except ImportError as error:
        raise HostError(
            "keyless signatures need sigstore-python", "install it beside envbuild: pip install 'sigstore>=4.1'"
        ) from error


def _config(path: str, *, offline: bool) -> ClientTrustConfig:
    from sigstore.errors import Error
    from sigstore.models import ClientTrustConfig

    if not path:
        return ClientTrustConfig.production(offline=offline)
    try:
        return ClientTrustConfig.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, Error) as error:
        reason: Any = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{path}: {reason}", "name a client trust configuration of Sigstore (ClientTrustConfig, JSON)"
        ) from error
