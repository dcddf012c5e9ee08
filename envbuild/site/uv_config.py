"""Configuration that makes uv resolve from the same sources as pip: a uv.toml and the environment of uv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from envbuild.base.process import of_caller
from envbuild.base.toml import toml_pairs, toml_value
from envbuild.site.pip_config import PipConfig, ca_bundle

# uv's variables that are kept: they affect how uv works (speed, credentials, links, the location of its
# Pythons), but not the resolution. Any other UV_* variable (UV_INDEX, UV_PYTHON, UV_EXCLUDE_NEWER,
# UV_PRERELEASE, UV_CONFIG_FILE, ...) could give two users different locks of one recipe.
_KEPT = (
    "UV_CREDENTIALS_DIR",
    "UV_HTTP_RETRIES",
    "UV_HTTP_TIMEOUT",
    "UV_KEYRING_PROVIDER",
    "UV_LINK_MODE",
    "UV_NATIVE_TLS",
    "UV_REQUEST_TIMEOUT",
    "UV_SYSTEM_CERTS",
)
_KEPT_PREFIXES = ("UV_CONCURRENT_", "UV_PYTHON_")
# The caller's active environment must not affect the interpreter that uv inspects; nor may its Python's settings.
_DROPPED = ("VIRTUAL_ENV", "CONDA_PREFIX")


def uv_settings(pip: PipConfig, indexes: Sequence[str]) -> str:
    """Return a uv.toml with a recipe's `indexes`, then pip's. It may hold credentials: no command line may show it."""
    lines = [
        # pip takes the best version from all indexes together. uv's default stops at the first index that knows
        # a name, so an old copy on a recipe's index would hide every newer version. Locked hashes protect
        # against a file from the wrong index.
        'index-strategy = "unsafe-best-match"'
    ]
    if pip.no_index:
        lines.append("no-index = true")
    if pip.find_links:
        lines.append(f"find-links = {toml_value(pip.find_links)}")
    if pip.trusted_hosts:
        lines.append(f"allow-insecure-host = {toml_value(pip.trusted_hosts)}")
    if not pip.no_index:
        for url in dict.fromkeys([*indexes, *pip.extra_index_urls]):
            if url != pip.index_url:
                lines += ["", "[[index]]", f"url = {toml_value(url)}"]
        if pip.index_url is not None:
            lines += ["", "[[index]]", f"url = {toml_value(pip.index_url)}", "default = true"]
    return "\n".join(lines) + "\n"


def bound_project(requirements: Sequence[str], bound: Mapping[str, str]) -> str:
    """Return a pyproject.toml with `requirements`, each of which uv takes from its index in `bound` alone.

    `bound` maps normalised names of packages to URLs of indexes, which serve nothing else. Only a project can bind
    packages (uv's documentation, "Pinning a package to an index"); uv.toml cannot.
    """
    names = {url: f"index-{number}" for number, url in enumerate(dict.fromkeys(bound.values()))}
    lines = ["[project]", 'name = "the-recipe"', 'version = "0"', f"dependencies = {toml_value(requirements)}"]
    for url, name in names.items():
        lines += ["", "[[tool.uv.index]]", f'name = "{name}"', f"url = {toml_value(url)}", "explicit = true"]
    lines += ["", "[tool.uv.sources]", *toml_pairs({one: {"index": names[url]} for one, url in bound.items()})]
    return "\n".join(lines) + "\n"


def uv_environment(pip: PipConfig, env: Mapping[str, str], cache_dir: Path) -> dict[str, str]:
    """Return the environment for uv.

    It is `env` without the variables that would change a resolution, with pip's certificates, proxy, timeout and
    retries, and with uv's cache at `cache_dir`.
    """
    result = {name: value for name, value in of_caller(env).items() if _kept(name)}
    result |= {"UV_CACHE_DIR": str(cache_dir), "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    if bundle := ca_bundle(pip, env):
        result["SSL_CERT_FILE"] = bundle
    if pip.client_cert:
        result["SSL_CLIENT_CERT"] = pip.client_cert
    if pip.proxy:
        # uv reads the lower-case names first, as curl does.
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            result[name] = pip.proxy
    if pip.timeout_s is not None:
        result.setdefault("UV_HTTP_TIMEOUT", str(max(1, round(pip.timeout_s))))
    if pip.retries is not None:
        result.setdefault("UV_HTTP_RETRIES", str(pip.retries))
    return result


def _kept(name: str) -> bool:
    if name.startswith("UV_"):
        return name in _KEPT or name.startswith(_KEPT_PREFIXES)
    return name not in _DROPPED
