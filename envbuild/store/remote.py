"""Results of builds in a registry: the cache that a team shares (its entries: store/entry.py).

A cache never makes a build fail: what it lacks, and what it has wrong, is made here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.base.atomic import replacing
from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.base.progress import log
from envbuild.base.text import human_size
from envbuild.base.workers import Answer, Workers
from envbuild.cache.http import NotFound, RequestFailed, Stopped
from envbuild.image.layout import BlobFiles
from envbuild.image.model import EMPTY, OCI_MANIFEST, Descriptor
from envbuild.image.registry import Registry, manifest_of
from envbuild.store.entry import FILE_TYPE, CacheEntry, EntryFile, read_entry, render_entry
from envbuild.store.transfer import SLOWEST, Transfer

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

    from envbuild.store.store import Store

# Files up to this size are in the manifest too: one request instead of two.
_INLINE = 4096
_DOWNLOADS, _UPLOADS = 6, 2
# Requests that may fail before the cache is left out of the run.
_FAILURES = 3
_POLL_S = 0.005


@dataclass(slots=True)
class CacheUse:
    """What a run had from the cache and gave to it; `saved_s` is how long others took to make what it had."""

    hits: int = 0
    misses: int = 0
    refused: int = 0
    fetched_bytes: int = 0
    saved_s: float = 0.0
    uploaded: int = 0
    uploaded_bytes: int = 0

    def __str__(self) -> str:
        parts = [f"{self.hits} results fetched, {human_size(self.fetched_bytes)}"] if self.hits else []
        parts += [f"{self.saved_s:.0f} s saved"] if self.saved_s >= 1 else []
        parts += [f"{self.misses} missing"] if self.misses else []
        parts += [f"{self.refused} refused"] if self.refused else []
        parts += [f"{self.uploaded} uploaded, {human_size(self.uploaded_bytes)}"] if self.uploaded else []
        return ", ".join(parts)


@dataclass
class RemoteCache:
    """The cache in the repository of `registry` for results of `store`.

    With `signers`, only entries with a signature of one of these keys are used; `signer` signs those that are written.
    """

    registry: Registry
    store: Store
    reads: bool
    writes: bool
    signers: Sequence[Key] = ()
    signer: Signer | None = None
    use: CacheUse = field(default_factory=CacheUse)

    def __post_init__(self) -> None:
        self._stop, self._lock, self._failures = threading.Event(), threading.Lock(), 0
        self._expected: dict[str, tuple[Transfer, Answer[bool]]] = {}
        self._uploads: list[Answer[None]] = []
        self._downloading, self._uploading, self._sent = Workers(_DOWNLOADS), Workers(_UPLOADS), Transfer()

    def expect(self, entries: Sequence[CacheEntry]) -> None:
        """See `ResultCache`, as of the methods that follow."""
        for entry in entries:
            if self.reads and entry.tag not in self._expected:
                self._expected[entry.tag] = self._begun(entry)

    def bring(self, entry: CacheEntry, *, whole: bool = True) -> bool:
        if not self.reads:
            return False
        self.expect([entry])
        transfer, answer = self._expected[entry.tag]
        if whole:
            del self._expected[entry.tag]
        while not answer.ready() and (whole or not transfer.described):
            if transfer.given_up or (transfer.begun == 0 and self._failures >= _FAILURES):
                return False
            if transfer.is_slow():
                with self._lock:
                    transfer.given_up = True
                why = f"{entry.tag} comes slower than {human_size(SLOWEST)} a second"
                self._failed(RequestFailed(why, answered=True))
                return False
            time.sleep(_POLL_S)
        if transfer.shown and transfer.taken_back:  # what was shown may be of another file
            return False
        return answer.result() if whole else transfer.described

    def bring_part(self, entry: CacheEntry, place: Path, end: int) -> bool:
        transfer, answer = self._expected[entry.tag]
        while transfer.last < end and not (answer.ready() or transfer.given_up or transfer.is_slow()):
            time.sleep(_POLL_S)
        with suppress(OSError):
            # What is counted may be in a buffer still, or come by the download of another process.
            if not answer.ready() and transfer.last >= end and place.stat().st_size >= end:
                transfer.shown = True
                return True
        return False

    def _begun(self, entry: CacheEntry) -> tuple[Transfer, Answer[bool]]:
        transfer = Transfer()
        return transfer, self._downloading.submit(self._fetch, entry, transfer)

    def refuse(self, entry: CacheEntry, why: str = "its files are damaged or those of another entry") -> None:
        log(f"the cache's {entry.tag} is refused: {why}; it is made here")
        with self._lock:
            self.use.refused += 1

    def offer(self, entry: CacheEntry, seconds: float, blobs: Sequence[str] = ()) -> None:
        if self.writes:
            self._uploads.append(self._uploading.submit(self._push, entry, seconds, tuple(blobs)))

    def has(self, entry: CacheEntry) -> bool:
        """Return whether the registry has `entry`, signed as needed. Raises BuildError when the request fails."""
        try:
            raw = self.fetch_manifest(entry.tag)
            return raw is not None and bool(read_entry(raw, entry, self.signers))
        except ValueError:
            return False
        except RequestFailed as error:
            raise BuildError(f"{self.registry.reference.name}:{entry.tag}: {error}") from error

    def flush(self) -> None:
        """Wait until what was made is uploaded, or that takes too long."""
        if all(one.ready() for one in self._uploads):
            return
        log(f"uploading to the cache {self.registry.reference.name}")
        self._sent.start()
        while not all(one.ready() for one in self._uploads):
            if self._sent.is_slow():
                self._failed(RequestFailed(f"uploads are slower than {human_size(SLOWEST)} a second"))
                return
            time.sleep(_POLL_S)

    def close(self, *, wait: bool) -> None:
        """End the transfers; `wait` until what was made is uploaded. Log what the run had from the cache."""
        if wait:
            self.flush()
        self._stop.set()
        for workers in (self._downloading, self._uploading):
            workers.close(0.5)
        self.registry.close()
        if told := str(self.use):
            log(f"cache: {told}")

    def fetch_manifest(self, tag: str) -> bytes | None:
        """Return the manifest of `tag`, None if the registry does not have it. Raises RequestFailed."""
        try:
            return manifest_of(self.registry.endpoint, tag)[0]
        except NotFound:
            return None

    def _fetch(self, entry: CacheEntry, transfer: Transfer) -> bool:
        if self._failures >= _FAILURES or self._stop.is_set():
            return False
        transfer.start()
        try:
            raw = self.fetch_manifest(entry.tag)
            if raw is None:
                self._count(misses=1)
                return False
            files, seconds = read_entry(raw, entry, self.signers)
            # The data of a segment come last: what describes them is used meanwhile.
            for part in (files[1:], files[:1]) if entry.kind == "segment" else (files,):
                transfer.last = 0
                places = [(file, self._received(file, transfer)) for file in part]
                with self._lock:
                    if transfer.given_up:  # it is made meanwhile
                        raise Stopped
                    for file, place in places:
                        self._put(file, place)
                transfer.described = True
        except ValueError as error:
            self.refuse(entry, str(error))
            return False
        except (RequestFailed, BuildError, OSError, Stopped) as error:
            self._failed(error)
            # Without its data, it is none; these are there if it was made meanwhile.
            if transfer.described and not (self.store.root / entry.files[0]).exists():
                (self.store.root / entry.files[-1]).unlink(missing_ok=True)
            return False
        self._count(hits=1, fetched_bytes=sum(file.size for file in files), saved_s=seconds)
        return True

    def _received(self, file: EntryFile, transfer: Transfer) -> Path | None:
        """Download a file to the blobs of the store, and return its path there; None if its content is known."""
        if file.content is not None:
            return None
        blob = Descriptor(FILE_TYPE, file.digest, file.size)
        return self.registry.fetch_blob(blob, self.store.blobs, transfer.count, self._stop)

    def _put(self, file: EntryFile, received: Path | None) -> None:
        place = self.store.root / file.name
        self.store.folder(*file.name.split("/")[:-1])
        if received is None:
            assert file.content is not None
            with replacing(place) as temporary:
                temporary.write_bytes(file.content)
        elif received != place:
            try:
                os.replace(received, place)
            except FileNotFoundError:
                if not place.is_file():  # else another process has fetched it too
                    raise
        self.store.digests.record(place, file.digest.partition(":")[2])

    def _push(self, entry: CacheEntry, seconds: float, blobs: Sequence[str]) -> None:
        if self._failures >= _FAILURES:
            return
        try:
            sent = self.upload(entry, seconds, blobs)
        except (RequestFailed, BuildError, OSError, Stopped) as error:
            self._failed(error)
        else:
            self._count(uploaded=1, uploaded_bytes=sent)

    def upload(self, entry: CacheEntry, seconds: float, blobs: Sequence[str]) -> int:
        """Upload `entry` (see `offer`), and return the bytes that the registry lacked. Raises as `Registry.push`."""
        paths = {name: self.store.root / name for name in entry.files}
        paths |= {f"blobs/sha256/{one.partition(':')[2]}": self.store.blobs.path(one) for one in blobs}
        files = [_entry_file(name, path, self.store) for name, path in paths.items()]
        manifest = render_entry(entry, files, seconds, self.signer)
        descriptors = [EMPTY, *(Descriptor(FILE_TYPE, file.digest, file.size) for file in files)]
        places = {file.digest: paths[file.name] for file in files} | {EMPTY.digest: self._empty()}
        pushed = self.registry.push(
            BlobFiles(places), descriptors, manifest, OCI_MANIFEST, entry.tag, on_progress=self._sent.count
        )
        if entry.kind in ("built", "recipe"):  # made for the upload
            for path in paths.values():
                path.unlink(missing_ok=True)
        return pushed.uploaded_bytes

    def _empty(self) -> Path:
        return self.store.blobs.path(self.store.blobs.add(b"{}"))

    def _count(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.use, name, getattr(self.use, name) + count)

    def _failed(self, error: Exception) -> None:
        """Note a failed request; after some, or one that says that no other can succeed, leave the cache out."""
        if isinstance(error, Stopped):
            return
        with self._lock:
            before = self._failures
            self._failures += _FAILURES if isinstance(error, RequestFailed) and error.is_down else 1
            said = before < _FAILURES <= self._failures
        if said:
            name, why = self.registry.reference.name, str(error).partition("\n")[0]
            log(f"the cache {name} is left out of this run, and what is missing is made here: {why}")


def _entry_file(name: str, path: Path, store: Store) -> EntryFile:
    size = path.stat().st_size
    if size <= _INLINE:
        content = path.read_bytes()
        return EntryFile(name, digest_of(content), len(content), content)
    return EntryFile(name, f"sha256:{store.digests.of(path)}", size)
