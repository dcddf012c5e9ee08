"""Attestations that a registry keeps with an image, against a fake registry with and without the referrers API.

A real registry without the API is in tests/real/test_docker_registry.py; none with the API could be had.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from lab.fake_registry import Call, fake_registry
from securesystemslib.signer import CryptoSigner

from envbuild.cache.http import Transport
from envbuild.errors import BuildError
from envbuild.image.model import OCI_INDEX, OCI_MANIFEST, canonical, digest_of
from envbuild.image.referrers import attach, referrers
from envbuild.image.registry import Registry, open_registry
from envbuild.kinds.attached import attached, keep_bundles, push_bundles
from envbuild.store.store import Store
from envbuild.trust.bundle import BUNDLE, PREDICATES, bundle_path, sign, statement
from envbuild.trust.policy import Signers
from envbuild.verify.receipt import receipt_path

IMAGE = canonical({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": {}, "layers": []})
DIGEST = digest_of(IMAGE)
OTHER = "sha256:" + "ab" * 32


@dataclass
class Fake:
    """What the registry holds; with `api` it lists referrers, as the specification says, else it answers `unknown`."""

    api: bool
    unknown: int = 404
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=lambda: {DIGEST: IMAGE})
    more: list[Any] = field(default_factory=list)

    def __call__(self, call: Call) -> None:
        call.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits for 40 ms
        path, body = call.path.partition("?")[0], call.content()
        if path == "/v2/":
            return call.reply(200)
        what, _, name = path.removeprefix("/v2/team/x/").partition("/")
        if what == "referrers":
            return call.reply(200, self._listed(name)) if self.api else call.reply(self.unknown)
        if call.command == "POST":
            return call.reply(202, Location="/v2/team/x/blobs/uploads/1")
        if call.command == "PUT" and what == "manifests":
            self.manifests[name] = self.manifests[digest_of(body)] = body
            subject = json.loads(body).get("subject")
            noticed = {"OCI_Subject": subject["digest"]} if subject and self.api else {}
            return call.reply(201, **noticed)
        if call.command in ("PUT", "PATCH"):
            if body:
                self.blobs[digest_of(body)] = body
            return call.reply(201 if call.command == "PUT" else 202, Location="/v2/team/x/blobs/uploads/1")
        found = (self.blobs if what == "blobs" else self.manifests).get(name)
        if found is None:
            return call.reply(404)
        kind = json.loads(found).get("mediaType", "") if what == "manifests" else "application/octet-stream"
        call.reply(200, found, Content_Type=kind)

    def _listed(self, digest: str) -> bytes:
        rows = list(self.more)
        for raw in {digest_of(raw): raw for raw in self.manifests.values()}.values():
            told = json.loads(raw)
            if told.get("subject", {}).get("digest") == digest:
                row = {"mediaType": OCI_MANIFEST, "digest": digest_of(raw), "size": len(raw)}
                rows.append({**row, "artifactType": told["artifactType"], "annotations": told["annotations"]})
        return canonical({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": rows})


@dataclass
class Place:
    """A registry with an image, a store, and a signer whom the site knows."""

    fake: Fake
    registry: Registry
    store: Store
    signer: CryptoSigner = field(default_factory=lambda: CryptoSigner(Ed25519PrivateKey.generate()))

    def push(self, verified_at: str = "2026-01-01", *, by: CryptoSigner | None = None, of: str = DIGEST) -> None:
        signer = by or self.signer
        made = {
            name: sign(statement({"x": of}, kind, {"verified_at": verified_at, "name": name}), signer)
            for name, kind in PREDICATES.items()
        }
        push_bundles(self.registry, DIGEST, made, self.store)

    def fetch(self) -> dict[str, Any] | None:
        bundles = attached(self.registry, DIGEST, self.store)
        place = keep_bundles(bundles, DIGEST, Signers({"ci.pub": self.signer.public_key}), self.store)
        if place is None:
            return None
        assert all(bundle_path(place, name).exists() for name in PREDICATES)
        receipt: dict[str, Any] = json.loads(receipt_path(place).read_text())
        return receipt


@pytest.fixture(params=["api", 404])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    fake = Fake(True) if request.param == "api" else Fake(False, request.param)
    with fake_registry(fake) as server:
        reach = Transport(insecure=frozenset([server.address]))
        yield Place(fake, open_registry(f"{server.address}/team/x@{DIGEST}", reach, {}), Store(tmp_path / "store"))


@pytest.mark.parametrize("place", ["api", 400, 404, 405], indirect=True)
def test_what_a_signer_attached_is_found(place: Place) -> None:
    assert place.fetch() is None
    place.push()
    assert place.fetch() == {"verified_at": "2026-01-01", "name": ""}
    tag = DIGEST.replace(":", "-")
    assert (tag in place.fake.manifests) == (not place.fake.api)
    found = referrers(place.registry, DIGEST, BUNDLE)
    kinds = {one.annotations["dev.sigstore.bundle.predicateType"] for one in found}
    assert kinds == set(PREDICATES.values())
    manifest = json.loads(place.fake.manifests[found[0].digest])
    assert manifest["artifactType"] == manifest["layers"][0]["mediaType"] == BUNDLE
    assert manifest["subject"] == {"mediaType": OCI_MANIFEST, "digest": DIGEST, "size": len(IMAGE)}
    assert manifest["config"]["digest"] == "sha256:" + hashlib.sha256(b"{}").hexdigest()


def test_the_latest_verification_counts_and_what_others_attached_does_not(place: Place) -> None:
    stranger = CryptoSigner(Ed25519PrivateKey.generate())
    place.push("2026-03-01")
    place.push("2026-02-01")
    place.push("2027-01-01", by=stranger)
    place.push("2027-01-02", of=OTHER)
    assert place.fetch() == {"verified_at": "2026-03-01", "name": ""}


def test_attaching_the_same_twice_lists_it_once(place: Place) -> None:
    for _ in range(2):
        attach(place.registry, DIGEST, "text/x", b"a", {}, place.store.blobs)
    (one,) = referrers(place.registry, DIGEST, "text/x")
    assert one.annotations == {} and not referrers(place.registry, DIGEST, "text/y")


def replaced(change: Callable[[dict[str, Any]], None]) -> Callable[[Place], None]:
    """Change the manifest of each referrer; the registry then serves it under its own digest."""

    def tamper(place: Place) -> None:
        for digest, raw in list(place.fake.manifests.items()):
            told = json.loads(raw)
            if "subject" in told:
                change(told)
                raw = canonical(told)
                del place.fake.manifests[digest]
                place.fake.manifests[digest_of(raw)] = raw
                for tag, index in list(place.fake.manifests.items()):
                    if b'"manifests"' in index:
                        place.fake.manifests[tag] = index.replace(digest.encode(), digest_of(raw).encode())

    return tamper


def cut(place: Place) -> None:
    place.fake.blobs = {digest: data[: len(data) // 2] for digest, data in place.fake.blobs.items()}
    place.store.blobs.root.rename(place.store.root / "gone")


TAMPERINGS: dict[str, Callable[[Place], None]] = {
    "two layers": replaced(lambda told: told["layers"].append(told["layers"][0])),
    "no layer": replaced(lambda told: told["layers"].clear()),
    "another type of the layer": replaced(lambda told: told["layers"][0].update(mediaType="text/plain")),
    "a large layer": replaced(lambda told: told["layers"][0].update(size=1 << 40)),
    "no size": replaced(lambda told: told["layers"][0].update(size=None)),
    "a digest that is none": replaced(lambda told: told["layers"][0].update(digest="../../x")),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_what_is_no_bundle_is_left_out(place: Place, name: str) -> None:
    place.push()
    TAMPERINGS[name](place)
    assert place.fetch() is None


def test_content_that_is_cut_short_is_refused(place: Place) -> None:
    place.push()
    cut(place)
    with pytest.raises(BuildError, match=r"blob sha256:"):
        place.fetch()


@pytest.mark.parametrize("rows", [[3], [{"digest": 5}], [{"digest": "sha256:x"}], [{"digest": OTHER}]])
def test_rows_of_another_form_are_left_out(place: Place, rows: list[Any]) -> None:
    place.fake.more = rows
    place.push()
    assert place.fetch() is not None


@pytest.mark.parametrize("status", [500, 403])
def test_a_registry_that_fails_is_named(tmp_path: Path, status: int) -> None:
    def script(call: Call) -> None:
        call.reply(200 if call.path == "/v2/" else status)

    with fake_registry(script) as server:
        reach = Transport(insecure=frozenset([server.address]), retries=0)
        registry = open_registry(f"{server.address}/team/x@{DIGEST}", reach, {})
        with pytest.raises(BuildError, match=re.escape(f"what is attached to {server.address}/team/x@{DIGEST}")):
            list(attached(registry, DIGEST, Store(tmp_path)))
