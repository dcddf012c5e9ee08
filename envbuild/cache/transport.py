"""Settings of connections: certificates, proxies, timeouts, retries, and hosts that may be used without TLS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from envbuild.site.pip_config import PipConfig, ca_bundle

_TIMEOUT_S = 15.0
_RETRIES = 5


@dataclass(frozen=True, slots=True)
class Transport:
    """Settings of connections, from the site's settings and pip's.

    `verify` is the path of a CA bundle, or whether to check certificates. `unverified` are hosts (with or
    without port) whose certificates are not checked, `insecure` hosts that are used with plain HTTP. `proxies`
    override those of the environment. `timeout_s` limits the time to connect and the time between two reads.
    `retries` counts attempts that deliver no new data.
    """

    verify: bool | str = True
    proxies: dict[str, str] | None = field(default=None, repr=False)
    client_cert: str | None = None
    timeout_s: float = _TIMEOUT_S
    retries: int = _RETRIES
    insecure: frozenset[str] = frozenset()
    unverified: frozenset[str] = frozenset()

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


def transport_of(pip: PipConfig, env: Mapping[str, str], insecure: frozenset[str] = frozenset()) -> Transport:
    """Return the transport that pip's configuration and the environment describe."""
    return Transport(
        verify=ca_bundle(pip, env) or True,
        proxies=dict.fromkeys(("http", "https"), pip.proxy) if pip.proxy else None,
        client_cert=pip.client_cert,
        timeout_s=pip.timeout_s or _TIMEOUT_S,
        retries=_RETRIES if pip.retries is None else pip.retries,
        insecure=insecure,
        unverified=frozenset(pip.trusted_hosts),
    )


def _listed(netloc: str, hosts: Iterable[str]) -> bool:
    netloc = netloc.rpartition("@")[2].lower()
    hostname = (urlsplit(f"//{netloc}").hostname or "") if netloc else ""
    return any(host.lower() in (netloc, hostname, f"[{hostname}]") for host in hosts)
