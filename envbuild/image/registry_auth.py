"""Authorization at a registry: challenges and tokens.

Sources: RFC 9110, section 11 (challenges), RFC 7617 (Basic), and Docker's "Token Authentication Specification" with
"Oauth2 Token Authentication" (Bearer), which all registries follow.
"""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlunsplit

from envbuild.base.files import parse_json
from envbuild.cache.http import HttpClient, failure, read_all, split
from envbuild.cache.retry import RequestFailed, with_retries
from envbuild.image.credentials import Credentials

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
    found: list[Challenge] = []
    position = 0
    while match := _ITEM.match(header, position):
        position = match.end()
        name, quoted, bare = match.groups()
        if quoted is None and bare is None:
            found.append(Challenge(name.lower(), {}))
        elif found:
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else bare
            found[-1].parameters.setdefault(name.lower(), value)
    return found


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
