"""Requests to one repository on one server, a registry or a mirror, with authorization and redirects.

Sources: RFC 9110, section 11 (challenges), RFC 7617 (Basic), and Docker's "Token Authentication Specification" with
"Oauth2 Token Authentication" (Bearer), which all registries follow.
"""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, urlencode, urljoin, urlunsplit

from envbuild.base.errors import BuildError
from envbuild.base.files import parse_json
from envbuild.cache.http import (
    Body,
    HttpClient,
    NotFound,
    RequestFailed,
    Transport,
    failure,
    origin,
    read_all,
    split,
    with_retries,
)
from envbuild.image.credentials import PLACES, Credentials

if TYPE_CHECKING:
    import requests

_MAX_TOKEN = 1 << 20
_CLIENT = "envbuild"
# The specification's default for a token without an expiry.
_DEFAULT_LIFE_S = 60
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_ITEM = re.compile(rf'[\s,]*({_TOKEN})(?:\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*)))?')


class Challenge(NamedTuple):
    """An authentication scheme that a server accepts, in lower case, with its parameters."""

    scheme: str
    parameters: dict[str, str]


def parse_challenges(header: str) -> list[Challenge]:
    """Parse a WWW-Authenticate header, or several joined by commas."""
    challenges: list[Challenge] = []
    position = 0
    while match := _ITEM.match(header, position):
        position = match.end()
        name, quoted, bare = match.groups()
        if quoted is None and bare is None:
            challenges.append(Challenge(name.lower(), {}))
        elif challenges:
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else bare
            challenges[-1].parameters.setdefault(name.lower(), value)
    return challenges


@dataclass
class Login:
    """The Authorization headers for one registry. Used by several threads.

    `find` looks up credentials; it is called once, and only when the registry requires authentication.
    """

    find: Callable[[], Credentials | None] = field(repr=False)
    http: HttpClient
    retries: int
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _basic: str | None = field(default=None, repr=False)
    _bearer: Challenge | None = field(default=None, repr=False)
    # scopes → the header, and the time.monotonic() at which it expires
    _tokens: dict[tuple[str, ...], tuple[str, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def credentials(self) -> Credentials | None:
        """The registry's credentials. Raises as find_credentials does."""
        return self.find()

    def header(self, scopes: Sequence[str], stop: threading.Event) -> str | None:
        """Return the header for `scopes`; None before any challenge. Raises RequestFailed when no token is granted."""
        with self._lock:
            if self._bearer is None:
                return self._basic
            key = tuple(scopes)
            header, good_until = self._tokens.get(key, ("", 0.0))
            if not header or time.monotonic() >= good_until:
                header, good_until = self._ask_for_token(self._bearer, key, stop)
                self._tokens[key] = header, good_until
            return header

    def refused(self, header: str | None, asked: str) -> bool:
        """Record that `header` got a 401 with the challenges `asked`; return whether another attempt may succeed."""
        challenges = {challenge.scheme: challenge for challenge in reversed(parse_challenges(asked))}
        with self._lock:
            if bearer := challenges.get("bearer"):
                self._bearer = bearer
                self._tokens = {k: v for k, v in self._tokens.items() if v[0] != header}
                return True
            if "basic" in challenges and (known := self.credentials) and known.password:
                self._bearer, self._basic = None, _basic(known)
            return self._basic is not None and self._basic != header

    def _ask_for_token(self, challenge: Challenge, scopes: tuple[str, ...], stop: threading.Event) -> tuple[str, float]:
        realm = challenge.parameters.get("realm", "")
        server = realm.partition("?")[0]
        known = self.credentials
        fields = [("service", challenge.parameters.get("service", "")), ("client_id", _CLIENT)]
        fields = [(name, value) for name, value in fields if value]
        try:
            parts = split(realm)
            server = parts.netloc.rpartition("@")[2]
            if known and parts.scheme == "http" and not self.http.plain:  # also if the site allows it to this host
                raise RequestFailed("it is asked by plain HTTP, where the registry is asked by HTTPS")
            if known and known.identity_token:
                fields += [("grant_type", "refresh_token"), ("scope", " ".join(scopes))]
                fields += [("refresh_token", known.identity_token)]
                headers = {"Content-Type": "application/x-www-form-urlencoded"}
                send = partial(self.http.send, "POST", realm, headers, urlencode(fields).encode(), own=False)
            else:
                fields += [("scope", scope) for scope in scopes]
                fields += [("account", known.username)] if known and known.username else []
                query = urlencode(parse_qsl(parts.query, keep_blank_values=True) + fields)
                headers = {"Authorization": _basic(known)} if known else {}
                send = partial(self.http.send, "GET", urlunsplit(parts._replace(query=query)), headers, own=False)
            data = with_retries(lambda: _content(send, stop), self.retries, stop)
        except RequestFailed as error:
            who = f" with the credentials from {known.source}" if known else ""
            raise RequestFailed(
                f"no token from {server or 'a server that it does not name'}{who}: {error}", status=error.status
            ) from None
        return _token(data, server)


def _content(send: Callable[[], requests.Response], stop: threading.Event) -> bytes:
    with send() as response:
        if response.status_code != 200:
            raise failure(response)
        return read_all(response, _MAX_TOKEN, stop)


def _token(data: bytes, server: str) -> tuple[str, float]:
    """Return the header for a token server's response, and the time.monotonic() at which it expires."""
    try:
        answer = parse_json(data)
        token = answer.get("token") or answer.get("access_token")
        life = float(answer.get("expires_in") or _DEFAULT_LIFE_S)
    except (ValueError, AttributeError, TypeError, OverflowError):
        token, life = None, 0.0
    if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
        raise RequestFailed(f"the answer of {server} holds no token")
    # Expire the token a little early, because a request takes time.
    return f"Bearer {token}", time.monotonic() + max(life, 10.0) * 0.9


def _basic(known: Credentials) -> str:
    return "Basic " + base64.b64encode(f"{known.username}:{known.password}".encode()).decode()


_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 5
# A cached token may have expired, and so may one that another thread has cached since.
_RENEWALS = 2
_HINTS = {
    404: "check repository and tag",
    413: "a proxy before the registry limits the size of requests; raise its limit",
    429: "wait, log in for a higher limit (docker login), or name a mirror in site.toml",
}


@dataclass
class Endpoint:
    """The repository `repository` on the server `base` (scheme://host), `name` in messages; `find` looks up logins."""

    name: str
    base: str
    repository: str
    transport: Transport
    find: Callable[[], Credentials | None] = field(repr=False)
    retries: int
    # Set when a mirror is unreachable, so that it is tried only once: the reason why no request can succeed.
    dead: RequestFailed | None = None

    def __post_init__(self) -> None:
        self.http = HttpClient(self.transport, plain=self.base.startswith("http:"))
        self.login = Login(self.find, self.http, self.retries)

    def url(self, path: str) -> str:
        """Return the URL of `path` below the repository."""
        return f"{self.base}/v2/{self.repository}/{path}"

    def request(
        self,
        method: str,
        url: str,
        stop: threading.Event,
        *,
        push: bool = False,
        mount_from: str | None = None,
        ok: Sequence[int] = (200,),
        headers: Mapping[str, str] | None = None,
        body: Body | bytes | None = None,
        retries: int | None = None,
    ) -> requests.Response:
        """Send a request, and return the response with a status in `ok`, its body unread; the caller closes it.

        It is authorized to pull, with `push` also to push, and with `mount_from` to pull from that repository as well.
        `body` is iterated over each time that it is sent. Raises RequestFailed.
        """
        actions = "pull,push,delete" if method == "DELETE" else "pull,push" if push else "pull"
        scopes = [f"repository:{self.repository}:{actions}"]
        if mount_from:
            scopes.append(f"repository:{mount_from}:pull")

        def send() -> requests.Response:
            for attempt in range(_RENEWALS + 1):
                header = self.login.header(scopes, stop)
                response = self._following(method, url, headers or {}, header, body)
                if response.status_code in ok:
                    return response
                with response:
                    asked = response.headers.get("WWW-Authenticate", "")
                    ours = origin(response.url) == origin(self.base)
                    again = response.status_code == 401 and ours and attempt < _RENEWALS
                    if not (again and self.login.refused(header, asked)):
                        raise failure(response)
            raise AssertionError  # the last attempt returned or raised

        return with_retries(send, self.retries if retries is None else retries, stop)

    def follow(self, response: requests.Response) -> str:
        """Return the URL in a response's Location header. Raises RequestFailed when it has none."""
        location = response.headers.get("Location")
        if not location:
            raise RequestFailed(f"its answer HTTP {response.status_code} lacks a Location")
        return self.target(response, location)

    def target(self, response: requests.Response, location: str) -> str:
        """Return the URL to which `location`, in a header of a response, leads. Raises RequestFailed."""
        split(location)  # validates the URL: urljoin raises other exceptions for an invalid one
        target = split(urljoin(response.url, location))
        own = split(self.base)
        if (target.scheme, own.scheme) == ("http", "https") and target.hostname == own.hostname:
            # A registry behind a proxy that terminates TLS may not know that clients use https.
            target = target._replace(scheme="https", netloc=own.netloc)
        return urlunsplit(target)

    def _following(
        self, method: str, url: str, headers: Mapping[str, str], header: str | None, body: Body | bytes | None
    ) -> requests.Response:
        """Send a request and follow redirects. `header` goes to the registry only: URLs of its store hold secrets."""
        for _ in range(_MOST_REDIRECTS):
            own = origin(url) == origin(self.base)
            sent = {**headers, "Authorization": header} if own and header else headers
            response = self.http.send(method, url, sent, body, own=own)
            code = response.status_code
            if code not in _REDIRECTS or not response.headers.get("Location"):
                return response
            if method not in ("GET", "HEAD") and code not in (307, 308):
                return response
            with response:
                url = self.follow(response)
        raise RequestFailed(f"redirected more than {_MOST_REDIRECTS} times")


class MissingContent(BuildError):
    """A server answers, and does not have the content, or has another one: no fault of its own."""


def complain(action: str, failures: Sequence[tuple[Endpoint, RequestFailed]]) -> BuildError:
    """Return the error for the failed operation `action`: the answer of each source, and a hint about the last one."""
    answers = "; ".join(f"{endpoint.name}: {error}" for endpoint, error in failures)
    endpoint, last = failures[-1]
    wrong = isinstance(last, NotFound) or last.status == 200
    return (MissingContent if wrong else BuildError)(f"{action}: {answers}", _hint(endpoint, last))


def _hint(endpoint: Endpoint, error: RequestFailed) -> str | None:
    text = str(error).lower()
    host = endpoint.name
    if error.status in (401, 403):
        known = endpoint.login.credentials
        if known is None:
            return f"check the name; if it needs credentials: docker login {host} (places that are {PLACES})"
        return f"the credentials from {known.source} were used; docker login {host} renews them ({PLACES})"
    if error.status in _HINTS:
        return _HINTS[error.status]
    if "wrong version number" in text or "record layer failure" in text:
        return f"if {host} speaks plain HTTP, name it insecure in site.toml"
    if "certificate" in text:
        return "name the site's CA bundle: pip's `cert`, or REQUESTS_CA_BUNDLE"
    if error.status is None:
        return "check the registry's name, the network and the proxy, or name a mirror in site.toml"
    return None
