"""The remote cache that a site and the environment name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from envbuild.base.errors import UsageError
from envbuild.image.reference import parse_reference
from envbuild.image.registry import Registry, open_registry
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import CACHE, Site
from envbuild.store.client import transport_of
from envbuild.store.remote import RemoteCache
from envbuild.store.store import Store

_URL, _MODE, _KEY, _PASSPHRASE = (
    "ENVBUILD_CACHE",
    "ENVBUILD_CACHE_MODE",
    "ENVBUILD_CACHE_KEY",
    "ENVBUILD_KEY_PASSPHRASE",
)
_MODES = ("read", "write", "readwrite")
# A cache is an optimization: a slow answer must not cost more than the work that it saves.
_TIMEOUT_S, _RETRIES = 10.0, 1


def cache_of(site: Site, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the URL of the cache, "" for none, and its mode: the environment's or the site's. Raises UsageError."""
    url, mode = env.get(_URL, site.cache), env.get(_MODE, site.cache_mode)
    if not re.fullmatch(CACHE, url):  # never repeated: it may hold a password
        raise UsageError(
            f"{_URL}: no repository of a registry", "such as oci://registry.example.org/team/cache, without a tag"
        )
    if mode not in _MODES:
        raise UsageError(f"{_MODE}={mode}: expected one of {', '.join(_MODES)}")
    return url, mode


def registry_of(image: str, site: Site, pip: PipConfig, env: Mapping[str, str], *, hurried: bool = False) -> Registry:
    """Return the registry of `image`, with this site's mirrors, proxies and certificates; `hurried` for a cache."""
    reference = parse_reference(image)
    insecure = frozenset(host for host, table in site.registries.items() if table.insecure)
    transport = transport_of(pip, env, insecure)
    if hurried:
        transport = replace(transport, timeout_s=_TIMEOUT_S, retries=_RETRIES)
    return open_registry(reference, transport, env, site.registry(reference.registry).mirrors)


def open_remote(site: Site, pip: PipConfig, env: Mapping[str, str], store: Store) -> RemoteCache | None:
    """Return the cache of the site or of ENVBUILD_CACHE, None without one; no request is sent yet.

    Raises UsageError for a faulty setting or key.
    """
    url, mode = cache_of(site, env)
    if not url:
        return None
    registry = registry_of(url.removeprefix("oci://"), site, pip, env, hurried=True)
    writes = mode != "read"
    names, key = site.trust.cache_signers, env.get(_KEY)
    signers, signer = [], None
    if names or key:
        from envbuild.trust.keys import load_public, load_signer

        signers = [load_public(Path(name)) for name in names]
        if writes and not key:
            raise UsageError(
                f"the cache needs signed entries ([trust] cache_signers), and {_KEY} is not set",
                f"set {_KEY} to the file of the private key, or ENVBUILD_CACHE_MODE=read",
            )
        if writes and key:
            public = Path(names[0]) if names else None
            signer = load_signer(key, public, lambda: env.get(_PASSPHRASE, ""), option=_KEY)
    return RemoteCache(registry, store, mode != "write", writes, signers, signer)
