"""Locations of Debian's archives: a site's mirror, this host's apt sources, snapshots by date.

Sources: sources.list(5) and apt.conf(5) of apt 2.6; snapshot.debian.org's URL scheme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from envbuild.base.errors import LockError
from envbuild.base.masking import redact
from envbuild.debian.control import paragraphs, parse_control
from envbuild.site.pip_config import PipConfig
from envbuild.store.client import Client

_SNAPSHOT = "https://snapshot.debian.org/archive"
_ETC_APT = Path("/etc/apt")
_OFF = frozenset({"no", "false", "without", "off", "disable"})
_SCHEMES = ("http://", "https://", "file:/")
# Debian's releases and their roles: a server that has one of them has the others too.
_RELEASES = ("bullseye", "bookworm", "trixie", "forky", "sid", "testing", "stable", "oldstable")
_PROXY = re.compile(r"^\s*Acquire::https?::Proxy\s+\"([^\"]*)\"\s*;", re.MULTILINE)


@dataclass(frozen=True, slots=True, repr=False)
class DebianSuite:
    """A suite of an archive; `url` has no final slash; `str()` and `repr()` leave out credentials in it."""

    url: str
    suite: str
    components: tuple[str, ...] = ("main",)

    @property
    def folder(self) -> str:
        """The URL of its Release file's folder."""
        return f"{self.url}/dists/{self.suite}"

    @property
    def kind(self) -> str:
        """The archive's name in locks."""
        return "debian-security" if self.suite.endswith("-security") else "debian"

    def __str__(self) -> str:
        return f"{redact(self.url)} {self.suite}"

    __repr__ = __str__


def suites(suite: str) -> tuple[str, str, str]:
    """Return the suites of a Debian release: itself, its updates, its security fixes."""
    return suite, f"{suite}-updates", f"{suite}-security"


def archives(
    suite: str, date: str, *, mirror: str | None = None, security_mirror: str | None = None, etc: Path = _ETC_APT
) -> list[DebianSuite]:
    """Return all archives to try, in order: the site's mirror, the host's apt sources, snapshots of `date`.

    Without `security_mirror`, a mirror that ends in "/debian" is assumed to have "/debian-security" beside it, as
    mirrors do. `date` is ISO 8601 in UTC.
    """
    found = []
    if mirror:
        root = mirror.rstrip("/")
        found += [DebianSuite(root, name) for name in suites(suite)[:2]]
        if security_mirror is None and root.endswith("/debian"):
            found.append(DebianSuite(root + "-security", suites(suite)[2]))
    if security_mirror:
        found.append(DebianSuite(security_mirror.rstrip("/"), suites(suite)[2]))
    found += host_archives(suite, etc)
    # A snapshot is taken hours after the date in its Release, and a URL leads to the newest snapshot not after its
    # time: try one day later first. Files that a Release lists stay in the pool for longer than a day.
    when = datetime.strptime(date, "%Y-%m-%dT%H:%M:%SZ")
    for moment in (when + timedelta(days=1), when):
        for name in suites(suite):
            root = f"{_SNAPSHOT}/{DebianSuite('', name).kind}/{moment:%Y%m%dT%H%M%SZ}"
            found.append(DebianSuite(root, name))
    return list(dict.fromkeys(found))


def host_archives(suite: str, etc: Path = _ETC_APT) -> list[DebianSuite]:
    """Return the archives in this host's apt sources that have `suite`, its updates and its security fixes.

    They are in apt's order of files; there are none if the host is not Debian. If the host uses another Debian release,
    its servers have `suite` too. Only the component main counts: every host must get the same lock. Raises LockError,
    naming the file, for one that cannot be read as apt does.
    """
    same, others = [], []
    for path in _files(etc):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LockError(f"{path}: cannot be read: {error}", "apt reads it too") from error
        listed = _deb822(text, path) if path.suffix == ".sources" else _one_line(text)
        for archive in listed:
            release, dash, part = archive.suite.partition("-")
            if "main" in archive.components and part in ("", "updates", "security"):
                found = DebianSuite(archive.url, f"{suite}{dash}{part}")
                if release == suite:
                    same.append(found)
                elif release in _RELEASES:
                    others.append(found)
    return list(dict.fromkeys(same + others))


def debian_client(pip: PipConfig, env: Mapping[str, str], etc: Path = _ETC_APT) -> Client:
    """Return a client for archives, with the proxy of pip's configuration or the environment, else that of apt."""
    named = pip.proxy or any(env.get(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"))
    proxy = None if named else apt_proxy(etc)
    return Client(replace(pip, proxy=proxy) if proxy else pip, env)


def apt_proxy(etc: Path = _ETC_APT) -> str | None:
    """Return the proxy that apt's configuration sets last in the form `Acquire::http::Proxy "…";`, None for none."""
    proxy = None
    for path in [*sorted((etc / "apt.conf.d").glob("*")), etc / "apt.conf"]:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # only root may read the file: apt, run by this user, does not read it either
        for value in _PROXY.findall(text):
            proxy = None if value in ("", "DIRECT", "false") else value
    return proxy


def _files(etc: Path) -> Iterator[Path]:
    if (etc / "sources.list").is_file():
        yield etc / "sources.list"
    if (folder := etc / "sources.list.d").is_dir():
        yield from sorted(p for p in folder.iterdir() if p.suffix in (".list", ".sources"))


def _one_line(text: str) -> Iterator[DebianSuite]:
    for line in text.splitlines():
        plain = re.sub(r"\[[^\]]*\]", " ", line.partition("#")[0], count=1)
        match plain.split():
            case ["deb", url, suite, *components] if url.startswith(_SCHEMES):
                yield DebianSuite(url.rstrip("/"), suite, tuple(components))


def _deb822(text: str, path: Path) -> Iterator[DebianSuite]:
    for paragraph in paragraphs(text):
        fields = parse_control(paragraph, str(path))
        listed = {name: fields.get(name, "").split() for name in ("types", "uris", "suites", "components")}
        if "deb" in listed["types"] and fields.get("enabled", "yes").strip().lower() not in _OFF:
            for url in listed["uris"]:
                if url.startswith(_SCHEMES):
                    for suite in listed["suites"]:
                        yield DebianSuite(url.rstrip("/"), suite, tuple(listed["components"]))
