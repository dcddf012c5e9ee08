"""Repositories in registries: pull from a registry or its mirrors, push to the registry, and attach files to an image.

Sources: OCI distribution specification 1.1, also "Listing Referrers" and "Referrers Tag Schema" (a registry without the
referrers API keeps an index of them under a tag). This module uses requests directly: oras and python-dxf neither
resume nor check downloads, do not support mirrors, and read credentials from fewer places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from envbuild.base.errors import BuildError, UsageError
from envbuild.base.files import parse_json
from envbuild.base.host import check_disk_space
from envbuild.base.packages import digest_of, is_digest
from envbuild.base.progress import OnProgress
from envbuild.base.workers import each
from envbuild.cache.download import ANSWERS, Download, locked_partial, open_download
from envbuild.cache.http import (
    Mismatch,
    NotFound,
    RequestFailed,
    TooSlow,
    Transport,
    origin,
    read_all,
    split,
    with_retries,
)
from envbuild.image.credentials import Credentials, find_credentials
from envbuild.image.layout import BlobFiles, Blobs
from envbuild.image.model import (
    EMPTY,
    INDEXES,
    MANIFESTS,
    MAX_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    ImageIndex,
    ImageManifest,
    artifact_manifest,
    canonical,
    choose,
    parse,
)
from envbuild.image.reference import DOCKER_HUB, Reference, api_host, parse_reference
from envbuild.image.registry_endpoint import Endpoint, complain
from envbuild.image.registry_upload import has_blob, mount, push_blob

if TYPE_CHECKING:
    import requests

T = TypeVar("T")
_ACCEPT = ", ".join((*MANIFESTS, *INDEXES))
_WORKERS = 4
# Of a list; a registry has 100 rows a page, or more.
_MOST_PAGES = 10_000
# A mirror is an optimization: a failing one must not delay the request to the registry.
_MIRROR_RETRIES = 1


@dataclass(frozen=True, slots=True)
class Pushed:
    """The blobs of a push: uploaded (with their bytes), mounted from other repositories, and present before.

    `lists_referrers` is whether the registry will list the manifest as a referrer of its subject.
    """

    uploaded_bytes: int
    uploaded: int
    mounted: int
    present: int
    lists_referrers: bool = False


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
        return self._first(lambda source: manifest_of(source, pointer), self._named(pointer))

    def image(self, arch: str | None, digest: str | None = None) -> ImageManifest:
        """Return the manifest of the image for `arch`, see `choose`, from the index or manifest `digest`.

        The default is the reference's. Raises BuildError when there is no such image.
        """
        where = str(self.reference)
        raw, media_type = self.manifest(digest)
        document = parse(raw, where, media_type)
        if isinstance(document, ImageIndex):
            raw, media_type = self.manifest(choose(document, arch, where).digest)
            document = parse(raw, where, media_type)
        if not isinstance(document, ImageManifest):
            raise BuildError(f"{where}: an index inside of an index")
        return document

    def fetch_blob(
        self, blob: Descriptor, blobs: Blobs, on_progress: OnProgress, stop: threading.Event | None = None
    ) -> Path:
        """Download a blob with resume, check its digest, and return its path in `blobs`.

        A blob that exists is not downloaded again. `on_progress` is called with the number of received bytes, including
        those of an earlier, interrupted run; a negative count takes back bytes that must be downloaded again. After a
        failure the partial download is kept for a later run, unless it is wrong.
        """
        stop = stop or threading.Event()
        title = f"{self.reference.name}: blob {blob.digest}"
        hashes = frozenset({blob.digest.partition(":")[2]})
        try:
            if not blobs.has(blob):
                with locked_partial(blobs.partial(blob.digest), stop) as file:
                    if not blobs.has(blob):  # another process may have downloaded it in the meantime
                        self._check_space([blob], blobs)
                        with open_download(file, hashes, blob.size, on_progress, stop) as download:
                            self._first(lambda source: download_blob(source, blob.digest, download, stop), title)
                        return blobs.adopt(file, blob.digest)
        except OSError as error:
            raise BuildError(f"{title}: {error.filename or blobs.root}: {error.strerror}") from error
        on_progress(blob.size)
        return blobs.path(blob.digest)

    def fetch_blobs(self, descriptors: Sequence[Descriptor], blobs: Blobs, on_progress: OnProgress) -> list[Path]:
        """Download several blobs in parallel, and return their paths; `on_progress` is called from several threads."""
        unique = list({blob.digest: blob for blob in descriptors}.values())
        self._check_space(unique, blobs)
        each(unique, lambda blob, stop: self.fetch_blob(blob, blobs, on_progress, stop), _WORKERS)
        return [blobs.path(blob.digest) for blob in descriptors]

    def _check_space(self, descriptors: Sequence[Descriptor], blobs: Blobs) -> None:
        """Raise BuildError when the file system of `blobs` has too little space for what it lacks of `descriptors`."""
        if lacking := sum(map(blobs.lacking, descriptors)):
            check_disk_space(blobs.root, lacking)

    def put_manifest(self, raw: bytes, media_type: str, pointer: str) -> bool:
        """Publish a manifest or index, whose blobs the registry has, under the tag or digest `pointer`.

        Returns whether the registry noticed its subject, and so lists it as a referrer.
        """
        url, digest, headers = self.endpoint.url(f"manifests/{pointer}"), digest_of(raw), {"Content-Type": media_type}
        ok, stop = (201, 200, 202, 204), threading.Event()

        def put() -> bool:
            try:
                answer = self.endpoint.request("PUT", url, stop, push=True, ok=ok, headers=headers, body=raw, retries=0)
            except RequestFailed as error:
                # Docker's registry reads its link to a blob half written while another client uploads the same blob.
                error.transient |= "DIGEST_INVALID" in str(error)
                raise
            with answer:
                if answer.headers.get("Docker-Content-Digest", digest) != digest:
                    raise RequestFailed(f"it took the manifest {digest} for another one", status=200)
                return "OCI-Subject" in answer.headers

        try:
            return with_retries(put, self.endpoint.retries, stop)
        except RequestFailed as error:
            raise complain(f"publishing {self._named(pointer)}", [(self.endpoint, error)]) from None

    def push(
        self,
        blobs: Blobs | BlobFiles,
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
        unique = list({blob.digest: blob for blob in descriptors}.values())

        def bring(blob: Descriptor, stop: threading.Event) -> str:
            try:
                if has_blob(self.endpoint, blob.digest, stop):
                    how = "present"
                elif any(mount(self.endpoint, blob.digest, source, stop) for source in mount_from):
                    how = "mounted"
                else:
                    push_blob(self.endpoint, blob, blobs.path(blob.digest), on_progress, stop)
                    return "uploaded"
            except RequestFailed as error:
                action = f"pushing {self._named(pointer)}: pushing blob {blob.digest}"
                raise complain(action, [(self.endpoint, error)]) from None
            except OSError as error:
                raise BuildError(f"{blobs.path(blob.digest)}: {error.strerror}") from error
            on_progress(blob.size)
            return how

        ways = each(unique, bring, _WORKERS)
        listed = self.put_manifest(manifest, media_type, pointer)
        sent = sum(blob.size for blob, way in zip(unique, ways, strict=True) if way == "uploaded")
        return Pushed(sent, ways.count("uploaded"), ways.count("mounted"), ways.count("present"), listed)

    def tags(self) -> list[str]:
        """Return the tags of the repository, none if it does not exist yet."""
        names: list[str] = []
        try:
            for raw, _ in pages(self.endpoint, "tags/list"):
                names += parse_json(raw)["tags"] or []
        except NotFound:
            pass
        except (RequestFailed, ValueError, KeyError, TypeError) as error:
            failed = error if isinstance(error, RequestFailed) else RequestFailed("it sent no list of tags")
            raise complain(f"the tags of {self.reference.name}", [(self.endpoint, failed)]) from None
        return [tag for tag in names if isinstance(tag, str)]

    def delete(self, digest: str) -> None:
        """Remove a manifest and all of its tags, if the repository has it."""
        url, ok = self.endpoint.url(f"manifests/{digest}"), (200, 202, 204, 404)
        try:
            self.endpoint.request("DELETE", url, threading.Event(), push=True, ok=ok).close()
        except RequestFailed as error:
            raise complain(f"removing {self._named(digest)}", [(self.endpoint, error)]) from None

    def close(self) -> None:
        """Close the open connections."""
        for endpoint in (*self.mirrors, self.endpoint):
            endpoint.http.close()

    def _first(self, get: Callable[[Endpoint], T], action: str) -> T:
        """Return the result of the first source that succeeds. The last source is the registry itself."""
        failures = []
        for source in (*self.mirrors, self.endpoint):
            try:
                if source.dead is not None:
                    raise source.dead
                return get(source)
            except RequestFailed as error:
                failures.append((source, error))
                useless = error.status is None and not error.transient
                if (useless or isinstance(error, TooSlow)) and source is not self.endpoint:
                    source.dead = source.dead or error
        raise complain(action, failures)

    def _named(self, pointer: str) -> str:
        return f"{self.reference.name}{'@' if ':' in pointer else ':'}{pointer}"


def manifest_of(source: Endpoint, pointer: str) -> tuple[bytes, str]:
    """Return the manifest or index of a tag or digest at `source`, and its media type. Raises RequestFailed."""
    raw, answer = _document(source, source.url(f"manifests/{pointer}"), {"Accept": _ACCEPT})
    if is_digest(pointer) and digest_of(raw) != pointer:
        raise Mismatch(digest_of(raw).removeprefix("sha256:"), "a manifest")
    return raw, answer.headers.get("Content-Type", "").partition(";")[0].strip()


def _document(source: Endpoint, url: str, headers: Mapping[str, str] = {}) -> tuple[bytes, requests.Response]:
    """Return a small answer of `source`, which is asked again as a whole if the body is truncated, and its headers."""
    stop = threading.Event()

    def get() -> tuple[bytes, requests.Response]:
        with source.request("GET", url, stop, headers=headers, retries=0) as answer:
            return read_all(answer, MAX_MANIFEST, stop), answer

    return with_retries(get, source.retries, stop)


def pages(source: Endpoint, path: str) -> Iterator[tuple[bytes, Mapping[str, str]]]:
    """Yield the pages of a list at `source`, and their headers; `path` is below the repository.

    Raises RequestFailed, also for a list without an end, and one that continues on another server.
    """
    url = source.url(path)
    for _ in range(_MOST_PAGES):
        raw, answer = _document(source, url)
        yield raw, answer.headers
        after = answer.links.get("next", {}).get("url")
        if not after:
            return
        url = source.target(answer, after)
        if origin(url) != origin(source.base):
            raise RequestFailed(f"its list continues on another server, {split(url).hostname}", answered=True)
    raise RequestFailed(f"its list has more than {_MOST_PAGES} pages", answered=True)


def download_blob(source: Endpoint, digest: str, download: Download, stop: threading.Event) -> str:
    """Download the blob `digest` from `source`, and return its sha256 (hexadecimal). Raises RequestFailed."""
    get = partial(source.request, "GET", source.url(f"blobs/{digest}"), stop, ok=ANSWERS, retries=0)
    return download.run(lambda headers: get(headers=headers), source.retries)


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
    base, find = f"{scheme}://{api_host(host)}", partial(find_credentials, host, env)
    own = Endpoint(host, base, reference.repository, transport, find, transport.retries)
    return Registry(reference, own, tuple(_mirror(mirror, reference.repository, transport, env) for mirror in mirrors))


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
    return Endpoint(shown, base, where, transport, find, retries)


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
    subject = Descriptor(media_type, digest, len(raw)).as_json()
    manifest = artifact_manifest(kind, [layer.as_json()], subject=subject, annotations=dict(notes))
    made = digest_of(manifest)
    pushed = registry.push(blobs, [EMPTY, layer], manifest, OCI_MANIFEST, made)
    if not pushed.lists_referrers:
        tag = _tag(digest)
        index = _tagged(registry, tag) or {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
        row = {**Descriptor(OCI_MANIFEST, made, len(manifest)).as_json(), "artifactType": kind}
        row["annotations"] = dict(notes)
        # Rows of others stay as they are, also those that envbuild cannot read.
        others = [
            manifest
            for manifest in index["manifests"]
            if not (isinstance(manifest, dict) and manifest.get("digest") == made)
        ]
        registry.put_manifest(canonical({**index, "manifests": [*others, row]}), OCI_INDEX, tag)
    return made


def referrers(registry: Registry, digest: str, kind: str) -> tuple[list[Descriptor], bool]:
    """Return the manifests of the artifact type `kind` that the registry keeps with the manifest `digest`.

    Annotations are included. The second value is whether the list was too long to be read to its end. Raises
    BuildError.
    """
    descriptors: list[Descriptor] = []
    size = 0
    try:
        for raw, headers in pages(registry.endpoint, f"referrers/{digest}?artifactType={quote(kind, safe='/')}"):
            size += len(raw)
            filtered = "artifactType" in headers.get("OCI-Filters-Applied", "")
            descriptors += _of_kind(_index(raw)["manifests"], kind, filtered=filtered)
            if size > _MOST_LISTED:
                return descriptors, True
    except RequestFailed as error:
        if error.status not in _UNKNOWN:
            action = f"what is attached to {registry.reference.name}@{digest}"
            raise complain(action, [(registry.endpoint, error)]) from None
        descriptors = _of_kind((_tagged(registry, _tag(digest)) or {"manifests": []})["manifests"], kind)
    return list({descriptor.digest: descriptor for descriptor in descriptors}.values()), False


def _of_kind(rows: list[Any], kind: str, *, filtered: bool = False) -> list[Descriptor]:
    """Return those of `rows` with the artifact type `kind`; a `filtered` list has no others, and may not name it."""
    descriptors = []
    for row in rows:
        if not isinstance(row, dict):
            continue
        digest, size, notes = str(row.get("digest")), row.get("size"), row.get("annotations")
        fits = row.get("artifactType", kind if filtered else None) == kind
        if fits and is_digest(digest) and type(size) is int and size <= MAX_MANIFEST:
            strings = {k: v for k, v in notes.items() if isinstance(v, str)} if isinstance(notes, dict) else {}
            descriptors.append(Descriptor(OCI_MANIFEST, digest, size, annotations=strings))
    return descriptors


def referrer_layer(registry: Registry, referrer: Descriptor, kind: str, most: int) -> Descriptor:
    """Return the blob of a referrer. Raises ValueError if it is not of `kind` and `most` bytes, and BuildError."""
    raw, _ = registry.manifest(referrer.digest)
    try:
        (layer,) = parse_json(raw)["layers"]
        blob = Descriptor(layer["mediaType"], str(layer["digest"]), layer["size"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"unexpected manifest: {error!r:.80}") from error
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
