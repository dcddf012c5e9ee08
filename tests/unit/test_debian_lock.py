"""The lock's table and the fetching of what it names."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError, LockError, RecipeError
from envbuild.debian.base import fetch_debs
from envbuild.debian.lock import ARCHIVES, DebianLock, LockedDeb, default_packages, default_without, from_table
from envbuild.debian.release import DebianSuite
from envbuild.site.pip_config import PipConfig
from envbuild.store.client import Client
from envbuild.store.store import Store

locked = st.builds(
    LockedDeb,
    st.from_regex(r"[a-z0-9][a-z0-9+.\-]{1,8}", fullmatch=True),
    st.from_regex(r"([0-9]:)?[0-9][0-9a-z.+~]{0,6}(-[0-9a-z.+~]{1,4})?", fullmatch=True),
    st.sampled_from(["amd64", "all"]),
    st.from_regex(r"pool/[a-z0-9+]{1,5}/[a-z0-9+~.]{1,9}x\.deb", fullmatch=True),
    st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    st.integers(1, 1 << 40),
    st.sampled_from(ARCHIVES),
)


@given(st.lists(locked, min_size=1, unique_by=lambda deb: deb.name))
def test_a_lock_survives_its_table(debs: list[LockedDeb]) -> None:
    debs.sort(key=lambda deb: deb.name)
    lock = DebianLock("bookworm", "2026-07-11T10:16:37Z", tuple(debs))
    assert from_table(lock.as_toml_table(), "x") == lock


DEB = {
    "name": "lib",
    "version": "1:2-3",
    "arch": "amd64",
    "path": "pool/main/lib.deb",
    "sha256": "a" * 64,
    "size": 5,
    "archive": "debian",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suite": None}, "'suite': expected a string"),
        ({"date": "yesterday"}, "'date': 'yesterday' does not match"),
        ({"package": []}, "'package': expected at least 1, got 0"),
        ({"package": [3]}, r"'package\[0\]': expected a table"),
        ({"package": [DEB, DEB]}, "lib is listed twice or out of order"),
        ({"package": [DEB, DEB | {"name": "lic", "arch": "arm64"}]}, "several architectures: amd64, arm64"),
        ({"url": "http://mirror.example"}, "unknown key 'url'"),
        ({"package": [DEB | {"url": "x"}]}, r"unknown key 'url' in \[package.0\]"),
        ({"package": [DEB | {"path": "pool/../../etc/passwd.deb"}]}, "does not match"),
        ({"package": [DEB | {"path": "/pool/x.deb"}]}, "'/pool/x.deb' does not match"),
        ({"package": [DEB | {"path": "http://x/y.deb?a"}]}, "'path'"),
        ({"package": [DEB | {"sha256": "A" * 64}]}, "'sha256'"),
        ({"package": [DEB | {"size": True}]}, "'size' in .*: expected an integer"),
        ({"package": [DEB | {"archive": "else"}]}, "'else' is not accepted"),
        ({"package": [DEB | {"version": "1 2"}]}, "'1 2' does not match"),
    ],
)
def test_a_faulty_table_is_named_with_its_fault(change: dict[str, Any], message: str) -> None:
    table = {"suite": "bookworm", "date": "2026-07-11T10:16:37Z", "package": [DEB]} | change
    with pytest.raises(LockError, match=f"base.toml.*{message}"):
        from_table(table, "base.toml")


CONTENT = {"one+x": b"first", "two": b"second" * 1000}


def world(tmp_path: Path, *roots: str) -> tuple[DebianLock, Store, list[DebianSuite], Client]:
    """A lock of two packages, an empty store, and mirrors of folders that are still empty."""
    debs = []
    for name, data in CONTENT.items():
        archive = "debian-security" if name == "two" else "debian"
        digest = hashlib.sha256(data).hexdigest()
        debs.append(LockedDeb(name, "1+b1", "amd64", f"pool/{name}_1+b1.deb", digest, len(data), archive))
    lock = DebianLock("bookworm", "2026-07-11T10:16:37Z", tuple(debs))
    archives = [
        DebianSuite((tmp_path / root).as_uri(), suite)
        for root in roots
        for suite in ("bookworm", "bookworm-updates", "bookworm-security")
    ]
    return lock, Store(tmp_path), archives, Client(PipConfig(retries=0), {})


def put(folder: Path, **content: bytes) -> None:
    (folder / "pool").mkdir(parents=True, exist_ok=True)
    for name, data in (CONTENT | content).items():
        (folder / f"pool/{name}_1+b1.deb").write_bytes(data)


def test_packages_are_fetched_once_and_kept(tmp_path: Path) -> None:
    lock, store, archives, client = world(tmp_path, "mirror")
    put(tmp_path / "mirror")
    paths = fetch_debs(lock, store, archives, client)
    assert [path.read_bytes() for path in paths] == list(CONTENT.values())
    assert fetch_debs(lock, store, [], client) == paths
    assert not [p for p in (store.root / "partial").iterdir() if p.suffix != ".lock"]


def test_a_mirror_with_other_content_is_never_used(tmp_path: Path) -> None:
    lock, store, archives, client = world(tmp_path, "bad", "good")
    put(tmp_path / "bad", two=b"evil")
    put(tmp_path / "good")
    paths = fetch_debs(lock, store, archives, client)
    assert [path.read_bytes() for path in paths] == list(CONTENT.values())


def test_a_package_that_nobody_has_is_named_with_every_answer(tmp_path: Path) -> None:
    lock, store, archives, client = world(tmp_path, "bad", "none")
    put(tmp_path / "bad", two=b"evil")
    secret = DebianSuite("http://user:geheim@127.0.0.1:9/debian", "bookworm-security")
    with pytest.raises(BuildError) as caught:
        fetch_debs(lock, store, [*archives, secret], client)
    message = caught.value.message
    evil = hashlib.sha256(b"evil").hexdigest()
    assert message.startswith("two 1+b1 (amd64): no source has it with the locked hash\n    wanted sha256:")
    assert lock.packages[1].sha256 in message and f"hash mismatch: it has sha256:{evil}" in message
    assert message.count("cannot be read: No such file") == 1 and "refused" in message
    assert "geheim" not in message and "one+x" not in message
    # What arrived is kept, what was wrong is not.
    assert store.blobs.path(f"sha256:{lock.packages[0].sha256}").is_file()
    assert not store.blobs.path(f"sha256:{evil}").exists()


def test_a_mirror_without_one_package_is_asked_for_the_others(tmp_path: Path) -> None:
    lock, store, archives, client = world(tmp_path, "first", "second")
    put(tmp_path / "first")
    put(tmp_path / "second")
    (tmp_path / "first/pool/two_1+b1.deb").unlink()  # the larger one, which comes first
    (tmp_path / "second/pool/one+x_1+b1.deb").unlink()
    lock = replace(lock, packages=tuple(replace(deb, archive="debian") for deb in lock.packages))
    assert [path.read_bytes() for path in fetch_debs(lock, store, archives, client)] == list(CONTENT.values())


def test_a_cut_download_is_gone_on_with(tmp_path: Path) -> None:
    lock, store, archives, client = world(tmp_path, "mirror")
    put(tmp_path / "mirror")
    (store.folder("partial") / lock.packages[1].sha256).write_bytes(b"secon")
    assert fetch_debs(lock, store, archives, client)[1].read_bytes() == CONTENT["two"]


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    lock, _, archives, client = world(tmp_path, "mirror")
    put(tmp_path / "mirror")
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot write .*file/x/partial: Not a directory"):
        fetch_debs(lock, Store(tmp_path / "file/x"), archives, client)


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    import subprocess
    import sys

    folder = Path(sys.modules[LockedDeb.__module__].__file__ or "").parent
    modules = [f"envbuild.debian.{path.stem}" for path in folder.glob("*.py")]
    heavy = "requests", "pysequoia", "zstandard", "rich"
    script = f"import sys, {', '.join(modules)}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_defaults_are_whole_and_an_unknown_suite_is_said() -> None:
    assert {"bash", "dash", "python3.11-minimal"} <= set(default_packages("bookworm"))
    assert not set(default_packages("trixie")) & set(default_without())
    with pytest.raises(RecipeError, match="'potato'; known are bookworm and trixie"):
        default_packages("potato")
