"""HTTP for indexes and wheels: credentials, certificates, proxies, retries, resumed downloads."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from envbuild.site.pip_config import PipConfig, ca_bundle, redact

if TYPE_CHECKING:
    import requests

_CHUNK = 1 << 18
_RETRIES = 5
_TIMEOUT_S = 15.0
_LONGEST_WAIT_S = 60.0
_PASSING = frozenset({408, 429, 500, 502, 503, 504})


class Unreachable(Exception):
    """A server that cannot be used; the text says why, without credentials."""


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

    def page(self, url: str) -> requests.Response:
        """GET a page. Raises NotFound for 404 and 410, Unreachable for any other refusal."""
        from mousebender.simple import ACCEPT_SUPPORTED

        with self._answer(url, {"Accept": ACCEPT_SUPPORTED}) as response:
            response.content  # noqa: B018 - read inside of the retries' reach
            return response

    def download(
        self, url: str, partial: Path, hashes: frozenset[str], moved: Callable[[int], None]
    ) -> str:
        """Stream `url` into `partial`, going on where an earlier try was cut; returns the sha256.

        Raises Mismatch when the content has none of `hashes`, NotFound, Unreachable, or OSError
        when `partial` cannot be written.
        """
        last = "the connection was cut"
        for attempt in range(self._retries() + 1):
            if attempt:
                self._pause(min(0.25 * 2**attempt, _LONGEST_WAIT_S))
            have = partial.stat().st_size if partial.exists() else 0
            head = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
            try:
                with self._answer(url, head) as response:
                    digest = self._receive(response, partial, have, moved)
            except NotFound:
                if have:  # 416: what we have is not a beginning of what is there
                    partial.unlink(missing_ok=True)
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

        resumed = response.status_code == 206
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
    def _answer(self, url: str, headers: Mapping[str, str]) -> Iterator[requests.Response]:
        """A successful answer to GET. Passing troubles are retried with a pause."""
        from requests import RequestException

        plain, credentials = split_credentials(url)
        for attempt in range(self._retries() + 1):
            last = attempt == self._retries()
            try:
                response = self._session().get(
                    plain,
                    headers=dict(headers),
                    auth=credentials,
                    stream=True,
                    timeout=self.pip.timeout_s or _TIMEOUT_S,
                    verify=self._verify(plain),
                    # Given here, pip's proxy goes before those of the environment.
                    proxies={"http": self.pip.proxy, "https": self.pip.proxy}
                    if self.pip.proxy
                    else None,
                )
            except RequestException as error:
                if last or not _passing(error):
                    raise Unreachable(_reason(error)) from None
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
                    raise Unreachable(
                        f"HTTP {code} {response.reason or ''}".strip() + _advice(code)
                    )
                wait = _retry_after(response.headers.get("Retry-After"))
            self._pause(0.25 * 2**attempt if wait is None else wait)

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            import requests

            session = requests.Session()
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


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """`url` without its user part, and that part as (user, password), decoded."""
    from urllib.parse import unquote

    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, None
    user, _, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    return urlunsplit(parts._replace(netloc=host)), (unquote(name), unquote(password))


def with_credentials_of(url: str, index: str) -> str:
    """`url` with the user part of `index` when both are on one server: links on a page carry none."""
    mine, theirs = urlsplit(url), urlsplit(index)
    user, at, host = theirs.netloc.rpartition("@")
    if at and "@" not in mine.netloc and (mine.scheme, mine.netloc) == (theirs.scheme, host):
        return urlunsplit(mine._replace(netloc=f"{user}@{host}"))
    return url


@contextlib.contextmanager
def alone(path: Path, stop: threading.Event) -> Iterator[Path]:
    """Hold `path` for this download alone (flock); elsewhere, where there is no flock, a private name."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if stop.wait(0.05):
                    raise KeyboardInterrupt from None
                continue
            except OSError:
                path = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
            break
        yield path
    finally:
        os.close(lock)


def _passing(error: Exception) -> bool:
    """Whether trying again may help: not when a name is unknown, a port closed, a certificate refused."""
    text = repr(error)
    return not any(
        sign in text
        for sign in (
            "NameResolution",
            "Name or service",
            "refused",
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
    return (
        " (credentials? netrc and user:password@ in pip's index-url are read)"
        if code in (401, 403)
        else ""
    )


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header (RFC 9110 §10.2.3), given as seconds or as a date."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
