"""Download of manifests and blobs from a registry or its mirrors, with resume and a check of their digests.

Source: OCI distribution specification 1.1, "Pull".
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from envbuild.cache.download import ANSWERS, Download, locked_partial, open_download
from envbuild.cache.http import read_all
from envbuild.cache.retry import Mismatch, RequestFailed, with_retries
from envbuild.errors import BuildError
from envbuild.image.blobs import Blobs
from envbuild.image.model import INDEXES, MANIFESTS, MAX_MANIFEST, Descriptor, digest_of, is_digest
from envbuild.image.registry_endpoint import Endpoint, complain
from envbuild.progress import OnProgress

if TYPE_CHECKING:
    import requests

T = TypeVar("T")
_ACCEPT = ", ".join((*MANIFESTS, *INDEXES))


def get_manifest(sources: Sequence[Endpoint], pointer: str, what: str) -> tuple[bytes, str]:
    """Return the manifest or index of the tag or digest `pointer`, and its media type as served.

    Raises BuildError with the answer of each source in `sources`.
    """

    def get(source: Endpoint) -> tuple[bytes, str]:
        return _manifest(source, pointer, threading.Event())

    return _first(sources, get, what)


def head_manifest(sources: Sequence[Endpoint], pointer: str, what: str) -> str | None:
    """Return the digest of the manifest of `pointer`, or None when the registry itself has no such manifest.

    Raises BuildError when no source answers.
    """

    def head(source: Endpoint) -> str | None:
        stop = threading.Event()
        scopes, headers = (source.scope("pull"),), {"Accept": _ACCEPT}
        url = source.url(f"manifests/{pointer}")
        ok = (200, 404) if source is sources[-1] else (200,)
        with source.request("HEAD", url, stop, scopes=scopes, ok=ok, headers=headers) as answer:
            if answer.status_code == 404:
                return None
            digest = answer.headers.get("Docker-Content-Digest", "")
        # The header is optional; without it, compute the digest from the content.
        return digest if is_digest(digest) else digest_of(_manifest(source, pointer, stop)[0])

    return _first(sources, head, what)


def fetch_blob(
    sources: Sequence[Endpoint],
    blob: Descriptor,
    blobs: Blobs,
    on_progress: OnProgress,
    stop: threading.Event,
    what: str,
) -> Path:
    """Download a blob from the first of `sources` that serves it correctly, and return its path in `blobs`.

    `on_progress` is called with the number of received bytes, including those of an earlier, interrupted run; a
    negative count takes back bytes that must be downloaded again. Raises BuildError; the partial download is
    then kept for a later run, unless it is wrong.
    """
    wanted = f"{what}: blob {blob.digest}"
    hashes = frozenset({blob.digest.partition(":")[2]})
    try:
        if not blobs.has(blob):
            with locked_partial(blobs.partial(blob.digest), stop) as partial:
                if not blobs.has(blob):  # another process may have downloaded it in the meantime
                    with open_download(partial, hashes, blob.size, on_progress, stop) as download:
                        _first(sources, lambda one: _download(one, blob, download, stop), wanted)
                    return blobs.adopt(partial, blob.digest)
    except OSError as error:
        raise BuildError(f"{wanted}: {error.filename or blobs.root}: {error.strerror}") from error
    on_progress(blob.size)
    return blobs.path(blob.digest)


def _download(source: Endpoint, blob: Descriptor, download: Download, stop: threading.Event) -> str:
    url, scopes = source.url(f"blobs/{blob.digest}"), (source.scope("pull"),)

    def ask(headers: Mapping[str, str]) -> requests.Response:
        return source.request("GET", url, stop, scopes=scopes, ok=ANSWERS, headers=headers, retries=0)

    return download.run(ask, source.retries)


def _first(sources: Sequence[Endpoint], get: Callable[[Endpoint], T], what: str) -> T:
    """Return the result of the first source that succeeds. The last source is the registry itself."""
    failures = []
    for source in sources:
        try:
            if source.dead is not None:
                raise source.dead
            return get(source)
        except RequestFailed as error:
            failures.append((source, error))
            if error.status is None and not error.transient and source is not sources[-1]:
                source.dead = source.dead or error
    raise complain(what, failures)


def _manifest(source: Endpoint, pointer: str, stop: threading.Event) -> tuple[bytes, str]:
    url = source.url(f"manifests/{pointer}")
    scopes, headers = (source.scope("pull"),), {"Accept": _ACCEPT}

    def get() -> tuple[bytes, str]:  # retried as a whole, because the body may be truncated, too
        with source.request("GET", url, stop, scopes=scopes, headers=headers, retries=0) as answer:
            return read_all(answer, MAX_MANIFEST, stop), answer.headers.get("Content-Type", "")

    raw, media_type = with_retries(get, source.retries, stop)
    if is_digest(pointer) and digest_of(raw) != pointer:
        raise Mismatch(hashlib.sha256(raw).hexdigest(), "a manifest")
    return raw, media_type.partition(";")[0].strip()
