"""Files that a registry keeps with an image: OCI artifacts whose `subject` is the image.

Source: OCI distribution specification 1.1, "Listing Referrers" and "Referrers Tag Schema": a registry without the
referrers API keeps an index of them under a tag.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urljoin

from envbuild.cache.http import read_all
from envbuild.cache.retry import NotFound, RequestFailed
from envbuild.files import parse_json
from envbuild.image.blobs import Blobs
from envbuild.image.model import (
    EMPTY,
    MAX_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    canonical,
    digest_of,
    is_digest,
)
from envbuild.image.registry import Registry, manifest_of
from envbuild.image.registry_endpoint import complain

# A registry that lists more is not read to its end.
_MOST = 256
# Answers of registries that do not know the API.
_UNKNOWN = (400, 404, 405, 406, 501)


def attach(registry: Registry, digest: str, kind: str, content: bytes, notes: Mapping[str, str], blobs: Blobs) -> str:
    """Push `content`, of the media type `kind`, as a referrer of the manifest `digest`; return its own digest.

    `notes` are annotations. Raises BuildError.
    """
    raw, media_type = registry.manifest(digest)
    layer = Descriptor(kind, blobs.add(content), len(content))
    blobs.add(b"{}")
    manifest = canonical({
        "schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": kind, "config": EMPTY.as_json(),
        "layers": [layer.as_json()], "subject": Descriptor(media_type, digest, len(raw)).as_json(),
        "annotations": dict(notes),
    })  # fmt: skip
    made = digest_of(manifest)
    pushed = registry.push(blobs, [EMPTY, layer], manifest, OCI_MANIFEST, made)
    if not pushed.lists_referrers:
        tag = _tag(digest)
        rows = [row for row in _tagged(registry, tag) if row["digest"] != made]
        row = {**Descriptor(OCI_MANIFEST, made, len(manifest)).as_json(), "artifactType": kind}
        row["annotations"] = dict(notes)
        index = canonical({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [*rows, row]})
        registry.put_manifest(index, OCI_INDEX, tag)
    return made


def referrers(registry: Registry, digest: str, kind: str) -> list[Descriptor]:
    """Return what the registry keeps with the manifest `digest`: manifests with the artifact type `kind`.

    Annotations are included. Raises BuildError.
    """
    rows: list[dict[str, Any]] = []
    url = registry.endpoint.url(f"referrers/{digest}?artifactType={quote(kind, safe='/')}")
    try:
        while url and len(rows) < _MOST:
            with registry.endpoint.request("GET", url, threading.Event()) as answer:
                rows += _rows(read_all(answer, MAX_MANIFEST, threading.Event()))
                after = answer.links.get("next", {}).get("url")
                url = urljoin(answer.url, after) if after else ""
    except RequestFailed as error:
        if error.status not in _UNKNOWN:
            what = f"what is attached to {registry.reference.name}@{digest}"
            raise complain(what, [(registry.endpoint, error)]) from None
        rows = _tagged(registry, _tag(digest))
    found = []
    for row in rows[:_MOST]:
        size, notes = row.get("size"), row.get("annotations")
        if row.get("artifactType") == kind and type(size) is int and size <= MAX_MANIFEST:
            strings = {k: v for k, v in notes.items() if isinstance(v, str)} if isinstance(notes, dict) else {}
            found.append(Descriptor(OCI_MANIFEST, row["digest"], size, annotations=strings))
    return found


def read_referrer(registry: Registry, referrer: Descriptor, kind: str, most: int, blobs: Blobs) -> bytes:
    """Return the content of a referrer. Raises ValueError if it is not of `kind` and `most` bytes, and BuildError."""
    raw, _ = registry.manifest(referrer.digest)
    try:
        (layer,) = parse_json(raw)["layers"]
        blob = Descriptor(layer["mediaType"], str(layer["digest"]), layer["size"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its manifest is another one: {error!r:.80}") from error
    if blob.media_type != kind or not is_digest(blob.digest) or type(blob.size) is not int or blob.size > most:
        raise ValueError(f"its layer is {layer!r:.80}")
    registry.fetch_blob(blob, blobs, lambda _: None)
    return blobs.read(blob.digest)


def _tag(digest: str) -> str:
    return digest.replace(":", "-")


def _tagged(registry: Registry, tag: str) -> list[dict[str, Any]]:
    """Return the rows of the index under the tag `tag`."""
    try:
        return _rows(manifest_of(registry.endpoint, tag)[0])
    except NotFound:
        return []
    except RequestFailed as error:
        raise complain(f"{registry.reference.name}:{tag}", [(registry.endpoint, error)]) from None


def _rows(raw: bytes) -> list[dict[str, Any]]:
    try:
        rows = parse_json(raw)["manifests"]
        return [row for row in rows if isinstance(row, dict) and is_digest(str(row.get("digest")))]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestFailed("it sent no list of referrers", answered=True) from None
