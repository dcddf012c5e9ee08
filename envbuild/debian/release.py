"""One suite of an archive: its signed Release file, and the package lists whose digests that file contains.

Sources: Debian's repository format (wiki.debian.org/DebianRepository/Format), OpenPGP (RFC 9580). As for apt, one good
signature by a known key is enough.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from envbuild.base.errors import LockError
from envbuild.base.progress import OnProgress
from envbuild.cache.download import locked_partial
from envbuild.cache.http import Mismatch, NotFound
from envbuild.debian.control import parse_control
from envbuild.debian.sources import DebianSuite
from envbuild.image.layout import Blobs
from envbuild.image.model import Descriptor
from envbuild.store.client import Client

if TYPE_CHECKING:
    from pysequoia import Cert

_SHIPPED = Path(__file__).resolve().parents[1] / "data" / "debian-keys"
# In order of preference: the smallest file first.
_FORMS = (".xz", ".gz", "")


@dataclass(frozen=True, slots=True)
class DebianRelease:
    """The content of a signed Release file.

    `date` and `valid_until` are ISO 8601 in UTC; `files` maps each path below the suite's folder to its sha256 and its
    size in bytes.
    """

    archive: DebianSuite
    date: str
    valid_until: str
    by_hash: bool
    files: Mapping[str, tuple[str, int]]


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

    Raises RequestFailed for an archive that cannot be read, LockError for one that is unsigned, badly signed, signed
    only by unknown or expired keys, or of another suite.
    """
    try:
        signed = verified(_get(f"{archive.folder}/InRelease", client), None, keys, f"{archive}: InRelease")
    except NotFound:
        content = _get(f"{archive.folder}/Release", client)
        try:
            signature = _get(f"{archive.folder}/Release.gpg", client)
        except NotFound:
            raise _unsigned(f"{archive}: Release") from None
        signed = verified(content, signature, keys, f"{archive}: Release")
    return read_release(signed.decode("utf-8", "replace"), archive)


def verified(content: bytes, signature: bytes | None, keys: Sequence[Cert], where: str) -> bytes:
    """Return the signed part of `content`, all of it with a detached `signature`. Raises LockError for a bad one."""
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
            f"{archive}: the server sends {' or '.join(sorted(map(str, names))) or 'no suite'} instead",
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
    release: DebianRelease, component: str, arch: str, client: Client, blobs: Blobs, on_progress: OnProgress
) -> Path:
    """Return the file of a component's package list for a Debian architecture, compressed or not.

    A list that `blobs` already has is not downloaded. Raises RequestFailed, and LockError when the suite has no such
    list or the archive serves another one.
    """
    archive, base = release.archive, f"{component}/binary-{arch}"
    form = next((form for form in _FORMS if f"{base}/Packages{form}" in release.files), None)
    if form is None:
        raise LockError(f"{archive} has no packages of {component} for {arch}")
    name = f"{base}/Packages{form}"
    sha256, size = release.files[name]
    digest = f"sha256:{sha256}"
    place = blobs.path(digest)
    if blobs.has(Descriptor("", digest, size)):
        return place
    # By hash first: then it is no error when the list is replaced during the download.
    urls = [f"{archive.folder}/{base}/by-hash/SHA256/{sha256}"] if release.by_hash else []
    urls.append(f"{archive.folder}/{name}")
    with locked_partial(blobs.partial(digest), client.stop) as partial:
        for url in urls:
            try:
                client.download(url, partial, frozenset([sha256]), on_progress, size)
                break
            except NotFound:
                if url == urls[-1]:
                    raise
            except Mismatch as other:
                raise LockError(
                    f"{archive}: {name} has sha256:{other.sha256}, but the signed Release says {digest}",
                    "the mirror may be in the midst of an update: try again, or name another",
                ) from None
        return blobs.adopt(partial, digest)


def _get(url: str, client: Client) -> bytes:
    if url.startswith("file:"):
        try:
            return Path(unquote(urlsplit(url).path)).read_bytes()
        except OSError as error:
            raise NotFound(f"cannot be read: {error.strerror}") from None
    return bytes(client.page(url).content)


def _late(content: bytes) -> str | None:
    """Return that this host's clock is before the date of the Release file `content`, None if it is not."""
    found = re.search(rb"^Date:(.*)$", content, re.MULTILINE | re.IGNORECASE)
    made, now = _iso(found[1].decode("ascii", "replace")) if found else "", f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return f"it was signed at {made}, and this host's clock is at {now}" if made > now else None


def _why(asked: Sequence[str], keys: Sequence[Cert]) -> str | None:
    """Return why no signature by the keys named in `asked` is good, None when there was no signature at all."""
    from pysequoia.packet import PacketPile

    if not asked:
        return None
    wanted = [name.lower() for name in asked]
    reasons = []
    for cert in keys:
        prints = {p.fingerprint for p in PacketPile.from_bytes(bytes(cert))} - {None}
        # A signature names its key by fingerprint, an old one by the fingerprint's last 16 digits.
        if not any(str(own).endswith(name) for own in prints for name in wanted):
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
    return "; ".join(reasons) or f"signed by unknown keys alone ({', '.join(wanted)})"


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
