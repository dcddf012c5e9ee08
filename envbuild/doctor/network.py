"""Checks of the network: indexes, registries, proxies and certificates, and the adapters of the fabric."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import ssl
import struct
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
from envbuild.base.workers import run_parallel
from envbuild.doctor.probe import (
    PATIENCE_S,
    Host,
    HostFinding,
    Status,
    find,
    first_line,
    read_text,
    run_probe,
)
from envbuild.environment import Environment
from envbuild.fabrics import load_fabrics
from envbuild.site.pip_config import PipConfig, ca_bundle, uv_environment

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
    """Return None for each probe that answers, else the reason, without credentials."""
    answers: list[str | None] = [f"no answer in {_WAIT_S:g} s"] * len(probes)

    def ask(number: int) -> None:
        try:
            answers[number] = _reach(probes[number], environment)
        except Exception as error:  # noqa: BLE001 - a bad URL may raise anything
            answers[number] = redact(f"{type(error).__name__}: {error}".splitlines()[0])

    run_parallel([partial(ask, n) for n in range(len(probes))], _WAIT_S)
    return answers


def _reach(probe: Probe, environment: Environment) -> str | None:
    """Return None when the URL answers, else the reason. Reads only headers."""
    from envbuild.cache.http import NotFound, RequestFailed
    from envbuild.debian.release import debian_client

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
        text = f"no such place: {', '.join(map(redact, lost))}"
        yield HostFinding("find-links", "warn", text, "correct pip's configuration")
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
        _, output = run_probe([*command, "--offline", "--quiet", "--python", sys.executable], env)
    option, _, url = output.partition(" ")
    if option != "--index-url":
        raise HostError(f"uv does not name its default index: {first_line(output)}", "set pip's index-url")
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
    from envbuild.debian.release import archives

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
    """Return one finding for several URLs: one answer is enough; `lost` is the status if none answers."""
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
        text = "those of Python's certifi package; neither pip's cert nor a variable names others"
        return [HostFinding(name, "ok", text)]
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
    old = sum(ssl.cert_time_to_seconds(str(certificate["notAfter"])) < now for certificate in held)
    facts = {"path": named, "count": len(held), "expired": old}
    if held and old == len(held):
        return [HostFinding(name, "fail", f"{named}: all {len(held)} certificates have expired", hint, facts)]
    if old and len(held) < 10:
        text = f"{named}: {old} of {len(held)} certificates have expired"
        return [HostFinding(name, "warn", text, "ask for a new one", facts)]
    return [HostFinding(name, "ok", f"{named}: {len(held)} certificates", facts=facts)]


def proxies(host: Host) -> list[HostFinding]:
    """Check the effective proxies, with passwords hidden."""
    settings: dict[str, str] = {}
    for name in _PROXIES:
        values = {host.variables[n] for n in (name, name.upper()) if host.variables.get(n)}
        if len(values) > 1:
            hint = "tools read one or the other: set both to the same"
            return [HostFinding("proxies", "warn", f"{name} and {name.upper()} differ", hint)]
        settings |= {name: redact(values.pop())} if values else {}
    if host.environment and host.environment.pip.proxy:
        settings["pip"] = redact(host.environment.pip.proxy)
    bare = [name for name, value in settings.items() if name != "no_proxy" and "://" not in value]
    if bare:
        scheme_text = f"{', '.join(bare)}: no scheme in {settings[bare[0]]}"
        return [HostFinding("proxies", "warn", scheme_text, "write http://HOST:PORT", settings)]
    text = ", ".join(f"{name} {value}" for name, value in settings.items())
    return [HostFinding("proxies", "ok" if settings else "info", text or "none", facts=settings)]


_SIOCGIFADDR = 0x8915
# Bridges and interface pairs of containers, which do not lead to other nodes.
_INNER = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "podman", "lxc")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface; `addresses` are IPv4 and IPv6 without link-local ones, `speed` is in Mbit/s."""

    name: str
    up: bool
    addresses: tuple[str, ...]
    speed: int | None

    @property
    def outer(self) -> bool:
        """Whether the interface leads to other nodes."""
        return self.up and bool(self.addresses) and not self.name.startswith(_INNER)


def interfaces(root: Path = Path("/")) -> list[Interface]:
    """Return the interfaces of this network namespace, sorted by name."""
    sixes = _ipv6(root)
    rows = []
    for name in sorted(name for _, name in socket.if_nameindex()):
        folder = root / "sys/class/net" / name
        state, speed = read_text(folder / "operstate").strip(), read_text(folder / "speed").strip()
        addresses = (*_ipv4(name), *sixes.get(name, ()))
        up = state == "up" or (state in ("unknown", "") and bool(addresses))
        rows.append(Interface(name, up, addresses, int(speed) if speed.isdigit() and int(speed) else None))
    return rows


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
        return [socket.inet_ntoa(packed[20:24])]
    return []


def _ipv6(root: Path) -> dict[str, list[str]]:
    by_interface: dict[str, list[str]] = {}
    for line in read_text(root / "proc/net/if_inet6").splitlines():
        fields = line.split()
        if len(fields) == 6:
            with contextlib.suppress(ValueError):
                address = ipaddress.IPv6Address(bytes.fromhex(fields[0]))
                if not address.is_link_local:
                    by_interface.setdefault(fields[5], []).append(str(address))
    return by_interface


def network(host: Host) -> list[HostFinding]:
    """Check the interfaces that lead to other nodes."""
    rows = interfaces(host.root)
    facts = {"interfaces": [{"name": i.name, "up": i.up, "addresses": i.addresses, "speed": i.speed} for i in rows]}
    outer = [interface for interface in rows if interface.outer]
    if not outer:
        hint = "jobs of several nodes need an interface with an address; one node works without"
        return [HostFinding("interfaces", "info", "only the loopback interface has an address", hint, facts)]
    texts = [f"{i.name} {i.addresses[0]}" + (f" ({i.speed / 1000:g} Gbit/s)" if i.speed else "") for i in outer]
    hint = "name the one that joins the nodes: site.toml, [fabric] interface" if len(outer) > 1 else ""
    return [HostFinding("interfaces", "ok", ", ".join(texts), hint, facts)]


def adapters(host: Host) -> list[HostFinding]:
    """Check the adapters of the known fabrics."""
    rows, kinds, down, mounted = [], set(), [], set()
    known = [(fabric.name, fabric.adapter) for fabric in load_fabrics().values() if fabric.adapter]
    classes = dict.fromkeys(adapter.sysfs for _, adapter in known)
    for device in (device for name in classes for device in sorted((host.root / "sys/class" / name).glob("*"))):
        driver = os.path.basename(os.path.realpath(device / "device/driver"))
        matching = [row for row in known if row[1].sysfs == device.parent.name and row[1].driver in ("", driver)]
        if not matching:
            continue
        # A fabric that names the driver takes precedence over one that accepts the whole class.
        name, adapter = max(matching, key=lambda row: row[1].driver)
        ports = [
            [read_text(port / file).strip() for file in ("link_layer", "state", "rate")]
            for port in sorted((device / "ports").glob("*"))
        ]
        kind = next((adapter.link_layers[layer] for layer, _, _ in ports if layer in adapter.link_layers), name)
        kinds.add(kind)
        mounted |= {adapter.mounted} - {""}
        rate = next((f", {rate}" for _, _, rate in ports if rate), "")
        rows.append(f"{device.name} ({kind}{rate})")
        if ports and not any("ACTIVE" in state for _, state, _ in ports):
            down.append(device.name)
    facts = {"adapters": rows, "kinds": sorted(kinds), "down": down}
    text = ", ".join(rows)
    if not rows:
        *names, last = (name for _, adapter in known for name in adapter.called)
        return [HostFinding("adapters", "info", f"no {', '.join(names)} or {last}", facts=facts)]
    if down:
        hint = "see ibstat, or let the administrator look at cable and switch"
        return [HostFinding("adapters", "warn", f"{text}; not active: {', '.join(down)}", hint, facts)]
    if absent := ", ".join(sorted(f for f in mounted if not (host.root / f.lstrip("/")).is_dir())):
        hint = f"pass {absent} into this container"
        return [HostFinding("adapters", "warn", f"{text}; {absent} is not here", hint, facts)]
    return [HostFinding("adapters", "ok", text, facts=facts)]


def libfabric(host: Host) -> list[HostFinding]:
    """Check the providers of the host's libfabric."""
    vendors = [fabric.fi_info for fabric in load_fabrics().values() if fabric.fi_info]
    tool = find("fi_info", host.variables, ":".join(["/usr/sbin", "/sbin", *vendors]))
    if tool is None:
        text = "no fi_info; artifacts bring their own libfabric, but for Slingshot"
        return [HostFinding("libfabric", "info", text)]
    code, output = run_probe([tool, "-l"], host.variables)
    if code != 0:
        return [HostFinding("libfabric", "warn", f"{tool}: {first_line(output)}")]
    providers = [line.strip().rstrip(":") for line in output.splitlines() if line.strip().endswith(":")]
    facts = {"path": tool, "providers": providers}
    return [HostFinding("libfabric", "ok", f"providers {', '.join(providers)} ({tool})", facts=facts)]
