"""Where archives are looked for: mirrors, the host's apt sources, snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import LockError
from envbuild.debian.release import DebianSuite, apt_proxy, archives, debian_client, host_archives
from envbuild.site.pip_config import PipConfig

DATE = "2026-11-19T02:12:54Z"
LIST = """\
# deb http://old.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/x.gpg] http://one.example/debian/ bookworm main contrib # ours
deb-src http://one.example/debian bookworm main
deb cdrom:[Debian]/ bookworm main
deb http://one.example/debian-security bookworm-security main
deb http://other.example/tools bookworm stable
deb http://other.example/backports bookworm-backports main
"""
SOURCES = """\
# a comment
Types: deb deb-src
URIs: http://two.example/debian https://three.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBGPMxGABEADKNqZgLwxPBlJ0
 -----END PGP PUBLIC KEY BLOCK-----

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""


def etc(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        place = tmp_path / name.replace("__", "/").replace("_", ".")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return tmp_path


def test_one_line_and_deb822_sources_are_read_in_apts_order(tmp_path: Path) -> None:
    folder = etc(tmp_path, sources_list=LIST, sources_list_d__debian_sources=SOURCES)
    (folder / "sources.list.d").mkdir(exist_ok=True)
    (folder / "sources.list.d/debian.sources").write_text(SOURCES)
    (folder / "sources.list.d/ignored.save").write_text("deb http://saved.example/debian bookworm main")
    assert host_archives("bookworm", folder) == [
        DebianSuite("http://one.example/debian", "bookworm"),
        DebianSuite("http://one.example/debian-security", "bookworm-security"),
        DebianSuite("http://two.example/debian", "bookworm"),
        DebianSuite("http://two.example/debian", "bookworm-updates"),
        DebianSuite("https://three.example/debian", "bookworm"),
        DebianSuite("https://three.example/debian", "bookworm-updates"),
    ]


def test_a_host_of_another_debian_release_knows_the_servers(tmp_path: Path) -> None:
    folder = etc(tmp_path, sources_list=LIST)
    assert host_archives("trixie", folder) == [
        DebianSuite("http://one.example/debian", "trixie"),
        DebianSuite("http://one.example/debian-security", "trixie-security"),
    ]


@pytest.mark.parametrize("text", ["deb http://u.example/ubuntu jammy main", "", "deb\n", "rubbish [ ]"])
def test_a_host_that_is_not_debian_names_nothing(tmp_path: Path, text: str) -> None:
    assert host_archives("bookworm", etc(tmp_path, sources_list=text)) == []
    assert host_archives("bookworm", tmp_path / "missing") == []


def test_a_sources_file_that_apt_would_refuse_is_named(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/a.sources").write_text("Types: deb\nwhat is this\n")
    with pytest.raises(LockError, match=r"a\.sources, line 2: neither"):
        host_archives("bookworm", tmp_path)


@given(st.text(max_size=200))
def test_no_text_of_a_list_file_is_an_error(text: str) -> None:
    from envbuild.debian.release import _one_line

    assert all(a.url.startswith(("http", "file:")) for a in _one_line(text))


def test_a_mirror_comes_first_and_snapshots_last(tmp_path: Path) -> None:
    folder = etc(tmp_path, sources_list=LIST)
    found = archives("bookworm", DATE, mirror="https://site.example/debian/", etc=folder)
    assert [str(a) for a in found[:4]] == [
        "https://site.example/debian bookworm",
        "https://site.example/debian bookworm-updates",
        "https://site.example/debian-security bookworm-security",
        "http://one.example/debian bookworm",
    ]
    snapshot = "https://snapshot.debian.org/archive"
    assert str(found[-1]) == f"{snapshot}/debian-security/20261119T021254Z bookworm-security"
    assert str(found[-6]) == f"{snapshot}/debian/20261120T021254Z bookworm"


def test_a_security_mirror_is_taken_as_it_is(tmp_path: Path) -> None:
    found = archives("trixie", DATE, mirror="https://m.example/deb", security_mirror="file:///srv/sec", etc=tmp_path)
    assert next(a.url for a in found if a.kind == "debian-security") == "file:///srv/sec"
    assert not any("deb-security" in a.url for a in found)


def test_credentials_of_a_mirror_are_not_shown() -> None:
    archive = DebianSuite("https://user:geheim@site.example/debian", "bookworm")
    assert "geheim" not in f"{archive} {archive!r}" and "user:****@site.example" in str(archive)


@pytest.mark.parametrize(
    ("text", "proxy"),
    [
        ('Acquire::http::Proxy "http://proxy.example:3142";', "http://proxy.example:3142"),
        ('Acquire::https::Proxy  "http://p.example" ;\nAcquire::Retries "3";', "http://p.example"),
        ('Acquire::http::Proxy "http://p.example";\nAcquire::http::Proxy "DIRECT";', None),
        ('// Acquire::http::Proxy "http://p.example";', None),
        ("", None),
    ],
)
def test_apts_proxy_is_used_where_nothing_else_names_one(tmp_path: Path, text: str, proxy: str | None) -> None:
    (tmp_path / "apt.conf.d").mkdir()
    (tmp_path / "apt.conf.d/01proxy").write_text(text)
    assert apt_proxy(tmp_path) == proxy
    assert debian_client(PipConfig(), {}, tmp_path).pip.proxy == proxy
    assert debian_client(PipConfig(), {"http_proxy": "http://e.example"}, tmp_path).pip.proxy is None
    assert debian_client(PipConfig(proxy="http://pip.example"), {}, tmp_path).pip.proxy == "http://pip.example"
