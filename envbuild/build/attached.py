"""Attestations of images in registries, as OCI referrers that cosign finds too.

Source: cosign, specs/BUNDLE_SPEC.md: artifact type and layer are of the bundle's media type. The annotations help
people and set the order of reading; only the signed statement decides which bundle counts.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envbuild.base.atomic import write_beside
from envbuild.base.errors import BuildError
from envbuild.base.progress import log
from envbuild.base.workers import each
from envbuild.contract.receipt import receipt_path
from envbuild.image.model import Descriptor
from envbuild.image.registry import Registry, attach, referrer_layer, referrers
from envbuild.image.registry_endpoint import MissingContent
from envbuild.store.store import Store
from envbuild.trust.bundle import BUNDLE, MOST, PREDICATES, bundle_path
from envbuild.trust.policy import CLOCK_S, Signers

_CREATED, _KIND = "org.opencontainers.image.created", "dev.sigstore.bundle.predicateType"
_NAMES = {kind: name for name, kind in PREDICATES.items()}
# Bundles of one image that are read, and their bytes; those over _SMALL are read last, so that they use up no limit.
_MOST_READ, _MOST_BYTES, _SMALL = 5000, 1 << 30, 1 << 20
_AT_ONCE = 4


def push_bundles(registry: Registry, digest: str, bundles: Mapping[str, bytes], store: Store) -> None:
    """Attach `bundles`, by their names in PREDICATES, to the image `digest` in `registry`. Raises BuildError."""
    for name, bundle in bundles.items():
        notes = {
            "dev.sigstore.bundle.content": "dsse-envelope",
            _KIND: PREDICATES[name],
            _CREATED: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        attach(registry, digest, BUNDLE, bundle, notes, store.blobs)


@dataclass
class SignedBundles:
    """The newest bundle of each name in PREDICATES that one of `signers` signed for the image `digest`."""

    digest: str
    signers: Signers
    # Name → (time, predicate, bundle): of a receipt, the time of its verification, else that of attaching it.
    _newest: dict[str, tuple[float, dict[str, Any], bytes]] = field(default_factory=dict)

    @property
    def has_receipt(self) -> bool:
        """Whether a signer has signed a receipt."""
        return "" in self._newest

    def add(self, bundle: bytes, at: float = 0.0) -> None:
        """Keep `bundle`, attached `at` (seconds since 1970), if a signer signed it and it is the newest."""
        try:
            statement, by = self.signers.opened(bundle)
        except ValueError:  # somebody's signature
            return
        name = _NAMES.get(statement["predicateType"])
        digests = [f"sha256:{row['digest']['sha256']}" for row in statement["subject"]]
        if not by or name is None or self.digest not in digests:
            return
        time_of = at if name else _seconds(statement["predicate"].get("verified_at"))
        if name not in self._newest or time_of > self._newest[name][0]:
            self._newest[name] = time_of, statement["predicate"], bundle

    def needs(self, kind: str | None, at: float) -> bool:
        """Return whether the bundle must be read: it may be newer than the kept one of its predicate type `kind`.

        `at` is the time when it was attached, 0 if unknown; `kind` is None for a bundle without that annotation.
        Signers set both correctly; wrong annotations can only hide the bundle that carries them.
        """
        name = "" if kind is None else _NAMES.get(kind)
        if name is None:
            return False
        return kind is None or not at or name not in self._newest or at > self._newest[name][0]

    def keep(self, store: Store) -> Path | None:
        """Write the bundles and the receipt into `store`.

        Returns the path beside which they were written, None if no receipt is signed.
        """
        if not self.has_receipt:
            return None
        place = store.folder("attested", self.digest.partition(":")[2]) / "image"
        write_beside(receipt_path(place), json.dumps(self._newest[""][1]))
        for name in PREDICATES:
            path = bundle_path(place, name)
            path.unlink(missing_ok=True)
            if name in self._newest:
                write_beside(path, self._newest[name][2].decode())
        return place


@dataclass(frozen=True, slots=True)
class _Attached:
    """A referrer, the time when it was attached (0 if unknown), and its blob if it is large and read later."""

    at: float
    row: Descriptor
    layer: Descriptor | None = None


def add_attached(bundles: SignedBundles, registry: Registry, store: Store) -> None:
    """Add to `bundles` the bundles that are attached to its image in `registry`, beginning with the newest.

    Everybody with write access to the repository may attach bundles with any date. Bundles without a trusted signature
    are therefore read up to the limits above, and ignored. Logs when there are more. Raises BuildError when the
    registry fails, or when it lacks a bundle and no other is a receipt.
    """
    rows, cut = referrers(registry, bundles.digest, BUNDLE)
    latest = time.time() + CLOCK_S
    attached = [_Attached(_seconds(row.annotations.get(_CREATED)), row) for row in rows]
    # A date of the future is no signer's, and must not come before theirs.
    attached = [item if item.at <= latest else replace(item, at=0.0) for item in attached]
    waiting = deque(sorted(attached, key=lambda item: -item.at))
    missing: list[BuildError] = []
    read = size = 0

    def fetch(item: _Attached, stop: threading.Event) -> bytes | _Attached:
        try:
            layer = item.layer or referrer_layer(registry, item.row, BUNDLE, MOST)
            if item.layer is None and layer.size > _SMALL:
                return replace(item, layer=layer)
            registry.fetch_blob(layer, store.blobs, lambda _: None, stop)
            return store.blobs.read(layer.digest)
        except ValueError:
            return b""
        except MissingContent as error:
            missing.append(error)
            return b""

    while waiting:
        batch = [waiting.popleft() for _ in range(min(_AT_ONCE, len(waiting)))]
        batch = [attached for attached in batch if bundles.needs(attached.row.annotations.get(_KIND), attached.at)]
        if batch and (read >= _MOST_READ or size >= _MOST_BYTES):
            cut = True
            break
        for waiting_item, got in zip(batch, each(batch, fetch, _AT_ONCE), strict=True):
            if isinstance(got, _Attached):
                waiting.append(got)
            else:
                read, size = read + 1, size + waiting_item.row.size + len(got)
                bundles.add(got, waiting_item.at)
    if cut:
        log(
            f"{registry.reference.name}@{bundles.digest}: it has too many attestations; only {read} were read, "
            "those with the latest dates. Delete those that do not belong to it"
        )
    if missing and not bundles.has_receipt:
        raise missing[0]


def _seconds(text: object) -> float:
    """Return the seconds since 1970 at the time `text` (ISO 8601), 0 for any other value."""
    try:
        at = datetime.fromisoformat(str(text))
        return max((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(), 0.0)
    except (ValueError, OverflowError):
        return 0.0
