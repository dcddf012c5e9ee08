"""Pages and files by pip's configuration: package indexes, Debian's archives, conda channels, sources."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from envbuild.cache.download import open_download
from envbuild.cache.http import BLOCK, HttpClient, failure, read_all
from envbuild.cache.retry import Mismatch, NotFound, patiently
from envbuild.cache.transport import transport_of
from envbuild.progress import Advance
from envbuild.site.pip_config import PipConfig
from envbuild.store.credentials import split_credentials

if TYPE_CHECKING:
    import requests

_MOST_PAGE = 1 << 28
_ADVICE = " (credentials? netrc and user:password@ in pip's index-url are read)"


@dataclass(frozen=True, slots=True)
class Page:
    """What a server sent: the URL that it came from, after redirects, its headers, and the body."""

    url: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode("utf-8", "replace")


@dataclass
class Client:
    """Requests by pip's configuration. One for a run; used by several threads.

    Every method raises NotFound where the server has none, else RequestFailed.
    """

    pip: PipConfig
    env: Mapping[str, str]
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._http = HttpClient(transport_of(self.pip, self.env), plain=True, as_pip=True)

    def page(self, url: str, *, patient: bool = True) -> Page:
        """GET a page, with retries when `patient`."""
        from mousebender.simple import ACCEPT_SUPPORTED
        from requests.utils import DEFAULT_ACCEPT_ENCODING

        headers = {"Accept": ACCEPT_SUPPORTED, "Accept-Encoding": DEFAULT_ACCEPT_ENCODING}

        def get() -> Page:  # the body may be cut, too
            with self._answer(url, headers) as response:
                content = read_all(response, _MOST_PAGE, self.stop)
                return Page(response.url, response.headers, content)

        return patiently(get, self._http.transport.retries if patient else 0, self.stop)

    def reach(self, url: str) -> None:
        """Ask for `url` once and read nothing of it."""
        self._answer(url, {}).close()

    def download(
        self,
        url: str,
        partial: Path,
        hashes: frozenset[str],
        moved: Advance,
        size: int | None = None,
    ) -> str:
        """Stream `url` into `partial` with resume; return its sha256, which is one of `hashes`.

        More than `size` bytes are not taken.
        Raises Mismatch for other content, and OSError when `partial` cannot be written.
        """
        if url.startswith("file:"):
            return _copy(Path(unquote(urlsplit(url).path)), partial, hashes, moved)
        with open_download(partial, hashes, size, moved, self.stop, exact=False) as download:
            try:
                return download.run(
                    lambda headers: self._answer(url, headers, 416),
                    self._http.transport.retries,
                )
            except BaseException:
                moved(-download.have)  # the next source tells them again
                raise

    def _answer(self, url: str, headers: Mapping[str, str], ok: int = 200) -> requests.Response:
        plain, credentials = split_credentials(url)
        response = self._http.send("GET", plain, headers, credentials=credentials)
        if response.status_code < 300 or response.status_code == ok:
            return response
        with response:
            # Object stores say 403 for one file that they lack; 401 is about who asks.
            raise failure(response, _ADVICE)


def _copy(source: Path, partial: Path, hashes: frozenset[str], moved: Advance) -> str:
    """Copy a file that an index on disk lists, so that the store has it without reading the index again."""
    try:
        stream = source.open("rb")
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}") from None
    digest = hashlib.sha256()
    with stream, partial.open("wb") as copy:
        while block := stream.read(BLOCK):
            copy.write(block)
            digest.update(block)
            moved(len(block))
    if digest.hexdigest() not in hashes:
        partial.unlink(missing_ok=True)
        raise Mismatch(digest.hexdigest())
    return digest.hexdigest()
