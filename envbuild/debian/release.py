"""Debian's archives, and one suite of an archive: its signed Release file, and the package lists with their digests.

An archive is a site's mirror, one of this host's apt sources, or a snapshot by date. Sources: sources.list(5) and
apt.conf(5) of apt 2.6; snapshot.debian.org's URL scheme; Debian's repository format
(wiki.debian.org/DebianRepository/Format), OpenPGP (RFC 9580). As for apt, one good signature by a known key is enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from envbuild.base.errors import LockError
from envbuild.base.masking import redact
from envbuild.base.progress import OnProgress
from envbuild.cache.http import NotFound
from envbuild.debian.control import paragraphs, parse_control
from envbuild.site.pip_config import PipConfig
from envbuild.store.client import Client, SourceAnswer, fetch_file
from envbuild.store.store import Store

if TYPE_CHECKING:
    from pysequoia import Cert

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
    """Return the archives in order of precedence: the site's mirror, the host's apt sources, snapshots of `date`.

    Without `security_mirror`, a mirror ending in "/debian" is assumed to have "/debian-security" beside it.
    `date` is ISO 8601 in UTC.
    """
    debian_suites = []
    if mirror:
        root = mirror.rstrip("/")
        debian_suites += [DebianSuite(root, name) for name in suites(suite)[:2]]
        if security_mirror is None and root.endswith("/debian"):
            debian_suites.append(DebianSuite(root + "-security", suites(suite)[2]))
    if security_mirror:
        debian_suites.append(DebianSuite(security_mirror.rstrip("/"), suites(suite)[2]))
    debian_suites += host_archives(suite, etc)
    # A snapshot is taken hours after the date in its Release, and a URL leads to the newest snapshot not after its
    # time: try one day later first. Files that a Release lists stay in the pool for longer than a day.
    when = datetime.strptime(date, "%Y-%m-%dT%H:%M:%SZ")
    for moment in (when + timedelta(days=1), when):
        for name in suites(suite):
            root = f"{_SNAPSHOT}/{DebianSuite('', name).kind}/{moment:%Y%m%dT%H%M%SZ}"
            debian_suites.append(DebianSuite(root, name))
    return list(dict.fromkeys(debian_suites))


def host_archives(suite: str, etc: Path = _ETC_APT) -> list[DebianSuite]:
    """Return the archives in this host's apt sources that have `suite`, its updates and its security fixes.

    They are in apt's order of files; there are none if the host is not Debian. For a host with another Debian release,
    its servers are used for `suite`. Only the component main counts: every host must get the same lock. Raises
    LockError, naming the file, for a file that is not valid for apt.
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
                debian_suite = DebianSuite(archive.url, f"{suite}{dash}{part}")
                if release == suite:
                    same.append(debian_suite)
                elif release in _RELEASES:
                    others.append(debian_suite)
    return list(dict.fromkeys(same + others))


def debian_client(pip: PipConfig, env: Mapping[str, str], etc: Path = _ETC_APT) -> Client:
    """Return a client for archives, with the proxy of pip's configuration, the environment or else apt."""
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


_SHIPPED = Path(__file__).resolve().parents[1] / "data" / "debian-keys"
# In order of preference: the smallest file first.
_FORMS = (".xz", ".gz", "")


@dataclass(frozen=True, slots=True)
class DebianRelease:
    """The content of a signed Release file.

    `date` and `valid_until` are ISO 8601 in UTC; `files` maps each path below the suite's folder to its sha256 and its
    size in bytes. `signed` is the InRelease file, b"" for a detached signature.
    """

    archive: DebianSuite
    date: str
    valid_until: str
    by_hash: bool
    files: Mapping[str, tuple[str, int]]
    signed: bytes = b""


def load_keys(keyring: Path | None = None) -> list[Cert]:
    """Return the keys in `keyring` (armored or binary), else those shipped. Raises LockError when there are none."""
    from pysequoia import Cert

    files = sorted(_SHIPPED.glob("*.asc")) if keyring is None else [keyring]
    keys: list[Cert] = []
    for path in files:
        try:
            keys += Cert.split_bytes(path.read_bytes())
        except OSError as error:
            raise LockError(f"the keyring {path} cannot be read: {error.strerror}") from error
        except Exception as error:  # noqa: BLE001 - pysequoia raises whatever Rust's anyhow becomes
            raise LockError(f"the keyring {path} holds no OpenPGP keys: {_first(error)}") from None
    if not keys:
        raise LockError(f"there are no keys in {keyring or _SHIPPED}", "reinstall envbuild")
    return keys


def fetch_release(archive: DebianSuite, client: Client, keys: Sequence[Cert]) -> DebianRelease:
    """Fetch and verify an archive's InRelease, or its Release and Release.gpg.

    Raises RequestFailed for an unreadable archive, LockError for a Release file that is unsigned, badly signed, signed
    only by unknown or expired keys, or of another suite.
    """
    raw = b""
    try:
        raw = _get(f"{archive.folder}/InRelease", client)
        signed = verified(raw, None, keys, f"{archive}: InRelease")
    except NotFound:
        content = _get(f"{archive.folder}/Release", client)
        try:
            signature = _get(f"{archive.folder}/Release.gpg", client)
        except NotFound:
            raise _unsigned(f"{archive}: Release") from None
        signed = verified(content, signature, keys, f"{archive}: Release")
    return replace(read_release(signed.decode("utf-8", "replace"), archive), signed=raw)


def locked_release(signed: bytes, archive: DebianSuite) -> DebianRelease:
    """Return the content of an InRelease file whose digest is locked. Raises LockError.

    Its signature was verified when it was locked; the keys may have expired since.
    """
    content = re.search(r"\n\n(.*?)\n-----BEGIN PGP SIGNATURE-----", signed.decode("utf-8", "replace"), re.DOTALL)
    return replace(read_release(content[1] if content else "", archive), signed=signed)


def verified(content: bytes, signature: bytes | None, keys: Sequence[Cert], where: str) -> bytes:
    """Return the signed part of `content`; all of it with a detached `signature`. Raises LockError if it is bad."""
    from pysequoia import Sig, verify

    asked: list[str] = []

    def known(ids: Sequence[str]) -> list[Cert]:
        asked.extend(ids)
        return list(keys)

    if signature is None and not content.lstrip().startswith(b"-----BEGIN PGP SIGNED MESSAGE-----"):
        raise _unsigned(where)
    try:
        if signature is None:  # the result excludes text outside the signature
            return bytes(verify(bytes=content, store=known).bytes or b"")
        verify(bytes=content, store=known, signature=Sig.from_bytes(signature))
        return content
    except Exception as error:  # noqa: BLE001 - pysequoia raises whatever Rust's anyhow becomes
        raise LockError(
            f"{where}: {_late(content) or _why(asked, keys) or _first(error)}",
            "set this host's clock"
            if _late(content)
            else "a proxy or mirror may have changed it; a mirror that signs with its own key needs that key as the "
            "site's keyring",
        ) from None


def read_release(text: str, archive: DebianSuite) -> DebianRelease:
    """Parse the text of a verified Release file. Raises LockError when it is of another suite."""
    fields = parse_control(text.strip("\n"), f"{archive}: Release")
    names = {fields.get("suite"), fields.get("codename")} - {None}
    if archive.suite not in names:
        raise LockError(
            f"{archive}: the server sent {' or '.join(sorted(map(str, names))) or 'no suite'} instead",
            "correct the mirror's URL",
        )
    files = {}
    for line in fields.get("sha256", "").splitlines():
        match line.split():
            case [digest, size, path] if size.isdecimal() and len(size) <= 18 and len(digest) == 64:
                files[path] = (digest.lower(), int(size))
    date = _iso(fields.get("date", ""))
    if not date or not files:
        raise LockError(f"{archive}: the Release file has no {'Date' if files else 'SHA256'}")
    valid_until, by_hash = _iso(fields.get("valid-until", "")), fields.get("acquire-by-hash") == "yes"
    return DebianRelease(archive, date, valid_until, by_hash, files)


def fetch_packages(
    release: DebianRelease, component: str, arch: str, client: Client, store: Store, on_progress: OnProgress
) -> Path:
    """Return the file of a component's package list for a Debian architecture, compressed or not.

    It comes from `store`, its vault or the archive. Raises LockError when the suite has no such list, and when the
    archive does not serve it, or one with another sha256.
    """
    archive, base = release.archive, f"{component}/binary-{arch}"
    form = next((form for form in _FORMS if f"{base}/Packages{form}" in release.files), None)
    if form is None:
        raise LockError(f"{archive} has no packages of {component} for {arch}")
    name = f"{base}/Packages{form}"
    sha256, size = release.files[name]
    if path := store.find("", sha256):
        return path
    # By hash first: then it is no error when the list is replaced during the download.
    urls = [f"{archive.folder}/{base}/by-hash/SHA256/{sha256}"] if release.by_hash else []
    urls += [f"{archive.folder}/{name}"]
    places, answers = [(str(archive), url) for url in urls if archive.url], list[SourceAnswer]()
    if path := fetch_file(sha256, "", sha256, places, answers, store, client, on_progress, {}, size):
        return path
    raise LockError(
        "\n    ".join([f"{archive}: no {name} with the sha256:{sha256} of the signed Release:", *map(str, answers)]),
        "the mirror may be updating: try again, or name another mirror",
    )


def _get(url: str, client: Client) -> bytes:
    if url.startswith("file:"):
        try:
            return Path(unquote(urlsplit(url).path)).read_bytes()
        except OSError as error:
            raise NotFound(f"cannot be read: {error.strerror}") from None
    return bytes(client.page(url).content)


def _late(content: bytes) -> str | None:
    """Return an explanation if this host's clock is before the date of the Release file `content`, else None."""
    match = re.search(rb"^Date:(.*)$", content, re.MULTILINE | re.IGNORECASE)
    made, now = _iso(match[1].decode("ascii", "replace")) if match else "", f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return f"it was signed at {made}, and this host's clock is at {now}" if made > now else None


def _why(asked: Sequence[str], keys: Sequence[Cert]) -> str | None:
    """Return why no signature by the keys `asked` is valid, None if there is no signature."""
    from pysequoia.packet import PacketPile

    if not asked:
        return None
    fingerprints = [name.lower() for name in asked]
    reasons = []
    for cert in keys:
        prints = {p.fingerprint for p in PacketPile.from_bytes(bytes(cert))} - {None}
        # A signature names its key by fingerprint, an old one by the fingerprint's last 16 digits.
        if not any(str(own).endswith(name) for own in prints for name in fingerprints):
            continue
        try:
            ends = cert.expiration
        except Exception as error:  # noqa: BLE001 - pysequoia raises whatever Rust's anyhow becomes
            reasons.append(f"the key {cert.fingerprint} is not valid at this host's time: {_first(error)}")
            continue
        if ends is not None and ends < datetime.now(UTC):
            reasons.append(f"the key {cert.fingerprint} expired on {ends:%Y-%m-%d}")
        elif cert.is_revoked:
            reasons.append(f"the key {cert.fingerprint} is revoked")
        else:
            reasons.append(f"the signature by {cert.fingerprint} does not fit the content")
    return "; ".join(reasons) or f"signed by unknown keys alone ({', '.join(fingerprints)})"


def _unsigned(where: str) -> LockError:
    return LockError(f"{where} is not signed", "name a mirror that keeps Debian's signatures")


def _iso(date: str) -> str:
    try:
        return parsedate_to_datetime(date).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError):
        return ""


def _first(error: BaseException) -> str:
    """Return the first line of an error; Sequoia prints a backtrace after it."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
