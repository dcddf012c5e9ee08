"""Repositories in registries: pull from a registry or its mirrors, and push to the registry.

This module uses requests directly: oras and python-dxf neither resume nor check downloads, do not support mirrors, and
read credentials from fewer places.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from envbuild.cache.http import HttpClient, Transport
from envbuild.cache.retry import RequestFailed
from envbuild.errors import UsageError
from envbuild.image import registry_pull, registry_push, registry_upload
from envbuild.image.blobs import Blobs
from envbuild.image.credentials import Credentials, find_credentials
from envbuild.image.model import Descriptor
from envbuild.image.reference import DOCKER_HUB, Reference, api_host, parse_reference
from envbuild.image.registry_auth import Login
from envbuild.image.registry_endpoint import Endpoint, complain
from envbuild.image.registry_push import Pushed
from envbuild.image.registry_upload import CHUNK
from envbuild.progress import OnProgress
from envbuild.workers import each

_WORKERS = 4
# A mirror is an optimization: a failing one must not delay the request to the registry.
_MIRROR_RETRIES = 1


@dataclass(frozen=True)
class Registry:
    """The repository of `reference`: pulls try `mirrors` in order, then `endpoint`; pushes use `endpoint`.

    Every method raises BuildError when a request fails, and RecipeError or HostError when credentials cannot be read.
    Tags and digests refer to this repository.
    """

    reference: Reference
    endpoint: Endpoint
    mirrors: tuple[Endpoint, ...] = ()

    def manifest(self, pointer: str | None = None) -> tuple[bytes, str]:
        """Return the manifest or index of `pointer`, and its media type as served.

        `pointer` is a tag or a digest, by default that of the reference. A manifest requested by digest is checked; for
        a tag the source's response is trusted.
        """
        pointer = pointer or self.reference.pointer
        return registry_pull.get_manifest(self._sources, pointer, self._named(pointer))

    def head_manifest(self, pointer: str | None = None) -> str | None:
        """Return the digest of the manifest of a tag or digest, by default the reference's.

        Returns None when the registry has no such manifest.
        """
        pointer = pointer or self.reference.pointer
        return registry_pull.head_manifest(self._sources, pointer, self._named(pointer))

    def fetch_blob(self, blob: Descriptor, blobs: Blobs, on_progress: OnProgress) -> Path:
        """Download a blob with resume, check its digest, and return its path in `blobs`.

        A blob that exists is not downloaded again. `on_progress` is called with the number of received bytes; a
        negative count takes back bytes that must be downloaded again.
        """
        return self._fetch(blob, threading.Event(), blobs=blobs, on_progress=on_progress)

    def fetch_blobs(self, wanted: Sequence[Descriptor], blobs: Blobs, on_progress: OnProgress) -> list[Path]:
        """Download several blobs in parallel, and return their paths; `on_progress` is called from several threads."""
        unique = list({blob.digest: blob for blob in wanted}.values())
        each(unique, partial(self._fetch, blobs=blobs, on_progress=on_progress), _WORKERS)
        return [blobs.path(blob.digest) for blob in wanted]

    def has_blob(self, digest: str) -> bool:
        """Return whether the registry itself, not a mirror, has the blob in this repository."""
        with _told(self, f"{self.reference.name}: blob {digest}"):
            return registry_upload.has_blob(self.endpoint, digest, threading.Event())

    def mount(self, digest: str, from_repository: str) -> bool:
        """Mount a blob from another repository of the registry; return False when it must be uploaded instead."""
        with _told(self, f"{self.reference.name}: mounting blob {digest}"):
            stop = threading.Event()
            return registry_push.mount(self.endpoint, digest, from_repository, stop)

    def push_blob(self, blob: Descriptor, path: Path, on_progress: OnProgress, chunk: int = CHUNK) -> None:
        """Upload one blob without asking whether the registry has it. `on_progress` is called as by `fetch_blob`."""
        with _told(self, f"{self.reference.name}: pushing blob {blob.digest}"):
            registry_upload.push_blob(self.endpoint, blob, path, on_progress, threading.Event(), chunk)

    def put_manifest(self, raw: bytes, media_type: str, pointer: str) -> str:
        """Publish a manifest or index whose blobs the registry has, and return its digest."""
        with _told(self, f"publishing {self._named(pointer)}"):
            stop = threading.Event()
            return registry_push.put_manifest(self.endpoint, raw, media_type, pointer, stop)

    def push(
        self,
        blobs: Blobs,
        descriptors: Sequence[Descriptor],
        manifest: bytes,
        media_type: str,
        pointer: str,
        *,
        mount_from: Sequence[str] = (),
        on_progress: OnProgress = lambda _count: None,
    ) -> Pushed:
        """Upload the blobs that the registry lacks, then publish `manifest` under the tag or digest `pointer`.

        Blobs are mounted from `mount_from`, other repositories of the registry, if these have them, and else uploaded,
        several in parallel. `on_progress` is called with the size of every blob, uploaded or not.
        """
        what = f"pushing {self._named(pointer)}"
        pushed = registry_push.push(self.endpoint, blobs, descriptors, mount_from, on_progress, what)
        self.put_manifest(manifest, media_type, pointer)
        return pushed

    def close(self) -> None:
        """Close the open connections."""
        for endpoint in self._sources:
            endpoint.http.close()

    @property
    def _sources(self) -> tuple[Endpoint, ...]:
        return (*self.mirrors, self.endpoint)

    def _fetch(self, blob: Descriptor, stop: threading.Event, *, blobs: Blobs, on_progress: OnProgress) -> Path:
        what = self.reference.name
        return registry_pull.fetch_blob(self._sources, blob, blobs, on_progress, stop, what)

    def _named(self, pointer: str) -> str:
        return f"{self.reference.name}{'@' if ':' in pointer else ':'}{pointer}"


@contextlib.contextmanager
def _told(registry: Registry, what: str) -> Iterator[None]:
    """Turn a RequestFailed inside the block into a BuildError for the user."""
    try:
        yield
    except RequestFailed as error:
        raise complain(what, [(registry.endpoint, error)]) from None


def open_registry(
    image: Reference | str, transport: Transport, env: Mapping[str, str], mirrors: Sequence[str] = ()
) -> Registry:
    """Return the repository of `image`; no request is sent yet.

    `mirrors` are hosts or URLs, tried in order before the registry, for pulls only. A path in a mirror's URL precedes
    the repository's name, as in Harbor, Artifactory and Nexus: mirror.site/hub serves docker.io/library/ubuntu as
    hub/library/ubuntu. Credentials are looked up (find_credentials) for a server's own host when it requires them.
    Raises UsageError when an image or a mirror is invalid.
    """
    reference = parse_reference(image) if isinstance(image, str) else image
    host = reference.registry
    scheme = "http" if transport.is_insecure(host) else "https"
    own = _endpoint(host, f"{scheme}://{api_host(host)}", reference.repository, transport,
                    partial(find_credentials, host, env), transport.retries)  # fmt: skip
    found = [_mirror(mirror, reference.repository, transport, env) for mirror in mirrors]
    return Registry(reference, own, tuple(found))


def _mirror(text: str, repository: str, transport: Transport, env: Mapping[str, str]) -> Endpoint:
    url = text if "://" in text else f"https://{text}"
    try:
        parts = urlsplit(url)
        _ = parts.port  # validates the port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        shown = text.rpartition("@")[2]  # the user part may contain a password
        raise UsageError(f"mirror {shown!r}: neither a host nor a URL", "https://mirror.site/prefix")
    user, at, netloc = parts.netloc.rpartition("@")
    prefix = parts.path.strip("/")
    if prefix == "v2" or prefix.startswith("v2/"):
        prefix = prefix[3:]
    name, _, password = user.partition(":")

    def find() -> Credentials | None:
        if at:
            return Credentials(unquote(name), unquote(password), "", "the mirror's URL")
        return find_credentials(DOCKER_HUB if netloc == api_host(DOCKER_HUB) else netloc, env)

    where = "/".join(filter(None, (prefix, repository)))
    plain = parts.scheme == "http" or transport.is_insecure(netloc)
    base = f"{'http' if plain else 'https'}://{netloc}"
    shown = f"mirror {netloc}" + (f"/{prefix}" if prefix else "")
    retries = min(_MIRROR_RETRIES, transport.retries)
    return _endpoint(shown, base, where, transport, find, retries)


def _endpoint(
    name: str, base: str, repository: str, transport: Transport, find: Callable[[], Credentials | None], retries: int
) -> Endpoint:
    http = HttpClient(transport, plain=base.startswith("http:"))
    return Endpoint(name, base, repository, http, Login(find, http, retries), retries)
