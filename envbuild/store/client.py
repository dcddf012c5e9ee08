"""Client for pages and files, configured as pip: package indexes, Debian archives, conda channels, sources.

It fetches single files into the store, several at a time.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from envbuild.base.errors import BuildError
from envbuild.base.masking import redact
from envbuild.base.progress import OnProgress, transfer
from envbuild.base.workers import each
from envbuild.cache.download import locked_partial, open_download
from envbuild.cache.http import (
    BLOCK,
    HttpClient,
    Mismatch,
    NotFound,
    RequestFailed,
    Transport,
    failure,
    read_all,
    with_retries,
)
from envbuild.site.pip_config import PipConfig, ca_bundle
from envbuild.store.store import Store

if TYPE_CHECKING:
    import requests

_MOST_PAGE = 1 << 28
_FIRST_RANGE, _LARGEST_RANGE = 1 << 16, 1 << 25
_ADVICE = " (credentials? netrc and user:password@ in pip's index-url are read)"


@dataclass(frozen=True, slots=True)
class Page:
    """A server's response: its URL after redirects, its headers, and its body."""

    url: str
    headers: Mapping[str, str]
    content: bytes


def transport_of(pip: PipConfig, env: Mapping[str, str], insecure: frozenset[str] = frozenset()) -> Transport:
    """Return the transport that pip's configuration and the environment describe."""
    default = Transport()
    return Transport(
        verify=ca_bundle(pip, env) or True,
        proxies=dict.fromkeys(("http", "https"), pip.proxy) if pip.proxy else None,
        client_cert=pip.client_cert,
        timeout_s=pip.timeout_s or default.timeout_s,
        retries=default.retries if pip.retries is None else pip.retries,
        insecure=insecure,
        unverified=frozenset(pip.trusted_hosts),
    )


class RangeFile(io.RawIOBase):
    """A file on a server, read by ranges; the longer a reader goes on in order, the longer are the ranges."""

    def __init__(self, size: int, ask: Callable[[int, int], bytes]) -> None:
        """`ask` returns the bytes [start, end)."""
        self._size, self._ask = size, ask
        self._place, self._start, self._data, self._range = 0, 0, b"", _FIRST_RANGE

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        end = self._start + len(self._data)
        if not self._start <= self._place < end:
            if self._place >= self._size:
                return 0
            self._range = min(self._range * 2, _LARGEST_RANGE) if self._place == end else _FIRST_RANGE
            self._start = self._place
            self._data = self._ask(self._place, min(self._place + self._range, self._size))
        at = self._place - self._start
        piece = self._data[at : at + len(buffer)]
        buffer[: len(piece)] = piece
        self._place += len(piece)
        return len(piece)


@dataclass
class Client:
    """HTTP client configured as pip, shared by all threads of a run.

    Every method raises NotFound when the server does not have the resource, and RequestFailed for any other failure.
    """

    pip: PipConfig
    env: Mapping[str, str]
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._http = HttpClient(transport_of(self.pip, self.env), plain=True, as_pip=True)

    def page(self, url: str, *, patient: bool = True) -> Page:
        """Return the page at `url`; retry failed requests when `patient`."""
        import requests
        from mousebender.simple import ACCEPT_SUPPORTED

        encoding = requests.utils.DEFAULT_ACCEPT_ENCODING
        # As pip: a cache on the way asks the index whether its copy is still the newest (RFC 9111 §5.2.1.1).
        headers = {"Accept": ACCEPT_SUPPORTED, "Accept-Encoding": encoding, "Cache-Control": "max-age=0"}

        def get() -> Page:  # retried with the body, which may be cut off
            with self._answer(url, headers) as response:
                content = read_all(response, _MOST_PAGE, self.stop)
                return Page(response.url, response.headers, content)

        return with_retries(get, self._http.transport.retries if patient else 0, self.stop)

    def open(self, url: str) -> IO[bytes]:
        """Open the file at `url`, which is read by ranges. Fails for a server without ranges, and so may each read."""
        if url.startswith("file:"):
            try:
                return path_of(url).open("rb")
            except OSError as error:
                raise NotFound(f"cannot be read: {error.strerror}") from None
        _, size = self._range(url, 0, 1)
        return io.BufferedReader(RangeFile(size, lambda start, end: self._range(url, start, end)[0]), 1 << 13)

    def _range(self, url: str, start: int, end: int) -> tuple[bytes, int]:
        """Return the bytes [start, end) of the file at `url`, and its size."""

        def ask() -> tuple[bytes, int]:
            with self._answer(url, {"Range": f"bytes={start}-{end - 1}"}) as response:
                about = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", ""))
                if response.status_code != 206 or about is None or int(about[1]) != start:
                    raise RequestFailed("the server has no byte ranges", answered=True)
                data = response.content
                if len(data) != int(about[2]) - start + 1:
                    raise RequestFailed("it sent another range", answered=True, transient=True)
                return data, int(about[3])

        return with_retries(ask, self._http.transport.retries, self.stop)

    def reach(self, url: str) -> None:
        """Request `url` once, without reading the body."""
        self._answer(url, {}).close()

    def size(self, url: str) -> int | None:
        """Return the size of the file at `url`, None if the server does not state it, without reading the file."""
        if url.startswith("file:"):
            try:
                return path_of(url).stat().st_size
            except OSError as error:
                raise NotFound(f"cannot be read: {error.strerror}") from None

        def ask(method: str = "HEAD") -> int | None:
            with self._answer(url, {"Accept-Encoding": "identity"}, method=method) as response:
                length = response.headers.get("Content-Length", "")
                return int(length) if re.fullmatch(r"\d{1,18}", length) else None

        try:
            return with_retries(ask, self._http.transport.retries, self.stop)
        except RequestFailed as error:
            if error.status not in (405, 501):  # the server has no HEAD
                raise
            return ask("GET")

    def download(
        self, url: str, partial: Path, hashes: frozenset[str], on_progress: OnProgress, size: int | None = None
    ) -> str:
        """Download `url` into `partial`, with resume; return its sha256, which is one of `hashes`.

        A body of more than `size` bytes is rejected. Raises Mismatch for other content, and OSError when `partial` is
        not writable.
        """
        if url.startswith("file:"):
            return _copy(path_of(url), partial, hashes, on_progress)
        with open_download(partial, hashes, size, on_progress, self.stop, exact=False) as download:
            try:
                return download.run(lambda headers: self._answer(url, headers, 416), self._http.transport.retries)
            except BaseException:
                on_progress(-download.received)  # the next source counts them again
                raise

    def _answer(self, url: str, headers: Mapping[str, str], ok: int = 200, method: str = "GET") -> requests.Response:
        plain, credentials = split_credentials(url)
        response = self._http.send(method, plain, headers, credentials=credentials)
        if response.status_code < 300 or response.status_code == ok:
            return response
        with response:
            # Object stores answer 403 for a missing file; 401 concerns the credentials.
            raise failure(response, _ADVICE)


def path_of(url: str) -> Path:
    """Return the path in a file: URL."""
    return Path(unquote(urlsplit(url).path))


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """Return `url` without credentials, and the decoded credentials (user, password), or None."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, None
    user, _, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    return urlunsplit(parts._replace(netloc=host)), (unquote(name), unquote(password))


def with_credentials_of(url: str, index: str) -> str:
    """Return `url` with the credentials of `index` if both are on one server: links on a page carry none."""
    mine, theirs = urlsplit(url), urlsplit(index)
    user, at, host = theirs.netloc.rpartition("@")
    if at and "@" not in mine.netloc and (mine.scheme, mine.netloc) == (theirs.scheme, host):
        return urlunsplit(mine._replace(netloc=f"{user}@{host}"))
    return url


def _copy(source: Path, partial: Path, hashes: frozenset[str], on_progress: OnProgress) -> str:
    """Copy a file that a local index lists, so that later runs find it in the store without reading the index."""
    try:
        stream = source.open("rb")
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}") from None
    seen = hashlib.sha256()
    with stream, partial.open("wb") as copy:
        while block := stream.read(BLOCK):
            copy.write(block)
            seen.update(block)
            on_progress(len(block))
    digest = seen.hexdigest()
    if digest not in hashes:
        partial.unlink(missing_ok=True)
        raise Mismatch(digest)
    return digest


_PARALLEL = 8

Wanted = TypeVar("Wanted")


def fetch_each(
    missing: Sequence[Wanted],
    fetch: Callable[[Wanted, OnProgress], Path | None],
    client: Client,
    title: str,
    total: int | None = None,
) -> dict[Wanted, Path]:
    """Return the file that `fetch` finds for each of `missing`, in parallel; `total` is in bytes, None if unknown."""
    if not missing:
        return {}
    with transfer(title, total) as on_progress:
        paths = each(missing, lambda item, _: fetch(item, on_progress), _PARALLEL, client.stop)
    return {item: path for item, path in zip(missing, paths, strict=True) if path is not None}


@dataclass(frozen=True, slots=True)
class SourceAnswer:
    """The reason why a source does not have an item.

    `source` is an index, a folder, a channel or its mirror; `address` is the item's URL or path, if known. `sha256` is
    that of other content which it sent.
    """

    source: str
    reason: str
    address: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        return f"{self.address or self.source}: {self.reason}"


def download(
    url: str,
    name: str,
    hashes: frozenset[str],
    key: str,
    known: Callable[[], Path | None],
    client: Client,
    store: Store,
    on_progress: OnProgress,
    kind: str = "wheels",
    size: int | None = None,
) -> Path:
    """Download `url` into the store as `kind`/<sha256>/`name`, or to the blobs for "" as `kind`.

    Only one process downloads a `key` at a time; `known` returns the file if another process was faster. Raises the
    RequestFailed of `Client.download`, and BuildError when the store cannot be written.
    """
    with store.writing(), locked_partial(store.folder("partial") / key, client.stop) as path:
        if there := known():
            return there
        digest = client.download(url, path, hashes, on_progress, size)
        return store.adopt(path, digest, name, kind)


def from_urls(
    places: Iterable[tuple[str, str]],
    answers: list[SourceAnswer],
    fetch: Callable[[str], Path],
    down: dict[str, str] | None = None,
) -> Path | None:
    """Return the file that `fetch` returns for the first URL of `places` (source, URL) that has it; None without one.

    The reasons of the others are added to `answers`. Sources in `down` are not asked, for the reason there; a source
    that fails for every request is added: sixty files would wait sixty times for it.
    """
    down = {} if down is None else down
    for source, url in places:
        reason, other = down.get(source, ""), ""
        try:
            if not reason:
                return fetch(url)
        except Mismatch as error:
            reason, other = f"hash mismatch: it has sha256:{error.sha256}", error.sha256
        except RequestFailed as error:
            reason = str(error)
            if error.is_down and not isinstance(error, NotFound):
                down[source] = reason
        answers.append(SourceAnswer(source, reason, redact(url), other))
    return None


def from_vault(
    hashes: Iterable[str],
    store: Store,
    answers: list[SourceAnswer],
    *,
    kind: str = "",
    named: Callable[[Path], str] = lambda file: file.name,
    size: int | None = None,
    on_progress: OnProgress = lambda _count: None,
    stop: threading.Event | None = None,
) -> Path | None:
    """Return a file with one of `hashes` (sha256, hexadecimal), brought from the store's vault; None without one.

    It goes to the folder `kind` of the store under the name that `named` returns, or to the blobs for "". `named`
    raises ValueError for another file than the expected one. The reason for None is added to `answers`. Raises
    BuildError when the store cannot be written.
    """
    if (vault := store.vault) is None:
        return None
    reasons, stop = [], stop or threading.Event()
    for sha256 in sorted(hashes):
        try:
            with locked_partial(store.folder("partial") / sha256, stop) as partial:
                if not kind and (place := store.find(kind, sha256, lambda _: True)):
                    return place  # another process was faster
                vault.fetch(sha256, partial, store.digests, on_progress, stop, size)
                try:
                    return store.adopt(partial, sha256, named(partial), kind)
                except (ValueError, BuildError):
                    partial.unlink(missing_ok=True)
                    raise
        except NotFound:
            reasons.append("not there")
        except Mismatch as error:
            reasons.append(f"hash mismatch: sha256:{sha256} has sha256:{error.sha256}")
        except RequestFailed as error:
            reasons.append(str(error))
            vault.failed(error)
        except ValueError as error:
            reasons.append(str(error))
        except OSError as error:
            raise store.unwritable(error) from error
    answers.append(SourceAnswer(f"vault {vault.name}", "; ".join(dict.fromkeys(reasons))))
    return None


def fetch_file(
    sha256: str,
    kind: str,
    name: str,
    places: Iterable[tuple[str, str]],
    answers: list[SourceAnswer],
    store: Store,
    client: Client,
    on_progress: OnProgress,
    down: dict[str, str],
    size: int | None = None,
) -> Path | None:
    """Return the file with this digest from the vault, or as `from_urls` of `places`; None without one.

    It goes to the folder `kind` of the store as `name`, or to the blobs for "", where `name` is its sha256.
    """
    known = partial(store.find, kind, sha256, name.__eq__)
    about: dict[str, Any] = {"size": size, "on_progress": on_progress, "stop": client.stop}

    def fetch(url: str) -> Path:
        return download(url, name, frozenset({sha256}), sha256, known, client, store, on_progress, kind, size)

    there = from_vault({sha256}, store, answers, kind=kind, named=lambda _: name, **about)
    return there or from_urls(places, answers, fetch, down)
