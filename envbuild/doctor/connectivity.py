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

from envbuild.base.errors import HostError
from envbuild.base.masking import redact
from envbuild.doctor.probe import PATIENCE_S, Host, HostFinding, Status, first_line, run_parallel, run_probe
from envbuild.environment import Environment
from envbuild.site.pip_config import PipConfig, ca_bundle
from envbuild.site.uv_config import uv_environment

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


def ask_all(probes: Sequence[Probe], environment: Environment) -> list[str | None]:
    """Return for each probe None when it answers, else the reason without credentials."""
    answers: list[str | None] = [f"no answer in {_WAIT_S:g} s"] * len(probes)

    def one(number: int) -> None:
        try:
            answers[number] = _reach(probes[number], environment)
        except Exception as error:  # noqa: BLE001 - a bad URL may raise anything
            answers[number] = redact(f"{type(error).__name__}: {error}".splitlines()[0])

    run_parallel([partial(one, n) for n in range(len(probes))], _WAIT_S)
    return answers


def _reach(probe: Probe, environment: Environment) -> str | None:
    """Return None when the URL answers, else the reason. Reads only headers."""
    from envbuild.cache.http import NotFound, RequestFailed
    from envbuild.debian.sources import debian_client

    if probe.url.startswith("file:"):
        folder = Path(unquote(urlsplit(probe.url).path))
        return None if folder.is_dir() else f"{folder}: no such folder"
    client = debian_client(replace(environment.pip, retries=0, timeout_s=PATIENCE_S), environment.variables)
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
        what = f"no such place: {', '.join(map(redact, lost))}"
        yield HostFinding("find-links", "warn", what, "correct pip's configuration")
    local = len(links) - len(lost)
    if host.offline or pip.no_index:
        why = "--offline" if host.offline else "pip's no-index"
        facts = {"asked": False, "local": local}
        yield HostFinding("package index", "info", f"not asked ({why}); {local} find-links", facts=facts)
        return
    urls = [pip.index_url or _default_index(environment), *pip.extra_index_urls]
    answers = ask_all([Probe(url, "pip/") for url in urls], environment)
    hint = "set pip's index-url, proxy or cert (docs/reference/site.md)"
    yield _judged("package index", urls, answers, hint, lost="info" if local else "warn", local=local)


def _default_index(environment: Environment) -> str:
    """Return uv's default index, found with a short timeout and no cache: a check must not write to the store."""
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
    hub = (*site.registry("docker.io").mirrors, "https://registry-1.docker.io")
    rows: list[tuple[str, list[Probe], str]] = [
        ("PyTorch's index", [Probe(u, "torch/") for u in site.mirrored(_PYTORCH)], "[mirrors]"),
        ("conda-forge", [Probe(u, "noarch/repodata_shards.msgpack.zst") for u in site.mirrored(_CHANNEL)], "[mirrors]"),
        ("Debian's archive", _debian(environment), "[debian] mirror"),
        ("Docker Hub", [Probe(u, "v2/", True) for u in hub], '[registries."docker.io"] mirrors'),
    ]
    for name, table in site.registries.items():
        if name != "docker.io":
            own = f"{'http' if table.insecure else 'https'}://{name}"
            probes = [Probe(u, "v2/", True) for u in (*table.mirrors, own)]
            rows.append((f"registry {name}", probes, f'[registries."{name}"] mirrors'))
    answers = iter(ask_all([probe for _, probes, _ in rows for probe in probes], environment))
    for name, probes, key in rows:
        hint = f"where this host has a mirror, name it in site.toml: {key}"
        yield _judged(name, [probe.url for probe in probes], [next(answers) for _ in probes], hint)


def _debian(environment: Environment) -> list[Probe]:
    from envbuild.debian.sources import archives

    debian = environment.site.debian
    listed = archives(
        _SUITE, "2026-01-01T00:00:00Z", mirror=debian.mirror or None, security_mirror=debian.security_mirror or None
    )
    urls = dict.fromkeys(a.url for a in listed if a.suite == _SUITE and "/archive/" not in a.url)
    probes = [Probe(url, f"dists/{_SUITE}/InRelease") for url in urls]
    return probes or [Probe("https://snapshot.debian.org/archive/debian", "")]


def _judged(
    name: str, urls: Sequence[str], answers: Sequence[str | None], hint: str, *, lost: Status = "info", local: int = 0
) -> HostFinding:
    """Return one finding for several URLs, of which one that answers is enough; `lost` is the status without one."""
    shown = [redact(url) for url in urls]
    good = [url for url, answer in zip(shown, answers, strict=True) if answer is None]
    bad = [f"{url}: {answer}" for url, answer in zip(shown, answers, strict=True) if answer is not None]
    facts = {"asked": True, "reached": good, "refused": bad, "local": local}
    if good and not bad:
        return HostFinding(name, "ok", ", ".join(good), facts=facts)
    if good:
        return HostFinding(name, "info", f"{good[0]}; not {'; '.join(bad)}", facts=facts)
    return HostFinding(name, lost, "; ".join(bad) or "none is named", hint, facts)


def certificates(host: Host) -> list[HostFinding]:
    """Check the effective CA bundle."""
    name = "authorities"
    pip = host.environment.pip if host.environment else PipConfig()
    named = ca_bundle(pip, host.variables)
    if named is None:
        what = "those of Python's certifi package; neither pip's cert nor a variable names others"
        return [HostFinding(name, "ok", what)]
    if os.path.isdir(named):
        return [HostFinding(name, "ok", f"{named} (a folder)", facts={"path": named})]
    hint = "correct pip's cert, REQUESTS_CA_BUNDLE or SSL_CERT_FILE, whichever names it"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(named)
    except OSError as error:  # includes ssl.SSLError
        why = error.strerror if error.errno and not isinstance(error, ssl.SSLError) else "holds no certificate"
        return [HostFinding(name, "fail", f"{named}: {why}", hint, {"path": named})]
    held = context.get_ca_certs()
    now = time.time()
    old = sum(ssl.cert_time_to_seconds(str(one["notAfter"])) < now for one in held)
    facts = {"path": named, "count": len(held), "expired": old}
    if held and old == len(held):
        return [HostFinding(name, "fail", f"{named}: all {len(held)} certificates have expired", hint, facts)]
    if old and len(held) < 10:
        what = f"{named}: {old} of {len(held)} certificates have expired"
        return [HostFinding(name, "warn", what, "ask for a new one", facts)]
    return [HostFinding(name, "ok", f"{named}: {len(held)} certificates", facts=facts)]


def proxies(host: Host) -> list[HostFinding]:
    """Check the effective proxies, with passwords hidden."""
    found: dict[str, str] = {}
    for name in _PROXIES:
        values = {host.variables[n] for n in (name, name.upper()) if host.variables.get(n)}
        if len(values) > 1:
            hint = "tools read one or the other: set both to the same"
            return [HostFinding("proxies", "warn", f"{name} and {name.upper()} differ", hint)]
        found |= {name: redact(values.pop())} if values else {}
    if host.environment and host.environment.pip.proxy:
        found["pip"] = redact(host.environment.pip.proxy)
    bare = [name for name, value in found.items() if name != "no_proxy" and "://" not in value]
    if bare:
        what = f"{', '.join(bare)}: no scheme in {found[bare[0]]}"
        return [HostFinding("proxies", "warn", what, "write http://HOST:PORT", found)]
    text = ", ".join(f"{name} {value}" for name, value in found.items())
    return [HostFinding("proxies", "ok" if found else "info", text or "none", facts=found)]
