"""Keys that sign and check attestations: in files, in an ssh-agent, in a KMS by securesystemslib's URIs, or keyless.

Only keys whose signatures cosign and Sigstore's clients read in the same way are accepted: Ed25519, and ECDSA on NIST's
curves. A keyless signature has a certificate that Sigstore gives an identity for ten minutes, by sigstore-python. An
identity is a workflow of a CI or a person, as their OpenID Connect provider (the issuer) names it. The signature is
recorded in a transparency log. Bundles are checked without a network, by the roots of trust in sigstore-python or in
the site's own trust configuration.
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_public_key,
)
from securesystemslib.signer import (
    SIGNER_FOR_URI_SCHEME,
    CryptoSigner,
    Key,
    SecretsHandler,
    Signature,
    Signer,
    SSlibKey,
)

from envbuild.base.errors import HostError, UsageError
from envbuild.base.files import parse_json, read_regular
from envbuild.trust.bundle import PAYLOAD

if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig


AGENT = "ssh-agent"
_MAKE = "openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out key.pub"
_SIGN_REQUEST, _SIGN_RESPONSE = 13, 14
_TIMEOUT_S = 60.0  # an agent may ask its user
_MOST_MESSAGE = 1 << 18  # bytes of a message (OpenSSH's ssh-agent.c, AGENT_MAX_LEN)
_AGENT_HINT = "start one (`eval $(ssh-agent)`), and add the key: `ssh-add KEY`"


def load_signer(named: str, public: Path | None, passphrase: Callable[[], str], option: str = "--key") -> Signer:
    """Return the signer with the private key `named`: a PEM file, `ssh-agent`, or the URI of a KMS.

    The last two need the `public` key. `passphrase` is called for an encrypted file; `option` is the option with the
    key. Raises UsageError, which never contains the key.
    """
    if named == AGENT:
        if public is None:
            raise UsageError(f"{option} {AGENT}: its public key is not known", "give --public-key FILE")
        return AgentSigner(_public(public))
    scheme, colon, _ = named.partition(":")
    if colon and scheme in SIGNER_FOR_URI_SCHEME and not Path(named).exists():
        if public is None:
            raise UsageError(f"{option} {scheme}:…: its public key is not known", "give --public-key FILE")
        try:
            return Signer.from_priv_key_uri(named, load_public(public))
        except Exception as error:
            raise UsageError(
                f"{option} {scheme}:…: {error}", "see securesystemslib's signers for what it needs"
            ) from error
    try:
        data = read_regular(named)
        try:
            key = load_pem_private_key(data, None)
        except TypeError:  # it is encrypted
            key = load_pem_private_key(data, passphrase().encode())
    except OSError as error:
        raise UsageError(f"{option} {named}: {error.strerror}", f"make one: {_MAKE}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{option} {named}: no private key in PEM form, or its passphrase is wrong", f"make one: {_MAKE}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey | EllipticCurvePrivateKey):
        raise UsageError(f"{option} {named}: neither an Ed25519 nor an ECDSA key", f"make one: {_MAKE}")
    try:
        return CryptoSigner(key)
    except ValueError as error:
        raise UsageError(f"{option} {named}: {error}", f"make one: {_MAKE}") from error


def load_public(path: Path) -> Key:
    """Return the public key in a file, in PEM or OpenSSH's form. Raises UsageError."""
    return SSlibKey.from_crypto(_public(path))


def _public(path: Path) -> Ed25519PublicKey | EllipticCurvePublicKey:
    try:
        data = read_regular(path)
        ssh = data.startswith((b"ssh-", b"ecdsa-"))
        if len(data.strip().splitlines()) > 1 if ssh else data.count(b"-----BEGIN") > 1:
            raise UsageError(
                f"{path}: it contains several keys, and only the first would be used", "give each a file of its own"
            )
        if ssh and b"-cert-" in data.split()[0]:
            raise UsageError(
                f"{path}: an OpenSSH certificate; envbuild cannot check its validity period and principals",
                "name the public key alone",
            )
        key = (load_ssh_public_key if ssh else load_pem_public_key)(data)
        if isinstance(key, Ed25519PublicKey | EllipticCurvePublicKey):
            return key
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name the file of a public key") from error
    except (ValueError, UnsupportedAlgorithm):
        pass
    raise UsageError(
        f"{path}: no public Ed25519 or ECDSA key in PEM or OpenSSH's form",
        f"openssl pkey -in KEY.pem -pubout -out {path}, for a key made so: {_MAKE}",
    )


class AgentSigner(Signer):
    """A signer with the private key of `public` in the agent at SSH_AUTH_SOCK, which never leaves the agent.

    An agent signs the data themselves, so its signatures equal those of the same key in a file. Sources:
    draft-ietf-sshm-ssh-agent (messages), RFC 8709 and RFC 5656 §3.1.2 (signatures with Ed25519 and ECDSA).
    """

    def __init__(self, public: Ed25519PublicKey | EllipticCurvePublicKey, env: Mapping[str, str] = os.environ) -> None:
        self._key, self._env = SSlibKey.from_crypto(public), env
        self._raw = isinstance(public, Ed25519PublicKey)
        self._blob = base64.b64decode(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])

    @property
    def public_key(self) -> Key:
        return self._key

    @classmethod
    def from_priv_key_uri(
        cls, priv_key_uri: str, public_key: Key, secrets_handler: SecretsHandler | None = None
    ) -> Any:
        raise NotImplementedError

    def sign(self, payload: bytes) -> Signature:
        """Return the agent's signature of `payload`. Raises UsageError if the agent cannot sign."""
        answer = self._asked(bytes([_SIGN_REQUEST]) + _string(self._blob) + _string(payload) + bytes(4))
        try:
            if answer[0] != _SIGN_RESPONSE:
                raise UsageError("the ssh-agent refused to sign with this key", _AGENT_HINT)
            _, signature_data = _strings(_strings(answer[1:])[0])
            if not self._raw:
                r, s = (int.from_bytes(string, "big") for string in _strings(signature_data))
                signature_data = encode_dss_signature(r, s)
        except (IndexError, ValueError) as error:
            raise UsageError(f"the ssh-agent sent an invalid answer: {error}") from error
        return Signature(self._key.keyid, signature_data.hex())

    def _asked(self, message: bytes) -> bytes:
        if len(message) > _MOST_MESSAGE:
            raise UsageError(
                f"the message to sign has {len(message)} bytes; an ssh-agent accepts {_MOST_MESSAGE}",
                "use a key in a file, or leave out --with sbom",
            )
        place = self._env.get("SSH_AUTH_SOCK")
        if not place:
            raise UsageError("there is no ssh-agent: SSH_AUTH_SOCK is not set", _AGENT_HINT)
        try:
            with socket.socket(socket.AF_UNIX) as agent:
                agent.settimeout(_TIMEOUT_S)
                agent.connect(place)
                agent.sendall(_string(message))
                with agent.makefile("rb") as stream:
                    length = int.from_bytes(stream.read(4), "big")
                    return stream.read(min(length, _MOST_MESSAGE))
        except OSError as error:
            raise UsageError(f"the ssh-agent at {place}: {error.strerror or error}", _AGENT_HINT) from error


def _string(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _strings(data: bytes) -> list[bytes]:
    """Return the strings that `data` consists of, each after its length. Raises ValueError."""
    strings = []
    while data:
        length = int.from_bytes(data[:4], "big")
        strings.append(data[4 : 4 + length])
        if len(strings[-1]) != length or len(data) < 4:
            raise ValueError("it is cut short")
        data = data[4 + length :]
    return strings


KEYLESS = "sigstore"
_TOKEN = "SIGSTORE_ID_TOKEN"


@contextmanager
def keyless_signer(config: str, env: Mapping[str, str]) -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    """Yield the identity of this process, and a function from an in-toto statement to its signed bundle.

    The identity's token is in SIGSTORE_ID_TOKEN, or is asked of the CI. `config` is the file of a client trust
    configuration, "" to fetch the public Sigstore's. Raises HostError without sigstore-python, and UsageError without
    an identity, or when Sigstore refuses it.
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
                "the identity of this process is unknown",
                f"sign in a CI that gives its jobs a token (GitHub: permissions: id-token: write), or set {_TOKEN}",
            )
        identity = IdentityToken(token)
        with SigningContext.from_trust_config(_config(config, offline=False)).signer(identity) as signer:
            yield identity.identity, lambda payload: signer.sign_dsse(Statement(payload)).to_json().encode()
    except (Error, IdentityError, OSError) as error:  # requests' are OSErrors
        raise UsageError(f"Sigstore refused to sign: {error}", "see its status, or use a key: --key FILE") from error


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
        statement_bytes = Bundle.from_json(bundle)
    except (Error, ValueError):
        return ""
    for identity in identities:
        name, _, issuer = identity.partition(" ")
        try:
            kind, payload = verifier.verify_dsse(statement_bytes, Identity(identity=name, issuer=issuer.strip()))
            if kind == PAYLOAD and parse_json(payload) == statement:
                return identity
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
