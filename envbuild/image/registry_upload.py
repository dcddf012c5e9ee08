"""Upload of blobs to a registry, with resume, and mounting of those that another repository has.

Source: OCI distribution specification 1.1, "Pushing blobs" (POST begins an upload, PATCH adds a chunk, GET returns the
number of bytes received, PUT ends the upload, with or without the complete content) and "Mounting a blob from another
repository".
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from envbuild.base.errors import BuildError
from envbuild.base.progress import OnProgress
from envbuild.cache.download import PROGRESS
from envbuild.cache.http import BLOCK, RequestFailed, Stopped, TooSlow, pause
from envbuild.image.model import Descriptor
from envbuild.image.registry_endpoint import Endpoint

if TYPE_CHECKING:
    import requests

CHUNK = 16 << 20
# Statuses from registries that do not support chunks, or must not accept them.
_NO_CHUNKS = frozenset({400, 403, 404, 405, 411, 413, 415, 416, 501})
_OCTETS = "application/octet-stream"


def has_blob(endpoint: Endpoint, digest: str, stop: threading.Event) -> bool:
    """Return whether the repository has the blob. Raises RequestFailed."""
    with endpoint.request("HEAD", endpoint.url(f"blobs/{digest}"), stop, push=True, ok=(200, 404)) as answer:
        return answer.status_code == 200


def mount(endpoint: Endpoint, digest: str, source: str, stop: threading.Event) -> bool:
    """Mount a blob of the repository `source`; return False when the registry does not. Raises RequestFailed."""
    url = endpoint.url(f"blobs/uploads/?mount={quote(digest)}&from={quote(source)}")
    try:
        with endpoint.request("POST", url, stop, push=True, mount_from=source, ok=(201, 202)) as answer:
            if answer.status_code == 201:
                return True
            location = endpoint.follow(answer)  # an upload has begun instead
    except RequestFailed as error:
        if error.status in (400, 401, 403, 404, 405):
            return False
        raise
    with contextlib.suppress(RequestFailed):  # the registry discards it after a while
        endpoint.request("DELETE", location, stop, push=True, ok=(204, 202, 200), retries=0).close()
    return False


def push_blob(
    endpoint: Endpoint, blob: Descriptor, path: Path, on_progress: OnProgress, stop: threading.Event, chunk: int = CHUNK
) -> None:
    """Upload the file `path` with the content `blob`, in chunks of `chunk` bytes.

    `on_progress` is called with the number of sent bytes; a negative count takes back bytes that must be sent
    again. Raises RequestFailed, and BuildError when the file's size differs from that in `blob`.
    """
    if (size := path.stat().st_size) != blob.size:
        raise BuildError(f"{path}: has {size} bytes, not {blob.size}: it changed")
    _Upload(endpoint, blob, path, on_progress, stop, chunk).run()


@dataclass
class _Upload:
    endpoint: Endpoint
    blob: Descriptor
    path: Path
    on_progress: OnProgress
    stop: threading.Event
    chunk: int
    location: str = ""  # "" before an upload has begun
    offset: int = 0  # bytes that the registry has
    reported: int = 0  # bytes given to `on_progress`
    unsure: bool = False  # the last request was interrupted: the registry's offset is unknown
    troubled: bool = False  # some request was interrupted
    refusals: int = 0  # uploads that the registry has discarded
    whole: bool = False  # send the blob in one piece: the registry accepts no chunks
    done: bool = False

    def __post_init__(self) -> None:
        self._request = partial(self.endpoint.request, stop=self.stop, push=True, retries=0)

    def run(self) -> None:
        """Upload the blob. The count of retries restarts when the registry has PROGRESS bytes more than before.

        That of requests which were too slow does not.
        """
        most, tries, slow = 0, 0, 0
        while not self.done:
            try:
                self._step()
            except RequestFailed as error:
                if self._in_another_way(error):
                    continue
                tries += 1
                slow += isinstance(error, TooSlow)
                if max(tries, slow) > self.endpoint.retries:
                    raise
                pause(tries - 1, error, self.stop)
            if self.offset >= most + PROGRESS:
                most, tries = self.offset, 0

    def _step(self) -> None:
        if not self.location:
            self._begin()
        elif self.unsure:
            self._ask()
        elif self._is_last():
            self._finish()
        else:
            self._send_chunk()

    def _is_last(self) -> bool:
        """Return whether the next request is the last: all bytes are sent, or the blob goes in one piece."""
        small = self.offset == 0 and self.blob.size <= self.chunk
        return self.whole or small or self.offset == self.blob.size

    def _in_another_way(self, error: RequestFailed) -> bool:
        """Recover from `error`, or raise it. Return True to go on at once, uncounted: without chunks."""
        if self.location and error.transient:
            self.unsure = self.troubled = True
        elif error.transient:
            pass
        elif self.unsure:  # unknown to the registry: complete, or lost
            self.done = has_blob(self.endpoint, self.blob.digest, self.stop)
            self._give_up(self.blob.size if self.done else 0)
        elif not self.location:
            raise error
        elif not (self._is_last() or self.offset or self.troubled) and error.status in _NO_CHUNKS:
            self.whole = True
            self._give_up()
            return True
        elif (self.troubled or self.offset) and not self.whole and error.status in (400, 404, 416):
            self.refusals += 1
            self.whole = self.refusals > 1
            self._give_up()
        else:
            raise error
        return False

    def _give_up(self, counted: int = 0) -> None:
        self.location, self.offset, self.unsure = "", 0, False
        self._tell(counted)

    def _begin(self) -> None:
        url = self.endpoint.url("blobs/uploads/")
        with self._request("POST", url, ok=(202,)) as answer:
            self.location = self.endpoint.follow(answer)
            least = answer.headers.get("OCI-Chunk-Min-Length", "")
            self.chunk = max(self.chunk, int(least[:18]) if least.isdecimal() else 1)

    def _ask(self) -> None:
        with self._request("GET", self.location, ok=(204, 200, 202)) as answer:
            offset = _received(answer.headers.get("Range"), 0)
            self._moved_to(answer)
        if offset > self.blob.size or (self.whole and offset):
            self._give_up()
            return
        self.offset, self.unsure = offset, False
        self._tell(offset)

    def _send_chunk(self) -> None:
        start, end = self.offset, min(self.offset + self.chunk, self.blob.size)
        headers = {"Content-Type": _OCTETS, "Content-Range": f"{start}-{end - 1}"}
        part, ok = _Part(self, start, end), (202, 200, 201, 204)
        with self._request("PATCH", self.location, ok=ok, headers=headers, body=part) as answer:
            offset = _received(answer.headers.get("Range"), end)
            self._moved_to(answer)
        if not start < offset <= end:
            raise RequestFailed(f"it says that it has {offset} bytes after {end} were sent", transient=True)
        self.offset = offset
        self._tell(offset)

    def _finish(self) -> None:
        url = self.location + ("&" if "?" in self.location else "?")
        url += f"digest={quote(self.blob.digest)}"
        body = _Part(self, 0, self.blob.size) if self.offset < self.blob.size else b""
        headers = {"Content-Type": _OCTETS}
        self._request("PUT", url, ok=(201, 200, 202, 204), headers=headers, body=body).close()
        self.done = True

    def _moved_to(self, answer: requests.Response) -> None:
        """Update the upload's URL, which may change with each response."""
        if answer.headers.get("Location"):
            self.location = self.endpoint.follow(answer)

    def _tell(self, offset: int) -> None:
        if offset != self.reported:
            self.on_progress(offset - self.reported)
            self.reported = offset


@dataclass
class _Part:
    """A request body: the bytes of a file from `start` up to `end`."""

    upload: _Upload
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[bytes]:
        upload, at = self.upload, self.start
        with upload.path.open("rb") as stream:
            stream.seek(at)
            while at < self.end:
                if upload.stop.is_set():
                    raise Stopped
                block = stream.read(min(BLOCK, self.end - at))
                if not block:
                    raise BuildError(f"{upload.path}: shrank while it was uploaded")
                yield block
                at += len(block)
                upload._tell(at)


def _received(header: str | None, otherwise: int) -> int:
    """Return the bytes of an upload's Range header; `0-0`, which registries also send for none, counts as none."""
    match = re.search(r"0-(\d{1,18})$", header or "", re.ASCII)
    if match is None:
        return otherwise
    return int(match[1]) + 1 if int(match[1]) else 0
