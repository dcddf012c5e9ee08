"""Attestations of images in registries, as OCI referrers that cosign finds too.

Source: cosign, specs/BUNDLE_SPEC.md: artifact type and layer are of the bundle's media type. The annotations are a help
for people: what is read is decided by the signed statement.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envbuild.atomic import write_beside
from envbuild.image.referrers import attach, read_referrer, referrers
from envbuild.image.registry import Registry
from envbuild.store.store import Store
from envbuild.trust.bundle import BUNDLE, MOST, PREDICATES, bundle_path
from envbuild.trust.policy import Signers
from envbuild.verify.receipt import receipt_path

_CREATED = "org.opencontainers.image.created"


def push_bundles(registry: Registry, digest: str, bundles: Mapping[str, bytes], store: Store) -> None:
    """Attach `bundles`, by their names in PREDICATES, to the image `digest` in `registry`. Raises BuildError."""
    for name, bundle in bundles.items():
        notes = {
            "dev.sigstore.bundle.content": "dsse-envelope",
            "dev.sigstore.bundle.predicateType": PREDICATES[name],
            _CREATED: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        attach(registry, digest, BUNDLE, bundle, notes, store.blobs)


def attached(registry: Registry, digest: str, store: Store) -> Iterator[bytes]:
    """Yield the bundles that are attached to the image `digest`. Raises BuildError."""
    for referrer in referrers(registry, digest, BUNDLE):
        with suppress(ValueError):
            yield read_referrer(registry, referrer, BUNDLE, MOST, store.blobs)


def keep_bundles(bundles: Iterable[bytes], digest: str, signers: Signers, store: Store) -> Path | None:
    """Write those `bundles` of the image `digest` that one of `signers` has signed, and the receipt, into the store.

    Returns the place beside which they lie, None if no receipt is signed. Of several receipts the one of the latest
    verification is taken.
    """
    found: dict[str, list[tuple[dict[str, Any], bytes]]] = {name: [] for name in PREDICATES}
    names = {kind: name for name, kind in PREDICATES.items()}
    for bundle in bundles:
        try:
            told, by = signers.opened(bundle)
        except ValueError:  # somebody's signature
            continue
        digests = [f"sha256:{row['digest']['sha256']}" for row in told["subject"]]
        if by and digest in digests and told["predicateType"] in names:
            found[names[told["predicateType"]]].append((told["predicate"], bundle))
    if not found[""]:
        return None
    found[""].sort(key=lambda row: str(row[0].get("verified_at")))
    place = store.folder("attested", digest.partition(":")[2]) / "image"
    write_beside(receipt_path(place), json.dumps(found[""][-1][0]))
    for name, rows in found.items():
        path = bundle_path(place, name)
        path.unlink(missing_ok=True)
        if rows:
            write_beside(path, rows[-1][1].decode())
    return place
