"""Requests to one repository on one server, a registry or a mirror, with authorization and redirects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlunsplit

from envbuild.base.errors import BuildError
from envbuild.cache.http import HttpClient, Transport, failure, origin, split
from envbuild.cache.pace import Body
from envbuild.cache.retry import NotFound, RequestFailed, with_retries
from envbuild.image.credentials import PLACES, Credentials
from envbuild.image.registry_auth import Login

if TYPE_CHECKING:
    import requests

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
        scopes = [f"repository:{self.repository}:{'pull,push' if push else 'pull'}"]
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


def complain(what: str, failures: Sequence[tuple[Endpoint, RequestFailed]]) -> BuildError:
    """Return the error for the failed operation `what`: the answer of each source, and a hint about the last one."""
    answers = "; ".join(f"{endpoint.name}: {error}" for endpoint, error in failures)
    endpoint, last = failures[-1]
    wrong = isinstance(last, NotFound) or last.status == 200
    return (MissingContent if wrong else BuildError)(f"{what}: {answers}", _hint(endpoint, last))


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
