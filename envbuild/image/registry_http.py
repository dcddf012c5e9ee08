"""One HTTP request to a registry, its token server or its object store; what went wrong, in words.

requests never sees credentials here as its own: left to itself it would take some from netrc for any
host, and overwrite a token with them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import SplitResult, urlsplit

from envbuild.image.retry import PASSING, RequestFailed, Stopped, retry_after

if TYPE_CHECKING:
    import requests

BLOCK = 1 << 18
# A body up to this is read at once: its connection can then serve the next request.
_SMALL = 1 << 16
_USERINFO = re.compile(r"(?<=://)[^/\s?#]*@")


@dataclass(frozen=True, slots=True)
class Transport:
    """How registries are reached, from the site's settings and pip's.

    `verify`: a CA bundle's path, or whether to check certificates; `unverified`: hosts (with or without
    port) whose certificates are not checked; `insecure`: hosts that are spoken to in plain HTTP.
    `proxies` go before those of the environment; its no_proxy counts for both. `timeout_s` is for a
    connection and for each silence; `retries` for tries that bring nothing new.
    """

    verify: bool | str = True
    proxies: dict[str, str] | None = field(default=None, repr=False)
    client_cert: str | None = None
    timeout_s: float = 15.0
    retries: int = 5
    insecure: frozenset[str] = frozenset()
    unverified: frozenset[str] = frozenset()

    def is_insecure(self, netloc: str) -> bool:
        """Whether the site lets us speak plain HTTP to this host."""
        return _listed(netloc, self.insecure)


class Body(Protocol):
    """A request's body: its length is known, and it is read once, in blocks."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[bytes]: ...


@dataclass
class Wire:
    """A session with one registry. Used by several threads."""

    transport: Transport
    # The registry itself is spoken to in plain HTTP: then its redirects may lead to plain HTTP, too.
    plain: bool
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _session: requests.Session | None = field(default=None, repr=False)
    _alive: bool = False

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body | bytes | None = None,
        *,
        own: bool = True,
    ) -> requests.Response:
        """One request. A large body of the answer is not read yet; redirects are not followed.

        `own` is whether `url` lies on the registry itself, to which alone a client certificate is shown.
        Raises Failed when there is no answer.
        """
        parts = split(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestFailed("it names an address that is neither http nor https")
        if (
            parts.scheme == "http"
            and not self.plain
            and not self.transport.is_insecure(parts.netloc)
        ):
            raise RequestFailed(
                f"it leads to plain HTTP at {parts.netloc}, which is not named insecure"
            )
        try:
            response = self._opened().request(
                method,
                url,
                headers={"Accept-Encoding": "identity", **headers},
                data=body,  # any sized iterable is sent with its length
                auth=lambda request: request,
                stream=True,
                allow_redirects=False,
                timeout=self.transport.timeout_s,
                verify=self._verify(parts.netloc),
                cert=self.transport.client_cert if own else None,
                proxies=self._proxies(url),
            )
            if _is_small(response):
                response.content  # noqa: B018 - this reads it
        except (OSError, ValueError) as error:  # requests' own are OSErrors, bad URLs ValueErrors
            raise RequestFailed(reason_of(error), passing=_passing(error, self._alive)) from None
        self._alive = True
        return response

    def close(self) -> None:
        """Close the connections that are kept open."""
        if self._session is not None:
            self._session.close()

    def _opened(self) -> requests.Session:
        with self._lock:
            if self._session is None:
                self._session = _session()
            return self._session

    def _verify(self, netloc: str) -> bool | str:
        if not _listed(netloc, self.transport.unverified):
            return self.transport.verify
        import urllib3

        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        return False

    def _proxies(self, url: str) -> dict[str, str] | None:
        from requests.utils import should_bypass_proxies

        given = self.transport.proxies
        return None if given is None or should_bypass_proxies(url, no_proxy=None) else given


def _session() -> requests.Session:
    from http.cookiejar import DefaultCookiePolicy

    import requests
    from requests.adapters import HTTPAdapter

    class LargeBlockAdapter(HTTPAdapter):
        """Reads bodies to send in larger blocks than http.client's 16 KiB."""

        def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
            super().init_poolmanager(*arguments, **options, blocksize=BLOCK)

    class Session(requests.Session):
        """Leaves redirects alone; it would read ahead of one even where it is not to follow it."""

        def get_redirect_target(self, resp: requests.Response) -> None:
            return None

    session = Session()
    session.mount("https://", LargeBlockAdapter())
    session.mount("http://", LargeBlockAdapter())
    session.headers["User-Agent"] = "envbuild"
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    return session


def blocks(response: requests.Response, stop: threading.Event) -> Iterator[bytes]:
    """The answer's body in blocks. Raises Failed when it is cut, Stopped when `stop` is set."""
    from requests import RequestException

    stream = response.iter_content(BLOCK)
    while True:
        if stop.is_set():
            raise Stopped
        try:
            block = next(stream, b"")
        except RequestException as error:
            raise RequestFailed(reason_of(error), passing=True) from None
        if not block:
            return
        yield block


def read_all(response: requests.Response, limit: int, stop: threading.Event) -> bytes:
    """The answer's whole body. Raises Failed when it has more than `limit` bytes."""
    data = bytearray()
    for block in blocks(response, stop):
        data += block
        if len(data) > limit:
            raise RequestFailed(f"it sent more than {limit} bytes where so much cannot be")
    return bytes(data)


def failure(response: requests.Response) -> RequestFailed:
    """What an answer with an error status says."""
    code = response.status_code
    text = f"HTTP {code} {response.reason or ''}".strip()
    if said := _said(response):
        text += f": {said}"
    wait = retry_after(response.headers.get("Retry-After"))
    return RequestFailed(text, status=code, passing=code in PASSING, wait_s=wait)


def split(url: str) -> SplitResult:
    """The parts of a URL that a server sent. Raises Failed for what is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # read here, since it is checked only when it is read
    except ValueError:
        raise RequestFailed("it names an address that is no URL") from None
    return parts


def origin(url: str) -> tuple[str, str, int]:
    """What decides whether two URLs lie on one server: scheme, host, port."""
    parts = split(url)
    return parts.scheme, parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


def reason_of(error: BaseException) -> str:
    """The innermost cause of a requests error in one line."""
    cause = error
    while isinstance(
        inner := getattr(cause, "reason", None) or cause.__context__, BaseException
    ):  # fmt: skip
        cause = inner
    text = str(cause).partition("\n")[0] or type(cause).__name__
    return _USERINFO.sub("****@", text)


def _is_small(response: requests.Response) -> bool:
    length = response.headers.get("Content-Length", "")
    return (
        response.status_code == 204
        or (length.isdecimal() and int(length) <= _SMALL)
        or (response.request.method == "HEAD")
    )


def _listed(netloc: str, hosts: Iterable[str]) -> bool:
    netloc = netloc.rpartition("@")[2].lower()
    hostname = (urlsplit(f"//{netloc}").hostname or "") if netloc else ""
    return any(host.lower() in (netloc, hostname, f"[{hostname}]") for host in hosts)


def _passing(error: BaseException, alive: bool) -> bool:
    """Whether trying again may help. A server that answered before may be starting anew."""
    from requests import exceptions as known

    if isinstance(error, known.SSLError | known.ProxyError | ValueError):
        return False
    if isinstance(error, known.ConnectTimeout):
        return alive
    text = repr(error)
    if any(sign in text for sign in ("NameResolution", "Name or service", "refused")):
        return alive
    return isinstance(error, known.RequestException)


def _said(response: requests.Response) -> str:
    """The first error in the body, as the OCI distribution specification has them, in one line."""
    try:
        data = json.loads(read_all(response, _SMALL, threading.Event()))
        first = data["errors"][0]
        parts = [part for part in (first.get("code"), first.get("message")) if part]
        if isinstance(first.get("detail"), str):
            parts.append(first["detail"])
    except (RequestFailed, ValueError, LookupError, TypeError, AttributeError):
        return ""
    text = " ".join(": ".join(map(str, parts)).split())[:300]
    return _USERINFO.sub("****@", text)
