"""Download of one file with resume (RFC 9110 §14); its digest is checked while the data arrive."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from envbuild.base.atomic import file_lock
from envbuild.base.files import open_known
from envbuild.base.progress import OnProgress
from envbuild.cache.http import BLOCK, Mismatch, RequestFailed, Stopped, TooSlow, blocks, pause

if TYPE_CHECKING:
    import requests

# Sends a GET with the given headers; returns a response whose status is one of ANSWERS.
Ask = Callable[[Mapping[str, str]], "requests.Response"]
ANSWERS = (200, 206, 416)
_NUMBER = r"\d{1,18}"
# New bytes of an attempt that is no failure: a server may send one byte in each.
PROGRESS = 1 << 16
# Bytes of a file whose size nobody stated: a server may send for ever.
_MOST = 1 << 37


@contextlib.contextmanager
def locked_partial(path: Path, stop: threading.Event) -> Iterator[Path]:
    """Yield the partial file `path`, locked for this download, or a private file name if locks are not supported."""

    def wait(seconds: float) -> None:
        if stop.wait(seconds):
            raise Stopped

    lock = path.with_suffix(".lock")
    with file_lock(lock, pause=wait, remove=True) as held:
        if not held:
            path = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        for used in (lock, path):  # new timestamps: clean_stale must not remove files in use
            with contextlib.suppress(OSError):
                os.utime(used)
        yield path


@contextlib.contextmanager
def open_download(
    partial: Path,
    hashes: frozenset[str],
    size: int | None,
    on_progress: OnProgress,
    stop: threading.Event,
    *,
    exact: bool = True,
) -> Iterator[Download]:
    """Yield a download into the file `partial` that continues an earlier one; remove the file if it stays empty.

    `on_progress` receives the number of bytes as they arrive, including those of an earlier run, and a negative number
    when bytes must be downloaded again. Raises OSError when `partial` cannot be written.
    """
    with open(partial, "a+b", opener=open_known) as stream:
        download = Download(stream, hashes, size, exact, on_progress, stop)
        try:
            download.resume()
            yield download
        finally:
            if not download.received and not download.is_complete:
                partial.unlink(missing_ok=True)


@dataclass
class Download:
    """An unfinished download. `hashes` are the accepted sha256 digests (hex), `size` is in bytes, None if unknown.

    A response of more than `size` bytes is rejected. With `exact`, a shorter one is rejected as well, and a body
    that ends early is retried; without it, only the digest decides. `inherited` is whether some of the data came from
    an earlier run or another source.
    """

    stream: BinaryIO
    hashes: frozenset[str]
    size: int | None
    exact: bool
    on_progress: OnProgress
    stop: threading.Event
    received: int = 0
    inherited: bool = False
    _sha: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def is_complete(self) -> bool:
        """Whether the data received so far have an accepted digest."""
        return self._sha.hexdigest() in self.hashes

    def resume(self) -> None:
        """Read the data that an earlier run left."""
        self.stream.seek(0)
        while block := self.stream.read(BLOCK):
            self._note(block)
        if self.size is not None and self.received > self.size:
            self._rewind()
        self.inherited = self.received > 0

    def run(self, ask: Ask, retries: int) -> str:
        """Fetch the remaining data with `ask`; return the sha256.

        Attempts that deliver PROGRESS do not count as retries, so that a large file does not fail on an unreliable
        connection; those that are too slow do. With `retries` 0 there is one attempt. Raises Mismatch when the content
        has none of `hashes`, else RequestFailed; the next source may then continue the download.
        """
        most, tries, slow = self.received, 0, 0
        while not self.is_complete:
            begun = self.received
            try:
                complete = self._receive(ask)
            except RequestFailed as error:
                most, tries = (self.received, 0) if self.received >= most + PROGRESS else (most, tries + 1)
                slow += isinstance(error, TooSlow)
                if not error.transient or not retries or max(tries, slow) > retries:
                    self.inherited = self.received > 0
                    raise
                pause(tries, error, self.stop)
                continue
            if complete and not self.is_complete:
                digest, inherited = self._sha.hexdigest(), self.inherited
                self._rewind()
                if not begun or tries > retries:
                    raise Mismatch(digest)
                # The data come from several responses; the content may have changed in between.
                tries += not inherited
        self.stream.flush()
        return self._sha.hexdigest()

    def _receive(self, ask: Ask) -> bool:
        """Read one response; return False if it does not continue the existing data, which are then dropped."""
        size = self.size
        with ask({"Range": f"bytes={self.received}-"} if self.received else {}) as answer:
            start, total = _extent(answer.status_code, answer.headers)
            if start not in (0, self.received):
                if self.received:
                    self._rewind()
                    return False
                raise RequestFailed("it does not send the rest of the file", transient=True, answered=True)
            if start == 0 and self.received:
                self._rewind()
            if size is not None and total is not None and (total > size or (self.exact and total < size)):
                self._rewind()
                raise RequestFailed(f"its file has {total} bytes, not {size}", status=200)
            most = _MOST if size is None else size
            for block in blocks(answer, self.stop, as_stored=True):
                if self.received + len(block) > most:
                    self._rewind()
                    raise RequestFailed(f"it sent more than {most} bytes", status=200)
                self.stream.write(block)
                self._note(block)
        if self.exact and size is not None and self.received < size:
            text = f"its answer ended after {self.received} of {size} bytes"
            raise RequestFailed(text, transient=True, answered=True)
        return True

    def _note(self, block: bytes) -> None:
        self._sha.update(block)
        self.received += len(block)
        self.on_progress(len(block))

    def _rewind(self) -> None:
        self.stream.seek(0)
        self.stream.truncate()
        self.on_progress(-self.received)
        self.received, self.inherited, self._sha = 0, False, hashlib.sha256()


def _extent(status: int, headers: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return (start, total size) of the content of a response, in bytes; None for a value that it does not state."""
    if status not in (206, 416):
        length = headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    match = re.fullmatch(rf"bytes ({_NUMBER})-{_NUMBER}/({_NUMBER}|\*)", headers.get("Content-Range", ""), re.ASCII)
    if match is None or status == 416:
        return None, None
    return int(match[1]), int(match[2]) if match[2] != "*" else None
