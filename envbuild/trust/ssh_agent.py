"""Signatures by keys of an ssh-agent, whose private parts nobody else sees.

Sources: draft-ietf-sshm-ssh-agent (messages), RFC 8709 and RFC 5656 §3.1.2 (signatures with Ed25519 and ECDSA). An
agent signs the data themselves, so its signatures are those of the same key in a file.
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from securesystemslib.signer import Key, SecretsHandler, Signature, Signer, SSlibKey

from envbuild.base.errors import UsageError

_SIGN_REQUEST, _SIGN_RESPONSE = 13, 14
_TIMEOUT_S = 60.0  # an agent may ask its user
_MOST = 1 << 18  # bytes of a message (OpenSSH's ssh-agent.c, AGENT_MAX_LEN)
_HINT = "start one (`eval $(ssh-agent)`), and add the key: `ssh-add KEY`"


class AgentSigner(Signer):
    """A signer with the private key of `public` in the agent at SSH_AUTH_SOCK."""

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
        """Return the agent's signature of `payload`. Raises UsageError when there is none."""
        answer = self._asked(bytes([_SIGN_REQUEST]) + _string(self._blob) + _string(payload) + bytes(4))
        try:
            if answer[0] != _SIGN_RESPONSE:
                raise UsageError("the ssh-agent does not sign with this key", _HINT)
            _, found = _strings(_strings(answer[1:])[0])
            if not self._raw:
                r, s = (int.from_bytes(one, "big") for one in _strings(found))
                found = encode_dss_signature(r, s)
        except (IndexError, ValueError) as error:
            raise UsageError(f"the ssh-agent's answer cannot be understood: {error}") from error
        return Signature(self._key.keyid, found.hex())

    def _asked(self, message: bytes) -> bytes:
        if len(message) > _MOST:
            raise UsageError(
                f"what is to be signed has {len(message)} bytes, and an ssh-agent takes {_MOST}",
                "use a key in a file, or leave out --with sbom",
            )
        place = self._env.get("SSH_AUTH_SOCK")
        if not place:
            raise UsageError("there is no ssh-agent: SSH_AUTH_SOCK is not set", _HINT)
        try:
            with socket.socket(socket.AF_UNIX) as agent:
                agent.settimeout(_TIMEOUT_S)
                agent.connect(place)
                agent.sendall(_string(message))
                with agent.makefile("rb") as stream:
                    length = int.from_bytes(stream.read(4), "big")
                    return stream.read(min(length, _MOST))
        except OSError as error:
            raise UsageError(f"the ssh-agent at {place}: {error.strerror or error}", _HINT) from error


def _string(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _strings(data: bytes) -> list[bytes]:
    """Return the strings that `data` consists of, each after its length. Raises ValueError."""
    found = []
    while data:
        length = int.from_bytes(data[:4], "big")
        found.append(data[4 : 4 + length])
        if len(found[-1]) != length or len(data) < 4:
            raise ValueError("it is cut short")
        data = data[4 + length :]
    return found
