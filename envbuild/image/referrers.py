"""Files that a registry keeps with an image: OCI artifacts whose `subject` is the image.

Source: OCI distribution specification 1.1, "Listing Referrers" and "Referrers Tag Schema": a registry without the
referrers API keeps an index of them under a tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from envbuild.base.files import parse_json
from envbuild.base.packages import digest_of
from envbuild.cache.retry import NotFound, RequestFailed
from envbuild.image.blobs import Blobs
from envbuild.image.model import EMPTY, MAX_MANIFEST, OCI_INDEX, OCI_MANIFEST, Descriptor, canonical, is_digest
from envbuild.image.registry import Registry, manifest_of, pages
from envbuild.image.registry_endpoint import complain

# Bytes of a list. A row has below 1 kB, and those of others come first: a low limit would hide what is looked for.
_MOST_LISTED = 64 << 20
# Answers of registries that do not know the API.
_UNKNOWN = (400, 404, 405, 406, 501)


def attach(registry: Registry, digest: str, kind: str, content: bytes, notes: Mapping[str, str], blobs: Blobs) -> str:
    """Push `content`, of the media type `kind`, as a referrer of the manifest `digest`; return its own digest.

    `notes` are annotations. Raises BuildError.
    """
    raw, media_type = registry.manifest(digest)
    layer = Descriptor(kind, blobs.add(content), len(content))
    blobs.add(b"{}")
    manifest = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": kind,
            "config": EMPTY.as_json(),
            "layers": [layer.as_json()],
            "subject": Descriptor(media_type, digest, len(raw)).as_json(),
            "annotations": dict(notes),
        }
    )
    made = digest_of(manifest)
    pushed = registry.push(blobs, [EMPTY, layer], manifest, OCI_MANIFEST, made)
    if not pushed.lists_referrers:
        tag = _tag(digest)
        index = _tagged(registry, tag) or {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
        row = {**Descriptor(OCI_MANIFEST, made, len(manifest)).as_json(), "artifactType": kind}
        row["annotations"] = dict(notes)
        # Rows of others stay as they are, also those that envbuild cannot read.
        others = [one for one in index["manifests"] if not (isinstance(one, dict) and one.get("digest") == made)]
        registry.put_manifest(canonical({**index, "manifests": [*others, row]}), OCI_INDEX, tag)
    return made


def referrers(registry: Registry, digest: str, kind: str) -> tuple[list[Descriptor], bool]:
    """Return the manifests of the artifact type `kind` that the registry keeps with the manifest `digest`.

    Annotations are included. The second value is whether the list was too long to be read to its end. Raises
    BuildError.
    """
    found: list[Descriptor] = []
    size = 0
    try:
        for raw, headers in pages(registry.endpoint, f"referrers/{digest}?artifactType={quote(kind, safe='/')}"):
            size += len(raw)
            filtered = "artifactType" in headers.get("OCI-Filters-Applied", "")
            found += _of_kind(_index(raw)["manifests"], kind, filtered=filtered)
            if size > _MOST_LISTED:
                return found, True
    except RequestFailed as error:
        if error.status not in _UNKNOWN:
            what = f"what is attached to {registry.reference.name}@{digest}"
            raise complain(what, [(registry.endpoint, error)]) from None
        found = _of_kind((_tagged(registry, _tag(digest)) or {"manifests": []})["manifests"], kind)
    return list({one.digest: one for one in found}.values()), False


def _of_kind(rows: list[Any], kind: str, *, filtered: bool = False) -> list[Descriptor]:
    """Return those of `rows` with the artifact type `kind`; a `filtered` list has no others, and may not name it."""
    found = []
    for row in rows:
        if not isinstance(row, dict):
            continue
        digest, size, notes = str(row.get("digest")), row.get("size"), row.get("annotations")
        fits = row.get("artifactType", kind if filtered else None) == kind
        if fits and is_digest(digest) and type(size) is int and size <= MAX_MANIFEST:
            strings = {k: v for k, v in notes.items() if isinstance(v, str)} if isinstance(notes, dict) else {}
            found.append(Descriptor(OCI_MANIFEST, digest, size, annotations=strings))
    return found


def referrer_layer(registry: Registry, referrer: Descriptor, kind: str, most: int) -> Descriptor:
    """Return the blob of a referrer. Raises ValueError if it is not of `kind` and `most` bytes, and BuildError."""
    raw, _ = registry.manifest(referrer.digest)
    try:
        (layer,) = parse_json(raw)["layers"]
        blob = Descriptor(layer["mediaType"], str(layer["digest"]), layer["size"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"its manifest is another one: {error!r:.80}") from error
    fits = blob.media_type == kind and is_digest(blob.digest) and type(blob.size) is int
    if not fits or not 0 <= blob.size <= most:
        raise ValueError(f"its layer is {layer!r:.80}")
    return blob


def _tag(digest: str) -> str:
    return digest.replace(":", "-")


def _tagged(registry: Registry, tag: str) -> dict[str, Any] | None:
    """Return the index under the tag `tag`, None if there is none."""
    try:
        return _index(manifest_of(registry.endpoint, tag)[0])
    except NotFound:
        return None
    except RequestFailed as error:
        raise complain(f"{registry.reference.name}:{tag}", [(registry.endpoint, error)]) from None


def _index(raw: bytes) -> dict[str, Any]:
    try:
        index = parse_json(raw)
    except ValueError:
        index = None
    if not isinstance(index, dict) or not isinstance(index.get("manifests"), list):
        raise RequestFailed("it sent no list of referrers", answered=True)
    return index
