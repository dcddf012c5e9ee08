"""Keys that sign and check attestations: files, keys of an ssh-agent, and those of a KMS by securesystemslib's URIs.

Only keys whose signatures cosign and Sigstore's clients read in the same way are accepted: Ed25519, and ECDSA on NIST's
curves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key, load_ssh_public_key
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, CryptoSigner, Key, Signer, SSlibKey

from envbuild.base.errors import UsageError
from envbuild.base.files import read_regular

AGENT = "ssh-agent"
_MAKE = "openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out key.pub"


def load_signer(named: str, public: Path | None, passphrase: Callable[[], str], option: str = "--key") -> Signer:
    """Return the signer with the private key `named`: a PEM file, `ssh-agent`, or the URI of a KMS.

    The last two need the `public` key. `passphrase` is called for an encrypted file; `option` is what named the key.
    Raises UsageError, which never contains the key.
    """
    if named == AGENT:
        if public is None:
            raise UsageError(f"{option} {AGENT}: its public key is not known", "give --public-key FILE")
        from envbuild.trust.ssh_agent import AgentSigner

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
            raise UsageError(f"{path}: several keys, and only the first one would count", "give each a file of its own")
        if ssh and b"-cert-" in data.split()[0]:
            raise UsageError(
                f"{path}: a certificate of OpenSSH, whose time and names nobody would check",
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
