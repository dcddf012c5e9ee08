"""The team's cache: results of builds in a registry, which the site or the environment names.

Its entries are defined in store/entry.py. A cache never makes a build fail: missing and invalid entries are built on
this host. A build waits for a transfer unless it is too slow. `push_recipe` and `pull_recipe` transfer all results that
builds of a recipe used; their list is an entry of its own, whose key is the recipe's name.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.base.atomic import replacing
from envbuild.base.errors import BuildError, UsageError
from envbuild.base.files import is_file_name, parse_json
from envbuild.base.packages import digest_of
from envbuild.base.progress import log, transfer
from envbuild.base.text import human_size
from envbuild.base.workers import Answer, Workers, each
from envbuild.cache.hashed import read_note, write_note
from envbuild.cache.http import NotFound, RequestFailed, Stopped
from envbuild.image.layout import BlobFiles, Blobs
from envbuild.image.model import EMPTY, OCI_MANIFEST, Descriptor, canonical
from envbuild.image.reference import parse_reference
from envbuild.image.registry import Registry, manifest_of, open_registry
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import CACHE, VAULT, Site
from envbuild.store.client import transport_of
from envbuild.store.entry import FILE_TYPE, KINDS, CacheEntry, EntryFile, read_entry, render_entry
from envbuild.store.sources import FetchSettings
from envbuild.store.store import Store
from envbuild.store.usage import recipes
from envbuild.store.vault import Vault

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

# Transfers with fewer bytes per second, after the first seconds, are not waited for.
SLOWEST, _PATIENCE_S = 100_000, 10.0


@dataclass(slots=True)
class Transfer:
    """The speed of a download or of all uploads; `begun` is 0 before it starts, `given_up` if nobody waits for it.

    `described` is whether all files of an entry are in place but the data of a segment. `last` are the bytes of the
    files that come after it, `shown` is whether they were used as they came, and `taken_back` whether some came again.
    """

    begun: float = 0.0
    moved: int = 0
    given_up: bool = False
    described: bool = False
    last: int = 0
    shown: bool = False
    taken_back: bool = False

    def start(self) -> None:
        """Begin to measure."""
        self.begun, self.moved = time.monotonic(), 0

    def count(self, moved: int) -> None:
        """Count transferred bytes; a negative number takes back bytes that must be transferred again."""
        self.moved += moved
        self.last += moved
        self.taken_back |= moved < 0

    def is_slow(self) -> bool:
        """Return whether it is too slow to wait for: a server that sends single bytes would never time out."""
        late = time.monotonic() - self.begun - _PATIENCE_S
        return self.begun > 0 and late > 0 and self.moved < late * SLOWEST


# Files up to this size are in the manifest too: one request instead of two.
_INLINE = 4096
_DOWNLOADS, _UPLOADS = 6, 2
# Requests that may fail before the cache is left out of the run.
_FAILURES = 3
_POLL_S = 0.005


@dataclass(slots=True)
class CacheUse:
    """Use of the team's cache in one run; `saved_s` is the time that others needed for the fetched results."""

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

    With `signers`, only entries with a signature of one of these keys are used; `signer` signs new entries.
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
        """Begin to fetch `entries`; `ResultCache` documents this method and the next ones."""
        for entry in entries:
            if self.reads and entry.tag not in self._expected:
                transfer = Transfer()
                self._expected[entry.tag] = transfer, self._downloading.submit(self._fetch, entry, transfer)

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

    def refuse(self, entry: CacheEntry, why: str = "its files are damaged or those of another entry") -> None:
        log(f"the cache's {entry.tag} is refused: {why}; building it here")
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
        """Wait until new results are uploaded, or the upload takes too long."""
        if all(answer.ready() for answer in self._uploads):
            return
        log(f"uploading to the cache {self.registry.reference.name}")
        self._sent.start()
        while not all(answer.ready() for answer in self._uploads):
            if self._sent.is_slow():
                self._failed(RequestFailed(f"uploads are slower than {human_size(SLOWEST)} a second"))
                return
            time.sleep(_POLL_S)

    def close(self, *, wait: bool) -> None:
        """End the transfers, with `wait` after the uploads of new results. Log the run's use of the cache."""
        if wait:
            self.flush()
        self._stop.set()
        for workers in (self._downloading, self._uploading):
            workers.close(0.5)
        self.registry.close()
        if summary := str(self.use):
            log(f"cache: {summary}")

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
        paths |= {f"blobs/sha256/{digest.partition(':')[2]}": self.store.blobs.path(digest) for digest in blobs}
        files, places = _files_of(paths, self.store)
        manifest = render_entry(entry, files, seconds, self.signer)
        descriptors = [EMPTY, *(Descriptor(FILE_TYPE, file.digest, file.size) for file in files)]
        pushed = self.registry.push(
            BlobFiles(places), descriptors, manifest, OCI_MANIFEST, entry.tag, on_progress=self._sent.count
        )
        if entry.kind in ("built", "recipe"):  # made for the upload
            for path in paths.values():
                path.unlink(missing_ok=True)
        return pushed.uploaded_bytes

    def _count(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.use, name, getattr(self.use, name) + count)

    def _failed(self, error: Exception) -> None:
        """Count a failed request; give up on the cache after several, or at once if no other can succeed."""
        if isinstance(error, Stopped):
            return
        with self._lock:
            before = self._failures
            self._failures += _FAILURES if isinstance(error, RequestFailed) and error.is_down else 1
            gives_up = before < _FAILURES <= self._failures
        if gives_up:
            name, why = self.registry.reference.name, str(error).partition("\n")[0]
            log(f"the cache {name} is not used in this run; missing entries are built here: {why}")


def _files_of(paths: Mapping[str, Path], store: Store) -> tuple[list[EntryFile], dict[str, Path]]:
    """Return the files of an entry, by path in the store, as they are in its manifest, and each file by its digest."""
    files = [_entry_file(name, path, store) for name, path in paths.items()]
    empty = store.blobs.path(store.blobs.add(b"{}"))  # the configuration of the manifest
    return files, {EMPTY.digest: empty, **{file.digest: paths[file.name] for file in files}}


def _entry_file(name: str, path: Path, store: Store) -> EntryFile:
    size = path.stat().st_size
    if size <= _INLINE:
        content = path.read_bytes()
        return EntryFile(name, digest_of(content), len(content), content)
    return EntryFile(name, f"sha256:{store.digests.of(path)}", size)


_KEY, _PASSPHRASE = "ENVBUILD_CACHE_KEY", "ENVBUILD_KEY_PASSPHRASE"
# Of the cache and of the vault, by their key in site.toml: the form of their names, and the modes.
_FORMS = {"cache": (CACHE, ("read", "write", "readwrite")), "vault": (VAULT, ("read", "readwrite"))}
# A cache is an optimization: a slow answer must not cost more than the work that it saves.
_TIMEOUT_S, _RETRIES = 10.0, 1
_KEPT, _LOCK = "org.opencontainers.image.created", "org.envbuild.lock"


def cache_of(site: Site, env: Mapping[str, str], key: str = "cache") -> tuple[str, str]:
    """Return the URL of the cache, or of the "vault", "" for none, and its mode: the environment's or the site's.

    Raises UsageError.
    """
    name, (form, modes) = f"ENVBUILD_{key.upper()}", _FORMS[key]
    url, mode = env.get(name, getattr(site, key)), env.get(f"{name}_MODE", getattr(site, f"{key}_mode"))
    if not re.fullmatch(form, url):  # never repeated: it may hold a password
        raise UsageError(
            f"{name}: not a repository of a registry", f"such as oci://registry.example.org/team/{key}, without a tag"
        )
    if mode not in modes:
        raise UsageError(f"{name}_MODE={mode}: expected one of {', '.join(modes)}")
    return url, mode


def registry_of(image: str, site: Site, pip: PipConfig, env: Mapping[str, str], *, hurried: bool = False) -> Registry:
    """Return the registry of `image`, with this site's mirrors, proxies and certificates; `hurried` for a cache."""
    reference = parse_reference(image)
    insecure = frozenset(host for host, table in site.registries.items() if table.insecure)
    transport = transport_of(pip, env, insecure)
    if hurried:
        transport = replace(transport, timeout_s=_TIMEOUT_S, retries=_RETRIES)
    return open_registry(reference, transport, env, site.registry(reference.registry).mirrors)


def open_remote(site: Site, pip: PipConfig, env: Mapping[str, str], store: Store) -> RemoteCache | None:
    """Return the cache of the site or of ENVBUILD_CACHE, None without one; no request is sent yet.

    Raises UsageError for a faulty setting or key.
    """
    url, mode = cache_of(site, env)
    if not url:
        return None
    registry = registry_of(url.removeprefix("oci://"), site, pip, env, hurried=True)
    writes = mode != "read"
    return RemoteCache(registry, store, mode != "write", writes, *signing(site, env, writes=writes))


def signing(site: Site, env: Mapping[str, str], *, writes: bool) -> tuple[list[Key], Signer | None]:
    """Return the keys of which one must have signed each entry, and the signer of new ones. Raises UsageError."""
    names, key = site.trust.cache_signers, env.get(_KEY)
    if not (names or key):
        return [], None
    from envbuild.trust.keys import load_public, load_signer  # most caches have no signed entries

    signers = [load_public(Path(name)) for name in names]
    if writes and not key:
        raise UsageError(
            f"the cache needs signed entries ([trust] cache_signers), and {_KEY} is not set",
            f"set {_KEY} to the file of the private key, or ENVBUILD_CACHE_MODE=read",
        )
    signer = None
    if writes and key:
        public = Path(names[0]) if names else None
        signer = load_signer(key, public, lambda: env.get(_PASSPHRASE, ""), option=_KEY)
    return signers, signer


def open_vault(site: Site, pip: PipConfig, env: Mapping[str, str], *, offline: bool = False) -> Vault | None:
    """Return the vault of the site or of ENVBUILD_VAULT, None without one; if `offline`, one in a folder alone.

    Raises UsageError for a faulty setting.
    """
    url, _ = cache_of(site, env, "vault")
    if not url or (offline and url.startswith("oci://")):
        return None
    folder = Path(url.removeprefix("oci:")).expanduser().absolute()
    is_folder = not url.startswith("oci://")
    source = Blobs(folder / "blobs") if is_folder else registry_of(url.removeprefix("oci://"), site, pip, env)
    return Vault(url, source, keys=lambda writes: signing(site, env, writes=writes))


def named_vault(host: FetchSettings) -> Vault:
    """Return the vault of a run. Raises UsageError without one."""
    if (vault := host.store.vault) is None:
        raise UsageError(
            "no vault is named", "set `vault` in site.toml, or ENVBUILD_VAULT=oci://registry.example.org/team/vault"
        )
    return vault


def keep_inputs(
    vault: Vault, lock: str, paths: Mapping[str, Path], store: Store, kind: str = "lock"
) -> tuple[int, int]:
    """Add the inputs of the builds of a lock to the vault; return their bytes, and those that the vault lacked.

    `lock` is its digest, of another `kind` of entry its key; `paths` has the files by their names in store/entry.py.
    Files that the vault's entry has stay in it, unless the vault has lost them. Raises BuildError.
    """
    entry = CacheEntry(kind, lock.removeprefix("sha256:"))
    files, places = _files_of(paths, store)
    with suppress(BuildError):  # an invalid entry is replaced
        old = [file for file in kept_inputs(vault, lock, kind)[0] if file.name not in paths]
        lost = each(
            old, lambda file, stop: file.content is None and vault.lacks(file.digest, file.size, stop), _PARALLEL
        )
        files += [file for file, is_lost in zip(old, lost, strict=True) if not is_lost]
    manifest = parse_json(render_entry(entry, files, 0.0, vault.keys(True)[1]))
    # With its lock, no two entries have one manifest, which a registry could remove only for both.
    manifest["annotations"] |= {_KEPT: f"{datetime.now(UTC):%Y-%m-%dT00:00:00Z}", _LOCK: lock}
    sizes = {file.digest: file.size for file in files}
    with transfer(f"keeping {entry.tag[:17]} in {vault.name}", sum(sizes.values())) as on_progress:
        return sum(sizes.values()), vault.publish(canonical(manifest), entry.tag, places, on_progress)


def kept_inputs(vault: Vault, lock: str, kind: str = "lock") -> tuple[list[EntryFile], str]:
    """Return the inputs of the builds of a lock that the vault has, [] for none, and the day of their last push.

    Raises BuildError, also for an invalid entry, and for one without a signature of the vault's signers, if it has any.
    """
    entry = CacheEntry(kind, lock.removeprefix("sha256:"))
    if (raw := vault.manifest(entry.tag)) is None:
        return [], ""
    try:
        return read_entry(raw, entry, vault.keys(False)[0])[0], str(parse_json(raw)["annotations"][_KEPT])
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(f"the vault's {entry.tag} is refused: {error}", "keep it again: envbuild vault push") from None


_PARALLEL = 4


def entries_of(store: Store, recipe: str) -> list[CacheEntry]:
    """Return the entries of the results that builds of `recipe` used and `store` still has."""
    names = sorted(recipes(store).get(recipe, ()))
    return [entry for name in names if (store.root / name).exists() and (entry := _entry(name)) is not None]


def _entry(item: str) -> CacheEntry | None:
    """Return the entry of an item of the store (store/usage.py), None for an item that is no result of a build."""
    if item.startswith("built/"):
        return CacheEntry("built", item.removeprefix("built/"))
    for kind, files in KINDS.items():
        before, _, after = files[0].partition("{}")
        if item.startswith(before) and item.endswith(after):
            return CacheEntry(kind, item[len(before) : len(item) - len(after)])
    return None


def push_recipe(
    remote: RemoteCache, recipe: str, pack: Callable[[Store, Path], CacheEntry], done: Callable[[CacheEntry], None]
) -> tuple[int, int]:
    """Upload the results that builds of `recipe` used, and their list; return the entries, and the bytes sent.

    `pack` writes the file of a source-built layer's entry; `done` is called for each entry, from several threads.
    Raises BuildError when a request fails.
    """
    store = remote.store
    entries = entries_of(store, recipe)

    def send(entry: CacheEntry, _: threading.Event) -> int:
        if remote.has(entry):
            return 0
        if entry.kind == "built":
            pack(store, store.root / "built" / entry.key)
        blobs = [str(read_note(store.root / entry.files[-1])["digest"])] if entry.kind == "layer" else []
        sent = remote.upload(entry, 0.0, blobs)
        done(entry)
        return sent

    sizes = each(entries, send, _PARALLEL)
    named = CacheEntry("recipe", recipe)
    store.folder("partial")
    write_note(
        store.root / named.files[0], {"entries": [[cache_entry.kind, cache_entry.key] for cache_entry in entries]}
    )
    remote.upload(named, 0.0, [])
    return len(entries), sum(sizes)


def pull_recipe(remote: RemoteCache, recipe: str) -> tuple[int, int]:
    """Fetch the results for `recipe` from the cache; return the number of its entries, and how many failed.

    Raises BuildError if the cache has no list of it.
    """
    named = CacheEntry("recipe", recipe)
    entries = list(_listed(remote.store, named)) if remote.bring(named) else []
    if not entries:
        raise BuildError(
            f"the cache {remote.registry.reference.name} has no entry of {recipe}",
            f"on a host that has built it, run: envbuild cache push {recipe}",
        )
    cache_entries = [
        entry for entry in entries if entry.kind == "built" or not (remote.store.root / entry.files[-1]).exists()
    ]
    remote.expect(cache_entries)
    return len(entries), sum(not remote.bring(entry) for entry in cache_entries)


def _listed(store: Store, named: CacheEntry) -> Iterable[CacheEntry]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        for kind, key in read_note(store.root / named.files[0])["entries"]:
            if kind in KINDS and is_file_name(key):
                yield CacheEntry(kind, key)


def counted(tags: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the number of entries of each kind, by their tags."""
    kinds = [tag.partition("-")[0] for tag in tags]
    yield from ((kind, kinds.count(kind)) for kind in KINDS if kind in kinds)
