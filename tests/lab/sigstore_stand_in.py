"""A stand-in for Sigstore's services: certificates (Fulcio), their log (CT) and the transparency log (Rekor v1).

The real services cannot be had in tests. Keys, certificates, timestamps and proofs of inclusion are made as the
specifications say (RFC 6962; Rekor's and Fulcio's HTTP interfaces), and sigstore-python checks all of them. The log has
one entry at a time, and an identity is what the token says: nobody checks who signed it.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_NAME = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "stand-in")])


def token(identity: str, issuer: str) -> str:
    """A token of OpenID Connect that nobody signed."""
    now = int(time.time())
    claims = {"aud": "sigstore", "sub": identity, "iss": issuer, "iat": now, "exp": now + 600}
    parts = ({"alg": "none"}, claims)
    return ".".join(_plain(json.dumps(part).encode()) for part in parts) + "." + _plain(b"none")


def _plain(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


class Services:
    """The keys of the services, and what they answer."""

    def __init__(self) -> None:
        self.ca, self.ct, self.log = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(_NAME).issuer_name(_NAME).serial_number(1)
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))
        builder = builder.public_key(self.ca.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(ca=True), critical=True)
        own = x509.SubjectKeyIdentifier.from_public_key(self.ca.public_key())
        self.root = builder.add_extension(own, critical=False).sign(self.ca, hashes.SHA256())

    def certificate(self, request: bytes, bearer: str) -> list[str]:
        """The chain of the certificate for the key of a signing request, in PEM."""
        claims = json.loads(base64.urlsafe_b64decode(bearer.split(".")[1] + "=="))
        wanted = x509.load_pem_x509_csr(request)
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(_NAME)
        builder = builder.serial_number(x509.random_serial_number()).public_key(wanted.public_key())
        builder = builder.not_valid_before(now - timedelta(minutes=1)).not_valid_after(now + timedelta(minutes=9))
        name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(claims["sub"])])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.ca.public_key())
        for extension, critical in (
            (_usage(), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False),
            (name, True),
            (authority, False),
            (x509.UnrecognizedExtension(_ISSUER, claims["iss"].encode()), False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        plain = builder.sign(self.ca, hashes.SHA256()).tbs_certificate_bytes
        stamps = x509.UnrecognizedExtension(ExtensionOID.PRECERT_SIGNED_CERTIFICATE_TIMESTAMPS, self._stamps(plain))
        made = builder.add_extension(stamps, critical=False).sign(self.ca, hashes.SHA256())
        return [one.public_bytes(Encoding.PEM).decode() for one in (made, self.root)]

    def _stamps(self, certificate: bytes) -> bytes:
        """RFC 6962, 3.2 and 3.3: the list with the timestamp of a precertificate, as an OCTET STRING."""
        when = int(time.time() * 1000)
        issuer = hashlib.sha256(_public(self.ca)).digest()
        entry = issuer + len(certificate).to_bytes(3, "big") + certificate
        signed = self.ct.sign(struct.pack("!BBQH", 0, 0, when, 1) + entry + b"\0\0", ec.ECDSA(hashes.SHA256()))
        stamp = b"\0" + hashlib.sha256(_public(self.ct)).digest() + struct.pack("!QH", when, 0)
        stamp += b"\4\3" + len(signed).to_bytes(2, "big") + signed
        listed = len(stamp).to_bytes(2, "big") + stamp
        listed = len(listed).to_bytes(2, "big") + listed
        assert len(listed) < 256
        return bytes([4, 0x81, len(listed)]) + listed if len(listed) > 127 else bytes([4, len(listed)]) + listed

    def entry(self, proposed: Any) -> dict[str, Any]:
        """The log's answer to a proposed entry of the kind dsse."""
        content = proposed["spec"]["proposedContent"]
        envelope = json.loads(content["envelope"])
        payload = base64.b64decode(envelope["payload"])
        spec = {
            "envelopeHash": {"algorithm": "sha256", "value": hashlib.sha256(content["envelope"].encode()).hexdigest()},
            "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()},
            "signatures": [
                {"signature": row["sig"], "verifier": content["verifiers"][0]} for row in envelope["signatures"]
            ],
        }
        body = _canonical({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec})
        identity, root = hashlib.sha256(_public(self.log)), hashlib.sha256(b"\0" + body).digest()
        promised = {
            "body": _text(body),
            "integratedTime": int(time.time()),
            "logID": identity.hexdigest(),
            "logIndex": 0,
        }
        note = f"stand-in - 1\n1\n{_text(root)}\n"
        by = identity.digest()[:4] + self._signed(note.encode())
        proof = {"checkpoint": f"{note}\n— stand-in {_text(by)}\n", "hashes": [], "logIndex": 0, "treeSize": 1}
        promise = _text(self._signed(_canonical(promised)))
        verification = {"inclusionProof": {**proof, "rootHash": root.hex()}, "signedEntryTimestamp": promise}
        return {root.hex(): {**promised, "verification": verification}}

    def _signed(self, data: bytes) -> bytes:
        return self.log.sign(data, ec.ECDSA(hashes.SHA256()))

    def trust(self, url: str) -> dict[str, Any]:
        """The client trust configuration of the services at `url`."""
        valid = {"start": "2020-01-01T00:00:00Z"}
        logs = {
            name: {
                "baseUrl": url,
                "hashAlgorithm": "SHA2_256",
                "logId": {"keyId": _text(hashlib.sha256(key).digest())},
                "publicKey": {"rawBytes": _text(key), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": valid},
            }
            for name, key in (("tlogs", _public(self.log)), ("ctlogs", _public(self.ct)))
        }
        chain = {"certificates": [{"rawBytes": _text(self.root.public_bytes(Encoding.DER))}]}
        authority = {
            "subject": {"organization": "x", "commonName": "x"},
            "uri": url,
            "certChain": chain,
            "validFor": valid,
        }
        service = [{"url": url, "majorApiVersion": 1, "validFor": valid, "operator": "stand-in"}]
        return {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [logs["tlogs"]],
                "ctlogs": [logs["ctlogs"]],
                "certificateAuthorities": [authority],
                "timestampAuthorities": [],
            },
            "signingConfig": {
                "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
                "caUrls": service,
                "oidcUrls": service,
                "rekorTlogUrls": service,
                "tsaUrls": [],
                "rekorTlogConfig": {"selector": "ANY"},
                "tsaConfig": {"selector": "ANY"},
            },
        }


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _usage(*, ca: bool = False) -> x509.KeyUsage:
    others = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **others)


@dataclass(frozen=True)
class StandIn:
    """Running services, and the file of their trust configuration."""

    services: Services
    config: Path


@contextmanager
def sigstore_stand_in(folder: Path) -> Iterator[StandIn]:
    """Run the services on loopback; their trust configuration is written into `folder`."""
    services = Services()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/api/v2/signingCert":
                bearer = self.headers["Authorization"].removeprefix("Bearer ")
                chain = services.certificate(base64.b64decode(asked["certificateSigningRequest"]), bearer)
                answer: Any = {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}
            else:
                assert self.path == "/api/v1/log/entries", self.path
                answer = services.entry(asked)
            body = json.dumps(answer).encode()
            self.send_response(201)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = folder / "trust_config.json"
        config.write_text(json.dumps(services.trust(f"http://127.0.0.1:{server.server_port}")))
        try:
            yield StandIn(services, config)
        finally:
            server.shutdown()
