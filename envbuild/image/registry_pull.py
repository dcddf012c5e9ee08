"""Manifests and blobs from a registry or its mirrors: checked, and gone on with where a try was cut.

Source: OCI distribution specification 1.1, "Pull", and RFC 9110 §14 (ranges).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from envbuild.errors import BuildError
from envbuild.file_lock import file_lock
from envbuild.image.blobs import Blobs
from envbuild.image.model import (
    INDEXES,
    MANIFESTS,
    MAX_MANIFEST,
    Descriptor,
    digest_of,
    is_digest,
)
from envbuild.image.registry_endpoint import Endpoint, complain
from envbuild.image.registry_http import BLOCK, blocks, read_all
from envbuild.image.retry import RequestFailed, Stopped, patiently, pause

T = TypeVar("T")
Advance = Callable[[int], None]
_ACCEPT = ", ".join((*MANIFESTS, *INDEXES))


def get_manifest(sources: Sequence[Endpoint], pointer: str, what: str) -> tuple[bytes, str]:
    """The manifest or index that tag or digest `pointer` names, and what the server calls its type.

    Raises BuildError, which says what each of `sources` answered.
    """

    def get(source: Endpoint) -> tuple[bytes, str]:
        return _manifest(source, pointer, threading.Event())

    return _first(sources, get, what)


def head_manifest(sources: Sequence[Endpoint], pointer: str, what: str) -> str | None:
    """The digest of what `pointer` names, None when the registry itself has no such manifest.

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
        # The header may be left out: then the content tells.
        return digest if is_digest(digest) else digest_of(_manifest(source, pointer, stop)[0])

    return _first(sources, head, what)


def fetch_blob(
    sources: Sequence[Endpoint],
    blob: Descriptor,
    blobs: Blobs,
    moved: Advance,
    stop: threading.Event,
    what: str,
) -> Path:
    """The blob's file in `blobs`, fetched from the first of `sources` that serves it right.

    `moved` is told bytes as they come, those of an earlier cut run too, and a negative count for such
    as must come again. Raises BuildError; then what was got is kept for a later run, unless it is wrong.
    """
    wanted = f"{what}: blob {blob.digest}"
    try:
        if blobs.has(blob):
            moved(blob.size)
            return blobs.path(blob.digest)
        with _partial_file(blobs.partial(blob.digest), stop) as (stream, partial):
            if blobs.has(blob):  # another process has got it meanwhile
                moved(blob.size)
                return blobs.path(blob.digest)
            download = _Download(blob, stream, moved, stop)
            try:
                download.take_up()
                _first(sources, download.run, wanted)
                stream.flush()
                blobs.adopt(partial, blob.digest)
            finally:
                if not download.have and blob.size:
                    partial.unlink(missing_ok=True)
        return blobs.path(blob.digest)
    except OSError as error:
        raise BuildError(f"{wanted}: {error.filename or blobs.root}: {error.strerror}") from error


def _first(sources: Sequence[Endpoint], get: Callable[[Endpoint], T], what: str) -> T:
    """What the first source gives that gives anything. The last one is the registry itself."""
    failures = []
    for source in sources:
        try:
            if source.dead is not None:
                raise source.dead
            return get(source)
        except RequestFailed as error:
            failures.append((source, error))
            if error.status is None and not error.passing and source is not sources[-1]:
                source.dead = source.dead or error
    raise complain(what, failures)


def _manifest(source: Endpoint, pointer: str, stop: threading.Event) -> tuple[bytes, str]:
    url = source.url(f"manifests/{pointer}")
    scopes, headers = (source.scope("pull"),), {"Accept": _ACCEPT}

    def get() -> tuple[bytes, str]:  # the body may be cut, too
        with source.request("GET", url, stop, scopes=scopes, headers=headers, retries=0) as answer:
            return read_all(answer, MAX_MANIFEST, stop), answer.headers.get("Content-Type", "")

    raw, media_type = patiently(get, source.retries, stop)
    if is_digest(pointer) and digest_of(raw) != pointer:
        raise Wrong(f"it sent a manifest with digest {digest_of(raw)}")
    return raw, media_type.partition(";")[0].strip()


class Wrong(RequestFailed):
    """Content that is not what was asked for. The server answers, so that it is not dead."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, status=200)


@dataclass
class _Download:
    blob: Descriptor
    stream: BinaryIO
    moved: Advance
    stop: threading.Event
    have: int = 0
    # Whether some of it was got by an earlier run, or from another source.
    inherited: bool = False
    _sha: hashlib._Hash = field(default_factory=hashlib.sha256)

    def take_up(self) -> None:
        """Go on with what an earlier run left."""
        self.stream.seek(0)
        while block := self.stream.read(BLOCK):
            self._note(block)
        if self.have > self.blob.size:
            self._rewind()
        self.inherited = self.have > 0

    def run(self, source: Endpoint) -> None:
        """Fetch the rest from `source`. Tries that bring something new do not count as retries."""
        most, tries = self.have, 0
        while self.have < self.blob.size or not self._is_right():
            try:
                self._receive(source)
            except RequestFailed as error:
                most, tries = (self.have, 0) if self.have > most else (most, tries + 1)
                if not error.passing or tries > source.retries:
                    self.inherited = self.have > 0
                    raise
                pause(tries, error, self.stop)

    def _is_right(self) -> bool:
        """Whether what came is the blob; False when it must come again because old parts may be wrong."""
        digest = "sha256:" + self._sha.hexdigest()
        if digest == self.blob.digest:
            return True
        again = self.inherited
        self._rewind()
        if not again:
            raise Wrong(f"it sent content with digest {digest}")
        return self.blob.size == 0

    def _receive(self, source: Endpoint) -> None:
        headers = {"Range": f"bytes={self.have}-"} if self.have else {}
        url, scopes = source.url(f"blobs/{self.blob.digest}"), (source.scope("pull"),)
        with source.request(
            "GET", url, self.stop, scopes=scopes, ok=(200, 206, 416), headers=headers, retries=0
        ) as answer:
            start, total = _extent(answer.status_code, answer.headers)
            if self.have and start != self.have:
                self._rewind()
                if start != 0:
                    raise RequestFailed("it does not send the rest of the blob", passing=True)
            if total not in (None, self.blob.size):
                self._rewind()
                raise Wrong(f"its blob has {total} bytes, not {self.blob.size}")
            for block in blocks(answer, self.stop):
                if self.have + len(block) > self.blob.size:
                    self._rewind()
                    raise Wrong(f"it sent more than the blob's {self.blob.size} bytes")
                self.stream.write(block)
                self._note(block)
        if self.have < self.blob.size:
            text = f"its answer ended after {self.have} of {self.blob.size} bytes"
            raise RequestFailed(text, passing=True)

    def _note(self, block: bytes) -> None:
        self._sha.update(block)
        self.have += len(block)
        self.moved(len(block))

    def _rewind(self) -> None:
        self.stream.seek(0)
        self.stream.truncate()
        self.moved(-self.have)
        self.have, self.inherited, self._sha = 0, False, hashlib.sha256()


def _extent(status: int, headers: Any) -> tuple[int | None, int | None]:
    """Where the content of an answer starts, and how large the whole is; None for what it does not say."""
    if status == 416:
        return None, None
    if status == 200:
        length = headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    match = re.match(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
    if match is None:
        return None, None
    return int(match[1]), int(match[2]) if match[2] != "*" else None


@contextlib.contextmanager
def _partial_file(path: Path, stop: threading.Event) -> Iterator[tuple[BinaryIO, Path]]:
    """A partial file, locked for this download; where there are no locks, a private one."""

    def pause(seconds: float) -> None:
        if stop.wait(seconds):
            raise Stopped

    with file_lock(path, pause=pause) as held:
        if not held:
            path = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
            path.touch()
        with path.open("r+b") as stream:
            yield stream, path
