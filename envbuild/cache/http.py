"""HTTP client for indexes, archives, channels and registries: settings, requests, retries, and readable errors.

No message holds credentials. The client uses requests, which reads netrc, proxies and certificates as pip does.
Retries and resumed downloads (`download`) are its own: urllib3's retries cannot resume a download.

Transfers have a lower bound on their speed: a server that sends a byte now and then never times out. Only time in which
a connection is waited for counts: a slow disk is no fault of a server.
"""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from envbuild.base.files import parse_json
from envbuild.base.masking import redact

if TYPE_CHECKING:
    import requests

T = TypeVar("T")
# Statuses after which a retry may help.
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 60.0


class RequestFailed(Exception):
    """A failed request; the text states the reason, without credentials.

    `status` is None without a response. A retry of a `transient` failure may help, after `wait_s` seconds if the server
    requested a delay. `is_down` means that no request to this server can succeed: it cannot be connected to (and has
    not `answered` before another failure), or it does not accept the credentials.
    """

    wait_s: float | None = None

    def __init__(
        self, reason: str, *, status: int | None = None, transient: bool = False, answered: bool = False
    ) -> None:
        super().__init__(reason)
        self.status, self.transient = status, transient
        self.is_down = not answered and status in (None, 401, 407)


class PlainRedirect(RequestFailed):
    """A redirect from HTTPS to plain HTTP, which was not followed."""

    def __init__(self, host: str) -> None:
        text = f"it redirects from HTTPS to plain HTTP at {host}; pip's trusted-host can allow this host"
        super().__init__(text, answered=True)


class NotFound(RequestFailed):
    """The server answers, and does not have the resource."""


class Mismatch(RequestFailed):
    """Content with an unexpected digest, `sha256`. The server answered, so it is not down."""

    def __init__(self, sha256: str, kind: str = "content") -> None:
        super().__init__(f"it sent {kind} with digest sha256:{sha256}", status=200)
        self.sha256 = sha256


class Stopped(Exception):
    """Another thread failed, or the user pressed Ctrl-C; this thread stops."""


def with_retries(action: Callable[[], T], retries: int, stop: threading.Event) -> T:
    """Return `action()`; retry it up to `retries` times while its failures are passing."""
    attempt = 0
    while True:
        try:
            return action()
        except RequestFailed as error:
            if not error.transient or attempt >= retries:
                raise
            pause(attempt, error, stop)
            attempt += 1


def pause(attempt: int, error: RequestFailed, stop: threading.Event) -> None:
    """Wait before a retry: as long as the server requested, else with exponential backoff and jitter."""
    backoff = _FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.0)
    if stop.wait(min(backoff if error.wait_s is None else error.wait_s, _LONGEST_WAIT_S)):
        raise Stopped


def retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110 §10.2.3), which is a number of seconds or a date."""
    from email.utils import parsedate_to_datetime

    text = (value or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


# Bytes per second below which a transfer is given up.
SLOWEST = 10_000


class Body(Protocol):
    """Body of a request: its length is known, and it is read once, in blocks."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[bytes]: ...


class TooSlow(RequestFailed):
    """A transfer that was given up, because it moves fewer bytes than SLOWEST."""

    def __init__(self, seconds: float) -> None:
        text = f"fewer than {SLOWEST / 1000:g} kB a second for {seconds:g} s; a larger `timeout` of pip waits longer"
        super().__init__(text, transient=True, answered=True)


@dataclass(slots=True)
class Pace:
    """The speed of one transfer, in each `period_s` seconds of waiting for it."""

    period_s: float
    waited_s: float = 0.0
    moved: int = 0

    def note(self, moved: int, waited_s: float) -> None:
        """Count bytes that were moved in so many seconds. Raises TooSlow."""
        self.moved += moved
        self.waited_s += waited_s
        if self.waited_s >= self.period_s:
            if self.moved < self.waited_s * SLOWEST:
                raise TooSlow(self.period_s)
            self.moved, self.waited_s = 0, 0.0


class PacedReader(io.RawIOBase):
    """The bytes of a response, from its first line on. The wait for the first ones is not counted.

    `readinto` raises TooSlow.
    """

    def __init__(self, raw: io.RawIOBase, pace: Pace) -> None:
        self._raw, self._pace, self._begun = raw, pace, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int | None:  # type: ignore[override]
        begun = time.monotonic()
        count = self._raw.readinto(buffer)
        if self._begun and count:
            self._pace.note(count, time.monotonic() - begun)
        self._begun = True
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


@dataclass(frozen=True, slots=True)
class PacedBody:
    """The body of a request; iterating raises TooSlow when the server takes it too slowly."""

    body: Body
    period_s: float

    def __len__(self) -> int:
        return len(self.body)

    def __iter__(self) -> Iterator[bytes]:
        pace = Pace(self.period_s)
        for block in self.body:
            begun = time.monotonic()
            yield block
            pace.note(len(block), time.monotonic() - begun)


BLOCK = 1 << 18
# Bodies up to this size are read at once, so that the connection can serve the next request.
_SMALL = 1 << 16
_TIMEOUT_S = 15.0
_MOST_HEADS = 20  # informational responses before the final one
# Timeouts in which a transfer must bring what it should: see `pace`.
_PERIOD = 2
_RETRIES = 5


@dataclass(frozen=True, slots=True)
class Transport:
    """Settings of connections.

    `verify` is the path of a CA bundle, or whether to check certificates. `unverified` are hosts (with or without port)
    whose certificates are not checked, `insecure` hosts that are used with plain HTTP. `proxies` override those of the
    environment. `timeout_s` limits connecting and each read; twice that is the time over which the speed of a transfer
    is measured. `retries` counts attempts that deliver no new data.
    """

    verify: bool | str = True
    proxies: dict[str, str] | None = field(default=None, repr=False)
    client_cert: str | None = None
    timeout_s: float = _TIMEOUT_S
    retries: int = _RETRIES
    insecure: frozenset[str] = frozenset()
    unverified: frozenset[str] = frozenset()

    @property
    def period_s(self) -> float:
        """The seconds over which the speed of a transfer is measured."""
        return _PERIOD * self.timeout_s

    def is_insecure(self, netloc: str) -> bool:
        """Return whether the site allows plain HTTP to this host."""
        return _listed(netloc, self.insecure)

    def verify_of(self, url: str) -> bool | str:
        """Return requests' `verify` setting for the server of `url`."""
        if not _listed(urlsplit(url).netloc, self.unverified):
            return self.verify
        import urllib3

        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        return False


@dataclass
class HttpClient:
    """Connections to servers, shared by several threads.

    A registry needs a separate authorization for each request. Requests to one therefore carry only the given
    credentials, and the caller follows redirects: requests would take credentials from netrc for any host and
    overwrite a token with them. `as_pip` is for all other servers: requests follows redirects, keeps cookies and
    reads netrc, and pip's proxy applies even to hosts in no_proxy. With `plain`, URLs may use plain HTTP; a redirect
    from HTTPS to plain HTTP is refused even then, unless pip's trusted-host names the target.
    """

    transport: Transport
    plain: bool = False
    as_pip: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _session: requests.Session | None = field(default=None, repr=False)
    # Servers that answered before: one that refuses a connection later may be restarting.
    _alive: set[str] = field(default_factory=set, repr=False)

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body | bytes | None = None,
        *,
        own: bool = True,
        credentials: tuple[str, str] | None = None,
    ) -> requests.Response:
        """Send one request. A large body of the response is not read yet.

        `own` is whether `url` is on the server itself; only that server receives a client certificate. Raises
        RequestFailed when there is no response, or its head comes too slowly; so may the reader of its body.
        """
        # Not `from requests.utils`: in a thread, beside one that imports requests, that breaks both imports.
        import requests

        parts = split(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestFailed("it names an address that is neither http nor https")
        if parts.scheme == "http" and not self.plain and not self.transport.is_insecure(parts.netloc):
            raise RequestFailed(f"it leads to plain HTTP at {parts.netloc}, which is not named insecure")
        if body is not None and not isinstance(body, bytes):
            body = PacedBody(body, self.transport.period_s)
        proxies, response = self.transport.proxies, None
        if proxies and not self.as_pip and requests.utils.should_bypass_proxies(url, no_proxy=None):
            proxies = None
        try:
            response = self._opened().request(
                method,
                url,
                headers={"Accept-Encoding": "identity", **headers},
                data=body,  # any sized iterable is sent with its length
                # With None, requests looks into netrc.
                auth=credentials or (None if self.as_pip else lambda request: request),
                stream=True,
                allow_redirects=self.as_pip,
                timeout=self.transport.timeout_s,
                cert=self.transport.client_cert if own else None,
                proxies=proxies,
            )
            length = response.headers.get("Content-Length", "")
            small = response.status_code == 204 or (length.isdecimal() and int(length) <= _SMALL)
            small &= "Transfer-Encoding" not in response.headers  # which goes over a length
            # How an encoded body is read, its reader says: see `blocks`.
            if method == "HEAD" or (small and "Content-Encoding" not in response.headers):
                response.content  # noqa: B018 - this reads it
        except (OSError, ValueError) as error:  # requests' are OSErrors, bad URLs ValueErrors
            transient = _passing(error, parts.netloc in self._alive)
            raise RequestFailed(reason_of(error), transient=transient, answered=response is not None) from None
        self._alive.add(parts.netloc)
        return response

    def close(self) -> None:
        """Close the idle connections."""
        if self._session is not None:
            self._session.close()

    def _opened(self) -> requests.Session:
        with self._lock:
            self._session = self._session or _new_session(self.transport, self.as_pip)
            return self._session


def _new_session(transport: Transport, as_pip: bool) -> requests.Session:
    import http.client
    import ssl
    from http.cookiejar import DefaultCookiePolicy

    import requests
    from urllib3.util import ssl_

    class Response(http.client.HTTPResponse):
        """Response whose head and body are read with a lower bound on their speed."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.fp = io.BufferedReader(PacedReader(self.fp.detach(), Pace(transport.period_s)))
            self._heads = 0

        def _read_status(self) -> Any:
            self._heads += 1
            if self._heads > _MOST_HEADS:  # http.client reads "100 Continue" for ever
                raise http.client.HTTPException(f"it sent {_MOST_HEADS} heads and no answer")
            return super()._read_status()  # type: ignore[misc]

    def paced(manager: Any) -> Any:
        pools = manager.pool_classes_by_scheme = dict(manager.pool_classes_by_scheme)
        for scheme, pool in pools.items():

            class Connection(pool.ConnectionCls):  # type: ignore[misc, name-defined]
                response_class = Response

                def connect(self) -> None:
                    if hasattr(self, "cert_reqs"):  # TLS
                        # For Python 3.13, urllib3 refuses sites' authorities without key usage; pip and uv do not.
                        self.ssl_context = ssl_.create_urllib3_context(cert_reqs=ssl_.resolve_cert_reqs(self.cert_reqs))
                        self.ssl_context.verify_flags &= ~ssl.VERIFY_X509_STRICT
                    super().connect()

            pools[scheme] = type("PacedPool", (pool,), {"ConnectionCls": Connection})
        return manager

    class Adapter(requests.adapters.HTTPAdapter):
        """Adapter that verifies each hop by its own host: trust does not follow a redirect. It sends large blocks."""

        def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
            super().init_poolmanager(*arguments, **options, blocksize=BLOCK)
            paced(self.poolmanager)

        def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
            return self.proxy_manager.get(proxy) or paced(super().proxy_manager_for(proxy, **options))

        def send(self, request: Any, *args: Any, **options: Any) -> requests.Response:
            return super().send(request, *args, **{**options, "verify": transport.verify_of(request.url)})

    class Session(requests.Session):
        """Session that follows no redirect from HTTPS to plain HTTP: anybody on the way could read or change it."""

        def get_redirect_target(self, resp: requests.Response) -> str | None:
            # Without `as_pip` the caller follows redirects; requests would read ahead even without following them.
            target = super().get_redirect_target(resp) if as_pip else None
            parts = split(urljoin(resp.url, target or ""))
            host, plain = parts.netloc.rpartition("@")[2], parts.scheme == "http"
            if plain and resp.url.lower().startswith("https:") and not _listed(host, transport.unverified):
                raise PlainRedirect(host)
            return target

    session = Session()
    session.mount("https://", Adapter())
    session.mount("http://", Adapter())
    session.headers["User-Agent"] = "envbuild"
    if not as_pip:
        session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    return session


def blocks(response: requests.Response, stop: threading.Event, *, as_stored: bool = False) -> Iterator[bytes]:
    """Yield the response's body in blocks. Raises RequestFailed when it is cut off, Stopped when `stop` is set.

    A file is read `as_stored`: servers send a .tar.gz with `Content-Encoding: gzip`, although nobody asked for one, and
    mean the file itself.
    """
    import requests

    if "," in response.headers.get("Content-Encoding", ""):  # each multiplies what the next one unpacks
        raise RequestFailed("it sent a body with several encodings", answered=True)
    if as_stored:
        response.raw.headers.pop("Content-Encoding", None)  # by which urllib3 would unpack it
    stream = response.iter_content(BLOCK)
    while True:
        if stop.is_set():
            raise Stopped
        try:
            block = next(stream, b"")
        except requests.RequestException as error:
            raise RequestFailed(reason_of(error), transient=True, answered=True) from None
        if not block:
            return
        yield block


def read_all(response: requests.Response, limit: int, stop: threading.Event) -> bytes:
    """Return the response's body. Raises RequestFailed when it has more than `limit` bytes."""
    data = bytearray()
    for block in blocks(response, stop):
        data += block
        if len(data) > limit:
            raise RequestFailed(f"it sent more than {limit} bytes; giving up", answered=True)
    return bytes(data)


def failure(response: requests.Response, advice: str = "") -> RequestFailed:
    """Return the error for a response with an error status, with `advice` for errors of authorization (401, 403)."""
    code, message = response.status_code, _said(response)
    text = f"HTTP {code} {response.reason or ''}".strip() + (f": {message}" if message else "")
    if code in (401, 403):
        text += advice
    error = (NotFound if code in (404, 410) else RequestFailed)(text, status=code, transient=code in TRANSIENT)
    error.wait_s = retry_after(response.headers.get("Retry-After"))
    return error


def split(url: str) -> SplitResult:
    """Return the parts of a URL that a server sent.

    Raises RequestFailed for an invalid URL, and for one in which requests, which connects, would see another host: who
    gets credentials is decided here.
    """
    import requests

    try:
        parts = urlsplit(url)
        _ = parts.port  # urlsplit validates the port only when it is read
        host = requests.models.parse_url(url).host or ""
    except ValueError:
        raise RequestFailed("it names an address that is no URL") from None
    same = (
        not parts.netloc or (parts.hostname or "").replace("%25", "%") == host.strip("[]").lower() or not url.isascii()
    )
    if not same or "\\" in url or any(ord(character) < 32 for character in url):
        raise RequestFailed("it names an address in which readers see different hosts")
    return parts


def origin(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port; two URLs are on the same server if these are equal."""
    parts = split(url)
    return parts.scheme, parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


def reason_of(error: BaseException) -> str:
    """Return the innermost cause of a requests error, in one line."""
    cause = error
    # urllib3's ProxyError has its cause as `original_error`.
    names = ("reason", "original_error", "__context__")
    while inner := next(
        (inner_error for name in names if isinstance(inner_error := getattr(cause, name, None), BaseException)), None
    ):
        cause = inner
    return redact(str(cause).partition("\n")[0] or type(cause).__name__)


def _passing(error: BaseException, alive: bool) -> bool:
    """Return whether a retry may help. A server that answered before may be restarting."""
    import requests

    known = requests.exceptions

    if isinstance(error, known.SSLError | known.ProxyError | ValueError):
        return False
    signs = ("NameResolution", "Name or service", "refused")
    if isinstance(error, known.ConnectTimeout) or any(sign in repr(error) for sign in signs):
        return alive
    return isinstance(error, known.RequestException)


def _said(response: requests.Response) -> str:
    """Return the first error in the body (format: OCI distribution specification), in one line, or "" if none."""
    try:
        first = parse_json(read_all(response, _SMALL, threading.Event()))["errors"][0]
        parts = [part for part in (first.get("code"), first.get("message")) if part]
        if isinstance(first.get("detail"), str):
            parts.append(first["detail"])
    except (RequestFailed, ValueError, LookupError, TypeError, AttributeError):
        return ""
    return redact(" ".join(": ".join(map(str, parts)).split())[:300])


def _listed(netloc: str, hosts: Iterable[str]) -> bool:
    netloc = netloc.rpartition("@")[2].lower()
    hostname = (urlsplit(f"//{netloc}").hostname or "") if netloc else ""
    return any(host.lower() in (netloc, hostname, f"[{hostname}]") for host in hosts)
