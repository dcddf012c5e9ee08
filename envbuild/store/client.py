"""HTTP for indexes and wheels: credentials, certificates, proxies, retries, resumed downloads."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from envbuild.site.pip_config import PipConfig, ca_bundle, redact
from envbuild.store.credentials import split_credentials

if TYPE_CHECKING:
    import requests

_CHUNK = 1 << 18
_RETRIES = 5
_TIMEOUT_S = 15.0
_LONGEST_WAIT_S = 60.0
_PASSING = frozenset({408, 429, 500, 502, 503, 504})


class Unreachable(Exception):
    """A request that was not served; the text says why, without credentials."""


class Down(Unreachable):
    """No request to this server can succeed: no connection, or no credentials that it accepts."""


class NotFound(Exception):
    """The server answers, and does not have it."""


class Mismatch(Exception):
    """A file whose content is not the expected one; holds the sha256 that it has."""


@dataclass
class Client:
    """Requests by pip's configuration. One for a run; used by several threads."""

    pip: PipConfig
    env: Mapping[str, str]
    stop: threading.Event = field(default_factory=threading.Event)
    _local: threading.local = field(default_factory=threading.local)

    def page(self, url: str, *, patient: bool = True) -> requests.Response:
        """GET a page, with retries when `patient`. Raises NotFound for 404 and 410, else Unreachable."""
        from mousebender.simple import ACCEPT_SUPPORTED
        from requests import RequestException

        retries = self._retries() if patient else 0
        for attempt in range(retries + 1):
            try:
                with self._answer(url, {"Accept": ACCEPT_SUPPORTED}, retries) as response:
                    response.content  # noqa: B018 - read the body here: it may be cut, too
                    return response
            except RequestException as error:
                cut = _reason(error)
                if attempt < retries:
                    self._pause(0.25 * 2**attempt)
        raise Unreachable(cut)

    def reach(self, url: str) -> None:
        """Ask for `url` once and read nothing of it. Raises NotFound, or Unreachable."""
        with self._answer(url, {}, 0):
            return

    def download(
        self, url: str, partial: Path, hashes: frozenset[str], moved: Callable[[int], None]
    ) -> str:
        """Stream `url` into `partial`, going on where an earlier try was cut; returns the sha256.

        Raises Mismatch when the content has none of `hashes`, NotFound, Unreachable, or OSError
        when `partial` cannot be written. Only tries that bring nothing new count as retries: a large
        file over a bad line must not fail for the number of its cuts.
        """
        if url.startswith("file:"):
            return _copy(Path(unquote(urlsplit(url).path)), partial, hashes, moved)
        if (
            partial.exists() and (digest := _digest(partial)) in hashes
        ):  # cut off just before its adoption
            return digest
        last = "the content changed while it was sent"
        most, tries = 0, -1
        while tries < self._retries():
            have = partial.stat().st_size if partial.exists() else 0
            most, tries = max(most, have), 0 if have > most else tries + 1
            if tries:
                self._pause(0.25 * 2**tries)
            head = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
            try:
                with self._answer(url, head, self._retries()) as response:
                    digest = self._receive(response, partial, have, moved)
            except NotFound:
                if have:  # 416, or another part: what we have is of no use
                    partial.unlink(missing_ok=True)
                    tries -= 1
                    continue
                raise
            except _Cut as cut:
                last = str(cut)
                continue
            if digest in hashes:
                return digest
            partial.unlink(missing_ok=True)
            if not have:
                raise Mismatch(digest)
        raise Unreachable(f"{redact(url)}: {last}")

    def _receive(
        self, response: requests.Response, partial: Path, have: int, moved: Callable[[int], None]
    ) -> str:
        from requests import RequestException

        resumed = response.status_code == 206 and have > 0
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise NotFound("another part of the file was sent than was asked for")
        digest = hashlib.sha256()
        if resumed:
            with partial.open("rb") as stream:
                while block := stream.read(_CHUNK):
                    digest.update(block)
        with partial.open("ab" if resumed else "wb") as stream:
            try:
                for block in response.iter_content(_CHUNK):
                    if self.stop.is_set():
                        raise KeyboardInterrupt
                    stream.write(block)
                    digest.update(block)
                    moved(len(block))
            except RequestException as error:
                raise _Cut(_reason(error)) from None
        return digest.hexdigest()

    @contextlib.contextmanager
    def _answer(
        self, url: str, headers: Mapping[str, str], retries: int
    ) -> Iterator[requests.Response]:
        """A successful answer to GET. Passing troubles are retried with a pause."""
        from requests import RequestException

        plain, credentials = split_credentials(url)
        for attempt in range(retries + 1):
            last = attempt == retries
            try:
                response = self._session().get(
                    plain,
                    headers=dict(headers),
                    auth=credentials,
                    stream=True,
                    timeout=self.pip.timeout_s or _TIMEOUT_S,
                    # Given here, pip's proxy goes before those of the environment.
                    proxies=dict.fromkeys(("http", "https"), self.pip.proxy)
                    if self.pip.proxy
                    else None,
                )
            except (
                OSError
            ) as error:  # requests' own are OSErrors too; a missing cert file is a plain one
                if last or not isinstance(error, RequestException) or not _passing(error):
                    raise Down(_reason(error)) from None
                self._pause(0.25 * 2**attempt)
                continue
            with response:
                code = response.status_code
                if code in (404, 410, 416):
                    raise NotFound(str(code))
                if code < 300:
                    yield response
                    return
                if last or code not in _PASSING:
                    # Object stores say 403 for one file that they lack; 401 is about who asks.
                    refused = Down if code in (401, 407) else Unreachable
                    raise refused(f"HTTP {code} {response.reason or ''}".strip() + _advice(code))
                wait = _retry_after(response.headers.get("Retry-After"))
            self._pause(0.25 * 2**attempt if wait is None else wait)

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            import requests
            from requests.adapters import HTTPAdapter

            decide = self._verify

            class RedirectAdapter(HTTPAdapter):
                """Judges each hop by its own host: trust must not follow a redirect elsewhere."""

                def send(self, request: Any, *args: Any, **options: Any) -> requests.Response:
                    return super().send(
                        request, *args, **{**options, "verify": decide(request.url)}
                    )

            session = requests.Session()
            session.mount("https://", RedirectAdapter())
            session.headers["User-Agent"] = "envbuild"
            if self.pip.client_cert:
                session.cert = self.pip.client_cert
            self._local.session = session
        return session

    def _verify(self, url: str) -> Any:
        parts = urlsplit(url)
        trusted = self.pip.trusted_hosts
        if parts.hostname in trusted or parts.netloc in trusted:
            import urllib3

            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
            return False
        return ca_bundle(self.pip, self.env) or True

    def _retries(self) -> int:
        return _RETRIES if self.pip.retries is None else self.pip.retries

    def _pause(self, seconds: float) -> None:
        if self.stop.wait(min(seconds, _LONGEST_WAIT_S)):
            raise KeyboardInterrupt


class _Cut(Exception):
    """A transfer that ended too early."""


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _copy(source: Path, partial: Path, hashes: frozenset[str], moved: Callable[[int], None]) -> str:
    """Copy a file that an index on disk lists, so that the store has it without reading the index again."""
    try:
        stream = source.open("rb")
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}") from None
    digest = hashlib.sha256()
    with stream, partial.open("wb") as copy:
        while block := stream.read(_CHUNK):
            copy.write(block)
            digest.update(block)
            moved(len(block))
    if digest.hexdigest() not in hashes:
        partial.unlink(missing_ok=True)
        raise Mismatch(digest.hexdigest())
    return digest.hexdigest()


def _passing(error: Exception) -> bool:
    """Whether trying again may help. Not with an unknown name, a refusal, or nobody there in all the timeout."""
    text = repr(error)
    return not any(
        sign in text
        for sign in (
            "NameResolution",
            "Name or service",
            "refused",
            "ConnectTimeout",
            "SSLError",
            "CERTIFICATE",
            "InvalidURL",
            "Proxy",
        )
    )


def _reason(error: Exception) -> str:
    """The innermost cause of a requests error in one line."""
    cause: BaseException = error
    while (inner := getattr(cause, "reason", None) or cause.__context__) is not None:
        if not isinstance(inner, BaseException):
            break
        cause = inner
    return redact(str(cause).splitlines()[0] if str(cause) else type(cause).__name__)


def _advice(code: int) -> str:
    advice = " (credentials? netrc and user:password@ in pip's index-url are read)"
    return advice if code in (401, 403) else ""


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header (RFC 9110 §10.2.3), given as seconds or as a date."""
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdecimal():
        return float(value)
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
