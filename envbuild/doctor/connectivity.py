"""Checks of package indexes, channels, archives and registries, all at once and with short timeouts."""

from __future__ import annotations

import os
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from envbuild.doctor.probe import Host, HostFinding, first_line, run_parallel, run_probe
from envbuild.environment import Environment
from envbuild.errors import HostError
from envbuild.site.pip_config import PipConfig, ca_bundle, redact
from envbuild.site.uv_config import uv_environment

PATIENCE_S = 3.0
_WAIT_S = 3.5
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
# Recipes name these; a site's mirrors replace them.
_PYTORCH = "https://download.pytorch.org/whl/cpu"
_CHANNEL = "https://conda.anaconda.org/conda-forge"
_SUITE = "bookworm"


@dataclass(frozen=True, slots=True)
class Probe:
    """A small `page` or file below `url` to probe; with `answers_refused`, status 401 counts as an answer."""

    url: str
    page: str
    answers_refused: bool = False


def impatient(environment: Environment) -> PipConfig:
    """Return pip's configuration without retries and with a short timeout."""
    return replace(environment.pip, retries=0, timeout_s=PATIENCE_S)


def ask_all(probes: Sequence[Probe], environment: Environment) -> list[str | None]:
    """Return for each probe None when it answers, else the reason without credentials."""
    answers: list[str | None] = [f"no answer in {_WAIT_S:g} s"] * len(probes)

    def one(number: int) -> None:
        try:
            answers[number] = reach(probes[number], environment)
        except Exception as error:  # noqa: BLE001 - a bad URL may raise anything
            answers[number] = redact(f"{type(error).__name__}: {error}".splitlines()[0])

    run_parallel([partial(one, n) for n in range(len(probes))], _WAIT_S)
    return answers


def reach(probe: Probe, environment: Environment) -> str | None:
    """Return None when the URL answers, else the reason. Reads only headers."""
    from envbuild.cache.retry import NotFound, RequestFailed
    from envbuild.debian.sources import debian_client

    if probe.url.startswith("file:"):
        folder = Path(unquote(urlsplit(probe.url).path))
        return None if folder.is_dir() else f"{folder}: no such folder"
    client = debian_client(impatient(environment), environment.variables)
    try:
        client.reach(f"{probe.url.rstrip('/')}/{probe.page}")
    except NotFound:
        return f"it answers, and has no {probe.page}"
    except RequestFailed as error:
        # A registry that requires authorization is reachable.
        return None if probe.answers_refused and error.status == 401 else str(error)
    return None


def package_index(host: Host) -> Iterator[HostFinding]:
    """Check the package indexes and find-links of pip's configuration."""
    environment = host.environment
    if environment is None:
        return
    pip = environment.pip
    links = [link for link in pip.find_links if "://" not in link]
    lost = [link for link in links if not Path(link).exists()]
    if lost:
        yield HostFinding(
            "find-links", "warn", f"no such place: {', '.join(map(redact, lost))}", "correct pip's configuration"
        )
    local = len(links) - len(lost)
    if host.offline or pip.no_index:
        why = "--offline" if host.offline else "pip's no-index"
        yield HostFinding(
            "package index", "info", f"not asked ({why}); {local} find-links", facts={"asked": False, "local": local}
        )
        return
    urls = [pip.index_url or _default_index(environment), *pip.extra_index_urls]
    answers = ask_all([Probe(url, "pip/") for url in urls], environment)
    yield _judged(
        "package index", urls, answers, "set pip's index-url, proxy or cert (docs/reference/site.md)", local=local
    )


def _default_index(environment: Environment) -> str:
    """Return uv's default index. Raises HostError when uv does not report it.

    Unlike Environment.default_index, this has a short timeout and no cache: a check must not write to the store.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = uv_environment(environment.pip, environment.variables, Path(folder))
        command = [environment.uv, "pip", "compile", os.devnull, "--emit-index-url", "--no-header", "--no-config"]
        _, said = run_probe([*command, "--offline", "--quiet", "--python", sys.executable], env)
    option, _, url = said.partition(" ")
    if option != "--index-url":
        raise HostError(f"uv does not tell its default index: {first_line(said)}", "set pip's index-url")
    return url


def sources(host: Host) -> Iterator[HostFinding]:
    """Check the other sources of recipes, with the site's mirrors: PyTorch's index, conda-forge, Debian, Docker Hub."""
    environment = host.environment
    if environment is None:
        return
    if host.offline:
        for name in ("conda-forge", "Debian's archive"):  # verdicts on artifacts need these
            yield HostFinding(name, "info", "not asked (--offline)", facts={"asked": False})
        return
    site = environment.site
    rows: list[tuple[str, list[Probe], str]] = []
    rows.append(("PyTorch's index", [Probe(u, "torch/") for u in site.mirrored(_PYTORCH)], "[mirrors]"))
    rows.append(
        ("conda-forge", [Probe(u, "noarch/repodata_shards.msgpack.zst") for u in site.mirrored(_CHANNEL)], "[mirrors]")
    )
    rows.append(("Debian's archive", _debian(environment), "[debian] mirror"))
    docker = site.registry("docker.io")
    hub = [Probe(mirror, "v2/", True) for mirror in docker.mirrors]
    hub.append(Probe("https://registry-1.docker.io", "v2/", True))
    rows.append(("Docker Hub", hub, '[registries."docker.io"] mirrors'))
    for name, table in site.registries.items():
        if name != "docker.io":
            scheme = "http" if table.insecure else "https"
            probes = [Probe(u, "v2/", True) for u in (*table.mirrors, f"{scheme}://{name}")]
            rows.append((f"registry {name}", probes, f'[registries."{name}"] mirrors'))
    flat = [probe for _, probes, _ in rows for probe in probes]
    answers = iter(ask_all(flat, environment))
    for name, probes, key in rows:
        mine = [next(answers) for _ in probes]
        hint = f"where this host has a mirror, name it in site.toml: {key}"
        yield _judged(name, [probe.url for probe in probes], mine, hint, needed=False)


def _debian(environment: Environment) -> list[Probe]:
    from envbuild.debian.sources import archives

    debian = environment.site.debian
    listed = archives(
        _SUITE, "2026-01-01T00:00:00Z", mirror=debian.mirror or None, security_mirror=debian.security_mirror or None
    )
    urls = dict.fromkeys(a.url for a in listed if a.suite == _SUITE and "/archive/" not in a.url)
    return [Probe(url, f"dists/{_SUITE}/InRelease") for url in urls] or [
        Probe("https://snapshot.debian.org/archive/debian", "")
    ]


def _judged(
    name: str, urls: Sequence[str], answers: Sequence[str | None], hint: str, *, needed: bool = True, local: int = 0
) -> HostFinding:  # fmt: skip
    """Return one finding for several URLs, of which one that answers is enough."""
    good = [url for url, answer in zip(urls, answers, strict=True) if answer is None]
    bad = [f"{redact(u)}: {a}" for u, a in zip(urls, answers, strict=True) if a is not None]
    facts = {"asked": True, "reached": [redact(url) for url in good], "refused": bad, "local": local}
    if good and not bad:
        return HostFinding(name, "ok", ", ".join(map(redact, good)), facts=facts)
    if good:
        return HostFinding(name, "info", f"{redact(good[0])}; not {'; '.join(bad)}", facts=facts)
    return HostFinding(name, "warn" if needed and not local else "info", "; ".join(bad) or "none is named", hint, facts)


def certificates(host: Host) -> Iterator[HostFinding]:
    """Check the effective CA bundle."""
    pip = host.environment.pip if host.environment else PipConfig()
    named = ca_bundle(pip, host.variables)
    if named is None:
        yield HostFinding(
            "authorities", "ok", "those of Python's certifi package; neither pip's cert nor a variable names others"
        )
        return
    hint = "correct pip's cert, REQUESTS_CA_BUNDLE or SSL_CERT_FILE, whichever names it"
    if os.path.isdir(named):
        yield HostFinding("authorities", "ok", f"{named} (a folder)", facts={"path": named})
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(named)
    except OSError as error:  # includes ssl.SSLError
        why = error.strerror if error.errno and not isinstance(error, ssl.SSLError) else "holds no certificate"
        yield HostFinding("authorities", "fail", f"{named}: {why}", hint, {"path": named})
        return
    held = context.get_ca_certs()
    now = time.time()
    old = [c for c in held if ssl.cert_time_to_seconds(str(c["notAfter"])) < now]
    facts = {"path": named, "count": len(held), "expired": len(old)}
    if held and len(old) == len(held):
        yield HostFinding("authorities", "fail", f"{named}: all {len(held)} certificates have expired", hint, facts)
    elif old and len(held) < 10:
        yield HostFinding(
            "authorities",
            "warn",
            f"{named}: {len(old)} of {len(held)} certificates have expired",
            "ask for a new one",
            facts,
        )
    else:
        yield HostFinding("authorities", "ok", f"{named}: {len(held)} certificates", facts=facts)


def proxies(host: Host) -> Iterator[HostFinding]:
    """Check the effective proxies, with passwords hidden."""
    found: dict[str, str] = {}
    for name in _PROXIES:
        values = {host.variables[n] for n in (name, name.upper()) if host.variables.get(n)}
        if len(values) > 1:
            yield HostFinding(
                "proxies",
                "warn",
                f"{name} and {name.upper()} differ",
                "tools read one or the other: set both to the same",
            )
            return
        found |= {name: redact(values.pop())} if values else {}
    if host.environment and host.environment.pip.proxy:
        found["pip"] = redact(host.environment.pip.proxy)
    bare = [n for n, v in found.items() if n != "no_proxy" and "://" not in v]
    if bare:
        yield HostFinding(
            "proxies", "warn", f"{', '.join(bare)}: no scheme in {found[bare[0]]}", "write http://HOST:PORT", found
        )
        return
    text = ", ".join(f"{name} {value}" for name, value in found.items())
    yield HostFinding("proxies", "ok" if found else "info", text or "none", facts=found)
