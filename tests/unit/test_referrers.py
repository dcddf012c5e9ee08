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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from lab.fake_registry import Call, fake_registry
from securesystemslib.signer import CryptoSigner

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.build import attached
from envbuild.build.attached import SignedBundles, add_attached, push_bundles
from envbuild.cache.http import Transport
from envbuild.contract.receipt import receipt_path
from envbuild.image.model import OCI_INDEX, OCI_MANIFEST, Descriptor, canonical
from envbuild.image.registry import Registry, attach, open_registry, referrers
from envbuild.store.store import Store
from envbuild.trust.bundle import BUNDLE, PREDICATES, bundle_path, sign, statement
from envbuild.trust.policy import Signers

IMAGE = canonical({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": {}, "layers": []})
DIGEST = digest_of(IMAGE)
OTHER = "sha256:" + "ab" * 32
TAG = DIGEST.replace(":", "-")


@dataclass
class Fake:
    """What the registry holds; with `api` it lists referrers, as the specification says, else it answers `unknown`."""

    api: bool
    unknown: int = 404
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=lambda: {DIGEST: IMAGE})
    more: list[Any] = field(default_factory=list)
    page: int = 1 << 30  # rows of a page
    filters: bool = False
    asked: list[str] = field(default_factory=list)
    attached: dict[str, dict[str, Any]] = field(default_factory=dict)  # digest of a subject → digest → row

    def __call__(self, call: Call) -> None:
        call.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits for 40 ms
        path, body = call.path.partition("?")[0], call.content()
        self.asked.append(path)
        if path == "/v2/":
            return call.reply(200)
        what, _, name = path.removeprefix("/v2/team/x/").partition("/")
        if what == "referrers":
            return self._list(call, name) if self.api else call.reply(self.unknown)
        if call.command == "POST":
            return call.reply(202, Location="/v2/team/x/blobs/uploads/1")
        if call.command == "PUT" and what == "manifests":
            self.manifests[name] = self.manifests[digest_of(body)] = body
            subject = json.loads(body).get("subject")
            if subject and self.api:
                self.put(body)
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

    def _list(self, call: Call, digest: str) -> None:
        rows = [*self.more, *self.attached.get(digest, {}).values()]
        query = parse_qs(urlsplit(call.path).query)
        start, more = int(query.get("from", ["0"])[0]), {}
        if self.filters:
            kind, more = query["artifactType"][0], {"OCI_Filters_Applied": "artifactType"}
            rows = [{**row, "artifactType": None} for row in rows if row["artifactType"] == kind]
            rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
        if len(rows) > start + self.page:
            query = f"artifactType={query['artifactType'][0]}&from={start + self.page}"
            more["Link"] = f'<{call.path.partition("?")[0]}?{query}>; rel="next"'
        shown = rows[start : start + self.page]
        call.reply(200, canonical({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": shown}), **more)

    def put(self, raw: bytes) -> dict[str, Any]:
        """Take the manifest of a referrer; return its row."""
        told = json.loads(raw)
        self.manifests[digest_of(raw)] = raw
        row = {"mediaType": OCI_MANIFEST, "digest": digest_of(raw), "size": len(raw)}
        row |= {"artifactType": told["artifactType"], "annotations": told["annotations"]}
        self.attached.setdefault(told["subject"]["digest"], {})[digest_of(raw)] = row
        return row


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

    def flood(
        self, count: int, created: str | None = None, kind: str = BUNDLE, *, by: CryptoSigner | None = None
    ) -> None:
        """Attach `count` different bundles by somebody at once, as `push` does one by one."""
        signer, rows = by or CryptoSigner(Ed25519PrivateKey.generate()), []
        for number in range(count):
            told = {"verified_at": f"2020-01-01T00:{number // 60:02}:{number % 60:02}+00:00", "name": ""}
            bundle = sign(statement({"x": DIGEST}, PREDICATES[""], told), signer)
            self.fake.blobs[digest_of(bundle)] = bundle
            notes = {"org.opencontainers.image.created": created or told["verified_at"]}
            notes["dev.sigstore.bundle.predicateType"] = PREDICATES[""]
            rows.append(
                self.fake.put(
                    canonical(
                        {
                            "schemaVersion": 2,
                            "mediaType": OCI_MANIFEST,
                            "artifactType": kind,
                            "annotations": notes,
                            "layers": [Descriptor(kind, digest_of(bundle), len(bundle)).as_json()],
                            "subject": {"mediaType": OCI_MANIFEST, "digest": DIGEST, "size": len(IMAGE)},
                        }
                    )
                )
            )
        if not self.fake.api:
            index = json.loads(self.fake.manifests.get(TAG, canonical({"mediaType": OCI_INDEX, "manifests": []})))
            self.fake.manifests[TAG] = canonical({**index, "manifests": [*rows, *index["manifests"]]})

    def fetch(self) -> dict[str, Any] | None:
        found = SignedBundles(DIGEST, Signers({"ci.pub": self.signer.public_key}))
        add_attached(found, self.registry, self.store)
        place = found.keep(self.store)
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
    assert (TAG in place.fake.manifests) == (not place.fake.api)
    found, cut = referrers(place.registry, DIGEST, BUNDLE)
    assert not cut
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
    (one,), _ = referrers(place.registry, DIGEST, "text/x")
    assert one.annotations == {} and not referrers(place.registry, DIGEST, "text/y")[0]


def replaced(change: Callable[[dict[str, Any]], None]) -> Callable[[Place], None]:
    """Change the manifest of each referrer; the registry then serves it under its own digest."""

    def tamper(place: Place) -> None:
        for digest, raw in list(place.fake.manifests.items()):
            told = json.loads(raw)
            if "subject" in told:
                change(told)
                raw = canonical(told)
                del place.fake.manifests[digest]
                place.fake.attached.get(DIGEST, {}).pop(digest, None)
                place.fake.put(raw)
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
            add_attached(SignedBundles(DIGEST, Signers({})), registry, Store(tmp_path))


def test_the_newest_attestation_is_found_behind_any_number_of_others(place: Place) -> None:
    """Foreign ones with the same type, which come first and claim to be newer; and rows of other types."""
    place.fake.page = 15
    place.push("2026-03-01")
    place.flood(75, datetime.now(UTC).isoformat())
    place.flood(75, kind="text/x")
    assert place.fetch() == {"verified_at": "2026-03-01", "name": ""}


def test_attestations_of_every_night_are_read_from_the_newest_on(place: Place) -> None:
    place.flood(300, by=place.signer)
    place.push("2026-03-01")
    place.store = Store(place.store.root.with_name("another"))
    place.fake.asked.clear()
    assert place.fetch() == {"verified_at": "2026-03-01", "name": ""}
    assert len([path for path in place.fake.asked if "/blobs/" in path]) <= 2 * attached._AT_ONCE


def test_a_cut_is_said_and_a_date_of_the_future_puts_nothing_before_others(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attached, "_MOST_READ", 12)
    place.push("2026-03-01")
    place.flood(40, "2999-01-01T00:00:00Z")
    assert place.fetch() == {"verified_at": "2026-03-01", "name": ""}
    assert "only 12 were read" in capsys.readouterr().err
    place.flood(40, datetime.now(UTC).isoformat())
    assert place.fetch() is None
    assert "only 12 were read" in capsys.readouterr().err


def test_large_bundles_do_not_use_up_the_limit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "_MOST_BYTES", 50_000)
    monkeypatch.setattr(attached, "_SMALL", 5_000)
    place.push("2026-03-01")
    for number in range(20):
        raw = json.loads(next(raw for raw in place.fake.manifests.values() if b'"subject"' in raw))
        blob = bytes([number]) * 10_000
        place.fake.blobs[digest_of(blob)] = blob
        raw["layers"] = [Descriptor(BUNDLE, digest_of(blob), len(blob)).as_json()]
        raw["annotations"] = {"org.opencontainers.image.created": datetime.now(UTC).isoformat()}
        row = place.fake.put(canonical(raw))
        if not place.fake.api:
            index = json.loads(place.fake.manifests[TAG])
            place.fake.manifests[TAG] = canonical({**index, "manifests": [row, *index["manifests"]]})
    assert place.fetch() == {"verified_at": "2026-03-01", "name": ""}


@pytest.mark.parametrize("place", [404], indirect=True)
def test_what_the_registry_lacks_hides_nothing(place: Place) -> None:
    place.push("2026-03-01")
    index = json.loads(place.fake.manifests[TAG])
    lost = {"digest": OTHER, "size": 9, "artifactType": BUNDLE, "mediaType": OCI_MANIFEST}
    place.fake.manifests[TAG] = canonical({**index, "manifests": [lost, *index["manifests"]]})
    assert place.fetch() == {"verified_at": "2026-03-01", "name": ""}
    place.fake.manifests[TAG] = canonical({**index, "manifests": [lost]})
    with pytest.raises(BuildError, match=OTHER):
        place.fetch()


@pytest.mark.parametrize("place", [404], indirect=True)
def test_attaching_leaves_the_rows_of_others_as_they_are(place: Place) -> None:
    theirs = {"digest": "sha512:" + "ab" * 64, "size": 9, "mediaType": "text/x", "data": "eA==", "urls": ["https://x"]}
    place.fake.manifests[TAG] = canonical({"mediaType": OCI_INDEX, "manifests": [theirs], "annotations": {"a": "b"}})
    place.push()
    index = json.loads(place.fake.manifests[TAG])
    assert index["manifests"][0] == theirs and index["annotations"] == {"a": "b"} and len(index["manifests"]) == 4


@pytest.mark.parametrize("place", ["api"], indirect=True)
def test_a_registry_that_filters_may_leave_out_the_type(place: Place) -> None:
    place.push("2026-03-01")
    place.flood(9, kind="text/x")
    place.fake.filters = True
    assert place.fetch() == {"verified_at": "2026-03-01", "name": ""}


@pytest.mark.parametrize("to", ["http://127.0.0.1:1/v2/", "//127.0.0.1:1/v2/", "https://[::1]:1/"])
def test_a_list_does_not_continue_on_another_server(tmp_path: Path, to: str) -> None:
    def script(call: Call) -> None:
        body = canonical({"manifests": []}) if "referrers" in call.path else canonical({"tags": ["a"]})
        call.reply(200, body, Link=f'<{to}>; rel="next"')

    with fake_registry(script) as server:
        reach = Transport(insecure=frozenset([server.address]), retries=0)
        registry = open_registry(f"{server.address}/team/x", reach, {})
        with pytest.raises(BuildError, match="its list continues on another server"):
            referrers(registry, DIGEST, BUNDLE)
        with pytest.raises(BuildError, match="its list continues on another server"):
            registry.tags()


def test_a_list_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.image.registry._MOST_PAGES", 5)
    answers = {"referrers": canonical({"manifests": []}), "tags": canonical({"tags": ["a"]})}

    def script(call: Call) -> None:
        call.reply(200, answers["referrers" if "referrers" in call.path else "tags"], Link=f'<{call.path}>; rel="next"')

    with fake_registry(script) as server:
        reach = Transport(insecure=frozenset([server.address]), retries=0)
        registry = open_registry(f"{server.address}/team/x", reach, {})
        for ask in (registry.tags, lambda: referrers(registry, DIGEST, BUNDLE)):
            with pytest.raises(BuildError, match="its list has more than 5 pages"):
                ask()
