"""Signed indexes: what is refused, and why it says so. Archives are folders; keys are made here."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from lab.debian import Key, release_text, stanza, write_archive

from envbuild.base.errors import LockError
from envbuild.debian.base import resolve_base, signed_lists
from envbuild.debian.lock import DebianLock, from_table
from envbuild.debian.release import DebianSuite, fetch_release, load_keys, read_release, suites, verified
from envbuild.image.layout import Blobs
from envbuild.site.pip_config import PipConfig
from envbuild.store.client import Client
from envbuild.store.store import Store
from envbuild.store.vault import Vault

KEY = Key()
OTHER = Key()


class Mirror:
    """A signed archive of `bookworm` in three suites, on disk."""

    def __init__(self, root: Path, key: Key = KEY) -> None:
        self.root = root
        for suite in suites("bookworm"):
            newer = "2" if suite.endswith("-security") else "1"
            write_archive(root, suite, [stanza("lib", newer), stanza("tool", depends="lib")], key)
        self.archives = [DebianSuite(root.as_uri(), suite) for suite in suites("bookworm")]
        self.keyring = root / "keys.asc"
        self.keyring.write_text(str(key.public))
        self.store = Store(root)

    def file(self, name: str, suite: str = "bookworm") -> Path:
        return self.root / "dists" / suite / name

    def resolve(self, *archives: DebianSuite, arch: str = "x86_64", packages: str = "tool", **more: Any) -> DebianLock:
        return resolve_base(
            "bookworm",
            [packages],
            [],
            arch,
            archives=archives or self.archives,
            client=client(),
            store=self.store,
            keyring=self.keyring,
            **more,
        )


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "mirror")


def client() -> Client:
    return Client(PipConfig(retries=0, timeout_s=2), {})


def test_a_good_archive_gives_a_lock_without_its_place(mirror: Mirror) -> None:
    lock = mirror.resolve()
    assert [(d.name, d.version, d.archive) for d in lock.packages] == [
        ("lib", "2", "debian-security"),
        ("tool", "1", "debian"),
    ]
    assert lock.date == "2026-07-11T10:16:37Z"
    assert str(mirror.root) not in str(lock.as_toml_table())


def test_a_list_is_fetched_once(mirror: Mirror) -> None:
    first = mirror.resolve()
    for path in mirror.root.rglob("Packages.xz"):
        path.unlink()
    assert mirror.resolve() == first


def test_a_list_by_hash_outlives_its_name(mirror: Mirror) -> None:
    name = mirror.file("main/binary-amd64/Packages.xz")
    import hashlib

    place = name.parent / "by-hash/SHA256" / hashlib.sha256(name.read_bytes()).hexdigest()
    place.parent.mkdir(parents=True)
    name.rename(place)
    name.write_bytes(b"the next one already")
    assert mirror.resolve().packages


def test_a_detached_signature_will_do(mirror: Mirror) -> None:
    content = verified(mirror.file("InRelease").read_bytes(), None, [KEY.public], "x")
    mirror.file("InRelease").unlink()
    mirror.file("Release").write_bytes(content)
    mirror.file("Release.gpg").write_bytes(KEY.detached(content.decode()))
    assert mirror.resolve().packages
    mirror.file("Release").write_bytes(content + b"X: y\n")
    with pytest.raises(LockError, match=r"Release: the signature by .* does not fit"):
        mirror.resolve()


def unsigned(mirror: Mirror) -> None:
    mirror.file("InRelease").write_text(release_text("bookworm", {}))


def release_alone(mirror: Mirror) -> None:
    mirror.file("InRelease").rename(mirror.file("Release"))


def changed(mirror: Mirror) -> None:
    path = mirror.file("InRelease")
    path.write_bytes(path.read_bytes().replace(b"Origin: Test", b"Origin: Evil"))


def cut(mirror: Mirror) -> None:
    path = mirror.file("InRelease")
    path.write_bytes(path.read_bytes()[:-200])


def by_another(mirror: Mirror) -> None:
    mirror.file("InRelease").write_bytes(OTHER.clear(release_text("bookworm", {"x": b""})))


def another_suite(mirror: Mirror) -> None:
    shutil.copy(mirror.file("InRelease", "bookworm-updates"), mirror.file("InRelease"))


def list_changed(mirror: Mirror) -> None:
    path = mirror.file("main/binary-amd64/Packages.xz")
    path.write_bytes(path.read_bytes() + b" ")


def gone(mirror: Mirror) -> None:
    mirror.file("InRelease").unlink()


def undated(mirror: Mirror) -> None:
    mirror.file("InRelease").write_bytes(KEY.clear("Codename: bookworm\nDate: soon\n"))


def in_the_future(mirror: Mirror) -> None:
    text = re.sub("Date:.*", "Date: Mon, 05 Jan 2099 00:00:00 UTC", release_text("bookworm", {"x": b""}))
    mirror.file("InRelease").write_bytes(OTHER.clear(text))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (in_the_future, "signed at 2099-01-05T00:00:00Z, and this host's clock is at 20"),
        (unsigned, "InRelease is not signed"),
        (release_alone, "Release is not signed"),
        (changed, "InRelease: the signature by .* does not fit the content"),
        (cut, "InRelease: "),
        (by_another, "InRelease: signed by unknown keys alone"),
        (another_suite, "the server sent bookworm-updates instead"),
        (list_changed, r"(?s)no main/.*Packages.xz with the sha256:\w+ of the signed Release:.*hash mismatch"),
        (gone, "not there"),
        (undated, "the Release file has no SHA256"),
    ],
)
def test_a_faulty_archive_is_refused_with_the_reason(mirror: Mirror, fault: object, message: str) -> None:
    assert callable(fault)
    fault(mirror)
    with pytest.raises(LockError, match=message) as caught:
        mirror.resolve()
    assert "no archive serves bookworm:" in caught.value.message
    assert "backtrace" not in caught.value.message and caught.value.hint


def test_an_archive_that_is_no_longer_renewed_is_refused_unless_the_user_allows_it(
    mirror: Mirror, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a mirror could withhold security fixes for ever with an old, correctly signed Release file."""
    fresh = mirror.resolve()
    path = mirror.file("InRelease")
    data = mirror.file("main/binary-amd64/Packages.xz").read_bytes()
    text = release_text(
        "bookworm", {"main/binary-amd64/Packages.xz": data}, **{"Valid-Until": "Sat, 18 Jul 2026 10:16:37 UTC"}
    )
    path.write_bytes(KEY.clear(text))
    with pytest.raises(LockError, match="Release file expired on 2026-07-18T10:16:37Z") as caught:
        mirror.resolve()
    assert "envbuild lock --allow-expired" in (caught.value.hint or "")
    assert mirror.resolve(allow_expired=True).packages == fresh.packages
    assert "warning: " in (told := capsys.readouterr().err) and "expired" in told


def test_signed_lists_are_kept_in_a_vault_and_a_renewal_uses_them_when_no_archive_is_left(
    mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their keys may have expired: the lock, made when they were valid, has their digests."""
    old = mirror.resolve(packages="lib")
    assert len(set(old.releases)) == 3 and from_table(old.as_toml_table(), "x") == old
    other = Store(tmp_path / "other")  # of a host that has the lock alone
    digests = signed_lists(old, "amd64", other, mirror.archives, client())
    assert len(digests) == 6 and f"sha256:{old.releases[0]}" in digests
    assert len(signed_lists(old, "amd64", other, [], client())) == 6
    mirror.file("InRelease").write_bytes(b"the next one")
    assert signed_lists(old, "amd64", Store(tmp_path / "late"), mirror.archives, client()) == digests[2:]
    assert "warning: the signed lists of bookworm are not kept: file:" in capsys.readouterr().err
    vault = Vault("oci:kept", Blobs(other.root / "blobs"))
    shutil.rmtree(mirror.root / "dists")
    mirror.store = Store(tmp_path / "new", vault=vault)
    with pytest.raises(LockError, match="no archive serves bookworm"):
        mirror.resolve()
    renewed = mirror.resolve(old=old)
    assert [deb.name for deb in renewed.packages] == ["lib", "tool"]
    assert (renewed.releases, renewed.date) == (old.releases, old.date)
    assert capsys.readouterr().err.count("using the lists of 2026-07-11T10:16:37Z that the lock names") == 3
    spoilt = other.blobs.path(f"sha256:{old.releases[1]}")
    spoilt.unlink()
    spoilt.write_bytes(KEY.clear("Codename: bookworm-updates"))
    mirror.store = Store(tmp_path / "third", vault=vault)
    with pytest.raises(LockError, match="no archive serves bookworm-updates"):
        mirror.resolve(old=old)


def test_an_expired_key_is_named_with_its_date(mirror: Mirror) -> None:
    past = datetime.now(UTC) - timedelta(seconds=30)
    # Keys made here are a minute old by design of the library, so this date lies in their life.
    expired = KEY.public.set_expiration(past, KEY.secret.certifier())
    mirror.keyring.write_text(str(expired))
    with pytest.raises(LockError, match=rf"the key {KEY.public.fingerprint} expired on {past:%Y-%m-%d}"):
        mirror.resolve()


def test_what_stands_outside_the_signature_is_not_read(mirror: Mirror) -> None:
    path = mirror.file("InRelease")
    path.write_bytes(path.read_bytes() + b"\nCodename: bookworm\nSHA256:\n 00 1 evil\n")
    try:
        release = fetch_release(mirror.archives[0], client(), [KEY.public])
    except LockError:
        return
    assert "evil" not in release.files


def test_an_archive_that_is_bad_is_passed_over_aloud(
    mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Mirror(tmp_path / "bad", OTHER)
    lost = DebianSuite("file:///nowhere/at/all", "bookworm")
    assert mirror.resolve(lost, *bad.archives, *mirror.archives) == mirror.resolve()
    assert "signed by unknown keys alone" in capsys.readouterr().err


def test_a_missing_architecture_or_security_suite_is_an_error(mirror: Mirror) -> None:
    with pytest.raises(LockError, match="no packages of main for arm64"):
        mirror.resolve(arch="aarch64")
    with pytest.raises(LockError, match=r"no archive serves bookworm-security:\n +none is known"):
        mirror.resolve(*mirror.archives[:2])


@pytest.mark.parametrize("content", [None, b"", b"no keys", b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n"])
def test_a_faulty_keyring_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ring.gpg"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LockError, match=r"ring\.gpg"):
        load_keys(path)


def test_a_keyring_may_hold_several_keys_armored_or_not(tmp_path: Path) -> None:
    for name, data in {"binary": bytes(KEY.public) + bytes(OTHER.public), "armored": str(KEY.public).encode()}.items():
        (tmp_path / name).write_bytes(data)
    assert {k.fingerprint for k in load_keys(tmp_path / "binary")} == {KEY.public.fingerprint, OTHER.public.fingerprint}
    assert len(load_keys(tmp_path / "armored")) == 1


def test_the_shipped_keys_are_public_and_in_force() -> None:
    keys = load_keys()
    assert len(keys) == 6
    for key in keys:
        assert str(key).startswith("-----BEGIN PGP PUBLIC KEY BLOCK") and not key.is_revoked
        assert key.expiration is not None and key.expiration > datetime.now(UTC)
        assert any("Debian" in str(user) for user in key.user_ids)


def test_suite_names_are_taken_as_well_as_codenames() -> None:
    text = release_text("bookworm", {"x": b""}, Suite="oldstable")
    assert read_release(text, DebianSuite("file:///x", "oldstable")).files
    with pytest.raises(LockError, match="sent bookworm or oldstable instead"):
        read_release(text, DebianSuite("file:///x", "trixie"))
