"""Upload of an image's blobs and manifest to a registry. A blob that the registry has is not sent.

Source: OCI distribution specification 1.1, "Push" and "Mounting a blob from another repository".
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from envbuild.cache.retry import RequestFailed
from envbuild.errors import BuildError
from envbuild.image.blobs import Blobs
from envbuild.image.model import Descriptor, digest_of
from envbuild.image.registry_endpoint import Endpoint, complain
from envbuild.image.registry_upload import has_blob, push_blob
from envbuild.progress import OnProgress
from envbuild.workers import each

_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result of a push.

    It counts the blobs that were uploaded (with their bytes), mounted from other repositories, and present before.
    """

    uploaded_bytes: int
    uploaded: int
    mounted: int
    present: int


def mount(endpoint: Endpoint, digest: str, source: str, stop: threading.Event) -> bool:
    """Mount the blob from the repository `source` of the same registry.

    Returns False when the registry does not mount it. Raises RequestFailed.
    """
    scopes = (endpoint.scope("pull,push"), endpoint.scope("pull", source))
    url = endpoint.url(f"blobs/uploads/?mount={quote(digest)}&from={quote(source)}")
    try:
        with endpoint.request("POST", url, stop, scopes=scopes, ok=(201, 202)) as answer:
            if answer.status_code == 201:
                return True
            location = endpoint.follow(answer)  # an upload has begun instead
    except RequestFailed as error:
        if error.status in (400, 401, 403, 404, 405):
            return False
        raise
    ok = (204, 202, 200)
    with contextlib.suppress(RequestFailed):  # the registry discards it after a while
        endpoint.request("DELETE", location, stop, scopes=scopes[:1], ok=ok, retries=0).close()
    return False


def put_manifest(endpoint: Endpoint, raw: bytes, media_type: str, pointer: str, stop: threading.Event) -> str:
    """Publish a manifest or index under the tag or digest `pointer`, and return its digest.

    Raises RequestFailed.
    """
    with endpoint.request(
        "PUT",
        endpoint.url(f"manifests/{pointer}"),
        stop,
        scopes=(endpoint.scope("pull,push"),),
        ok=(201, 200, 202, 204),
        headers={"Content-Type": media_type},
        body=lambda: raw,
    ) as answer:
        digest = digest_of(raw)
        if answer.headers.get("Docker-Content-Digest", digest) != digest:
            raise RequestFailed(f"it took the manifest {digest} for another one", status=200)
        return digest


def push(
    endpoint: Endpoint,
    blobs: Blobs,
    descriptors: Sequence[Descriptor],
    mount_from: Sequence[str],
    on_progress: OnProgress,
    what: str,
) -> Pushed:
    """Make every blob of `descriptors` present in the repository, several in parallel. Raises BuildError."""
    unique = list({blob.digest: blob for blob in descriptors}.values())

    def bring(blob: Descriptor, stop: threading.Event) -> str:
        try:
            if has_blob(endpoint, blob.digest, stop):
                how = "present"
            elif any(mount(endpoint, blob.digest, source, stop) for source in mount_from):
                how = "mounted"
            else:
                push_blob(endpoint, blob, blobs.path(blob.digest), on_progress, stop)
                return "uploaded"
        except RequestFailed as error:
            raise complain(f"{what}: pushing blob {blob.digest}", [(endpoint, error)]) from None
        except OSError as error:
            raise BuildError(f"{blobs.path(blob.digest)}: {error.strerror}") from error
        on_progress(blob.size)
        return how

    ways = each(unique, bring, _WORKERS)
    sent = sum(blob.size for blob, way in zip(unique, ways, strict=True) if way == "uploaded")
    return Pushed(sent, ways.count("uploaded"), ways.count("mounted"), ways.count("present"))
