"""Store, sources and client by their edges: hostile names, pages of old servers, waits, stale files."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.host import Host
from lab.wheels import make_wheel
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from envbuild.base.errors import BuildError
from envbuild.cache.download import locked_partial
from envbuild.cache.http import RequestFailed
from envbuild.run_environment import load_environment, with_tmpdir
from envbuild.site.pip_config import PipConfig
from envbuild.store.client import Client
from envbuild.store.fetch import WantedWheel, locate_wheels
from envbuild.store.sources import matches, probe_index, read_page
from envbuild.store.store import Store

WHEEL = "demo-1.0-py3-none-any.whl"
WEEK_OLD = time.time() - 8 * 86400


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A server on loopback: path → (code, headers, body); `asked` lists (path, Range)."""
    answers: dict[str, Any] = {"asked": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers["asked"].append((self.path, self.headers.get("Range")))
            code, headers, body = answers.get(self.path, (404, {}, b""))
            if self.headers.get("Range") and code == 416:
                body = b""
            elif code == 416:
                code = 200
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", os.devnull)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    answers["url"] = f"http://127.0.0.1:{server.server_address[1]}"
    yield answers
    server.shutdown()
    server.server_close()


def wanted(data: bytes) -> WantedWheel:
    return WantedWheel("demo", "1.0", frozenset({hashlib.sha256(data).hexdigest()}))


def locate(root: Path, pip: PipConfig, *wheels: WantedWheel) -> dict[WantedWheel, Path]:
    return locate_wheels(wheels, Host(Store(root), pip), offline=False)


# ---- names

word = st.text("abXY01._-+%/ ", min_size=1, max_size=6)
version = st.from_regex(r"[0-9]{1,2}(\.[0-9]){0,2}(\+[a-z]{1,3}(\.[0-9])?)?", fullmatch=True)
tag = st.sampled_from(["py3", "py2.py3", "cp311", "none", "any", "linux_x86_64", "../x", "a/b", ""])


@given(word, version, st.lists(tag, min_size=3, max_size=4), version)
def test_matches_agrees_with_packaging(name: str, found: str, tags: list[str], asked: str) -> None:
    filename = "-".join([name, found, *tags]) + ".whl"
    try:
        project, parsed, _, _ = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        project, parsed = None, None
    for wish in (asked, found, str(Version(found))):
        ours = matches(filename, canonicalize_name(name), wish)
        # packaging takes a slash in a tag; such a name would lead out of its folder.
        if project is None or "/" in filename:
            assert not (ours and "/" in filename)
        else:
            assert ours == (project == canonicalize_name(name) and parsed == Version(wish))


def test_a_name_that_leaves_its_folder_is_no_wheel() -> None:
    assert not matches("demo-1.0-py3-none-../../../any.whl", "demo", "1.0")
    assert not matches("demo-1.0-py3-none-any\0.whl", "demo", "1.0")


# ---- pages


def links(site: dict[str, Any], kind: str, body: bytes) -> list[str]:
    site["/p/"] = (200, {"Content-Type": kind} if kind else {}, body)
    return [link.url for link in read_page(f"{site['url']}/p/", "demo", Client(PipConfig(), {}))]


def test_an_anchor_within_the_page_does_not_spoil_it(site: dict[str, Any]) -> None:
    page = f'<a href="#top">top</a><a href="?C=N;O=D#x">N</a><a href="{WHEEL}">w</a>'.encode()
    assert f"{site['url']}/p/{WHEEL}" in links(site, "text/html; charset=utf-8", page)


def test_the_base_of_a_page_counts(site: dict[str, Any]) -> None:
    page = f'<html><head><base href="/files/"></head><a href="{WHEEL}">w</a>'.encode()
    assert links(site, "text/html", page) == [f"{site['url']}/files/{WHEEL}"]


def test_a_hash_followed_by_more_and_in_capitals(site: dict[str, Any]) -> None:
    page = f'<a href="{WHEEL}#sha256={"AB" * 32}&egg=demo">w</a>'.encode()
    site["/p/"] = (200, {"Content-Type": "text/html"}, page)
    (link,) = read_page(f"{site['url']}/p/", "demo", Client(PipConfig(), {}))
    assert link.sha256 == "ab" * 32


def test_a_find_links_entry_may_be_a_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "w", "demo")
    wish = wanted(wheel.read_bytes())
    for entry in (str(wheel), wheel.as_uri()):
        pip = PipConfig(find_links=(entry,), no_index=True)
        assert locate(tmp_path / "store", pip, wish) == {wish: wheel}


def test_probing_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert probe_index(tmp_path.as_uri(), PipConfig(), {}) is None
    assert probe_index((tmp_path / "absent").as_uri(), PipConfig(), {})


# ---- the client


def index(site: dict[str, Any], data: bytes, code: int = 200) -> PipConfig:
    page = f'<a href="/{WHEEL}#sha256={hashlib.sha256(data).hexdigest()}">w</a>'.encode()
    site["/simple/demo/"] = (200, {"Content-Type": "text/html"}, page)
    site[f"/{WHEEL}"] = (code, {}, data)
    return PipConfig(index_url=f"{site['url']}/simple", retries=0)


@pytest.mark.parametrize("code", [200, 416])
@pytest.mark.parametrize("leftover", [b"no beginning", b"data" * 50])
def test_a_useless_partial_is_no_retry(tmp_path: Path, site: dict[str, Any], code: int, leftover: bytes) -> None:
    """Whatever an earlier call left, a call that may not retry still gets the file."""
    data = b"data" * 10
    pip = index(site, data, code)
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / min(wanted(data).hashes)).write_bytes(leftover)
    assert locate(tmp_path, pip, wanted(data))


def test_a_finished_partial_is_not_loaded_again(tmp_path: Path, site: dict[str, Any]) -> None:
    """A process killed between the last byte and the move into place."""
    data = b"data" * 10
    pip = index(site, data, 416)
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / min(wanted(data).hashes)).write_bytes(data)
    assert locate(tmp_path, pip, wanted(data))
    assert not [path for path, _ in site["asked"] if path == f"/{WHEEL}"]


def test_a_range_that_was_not_asked_for_is_not_appended(tmp_path: Path, site: dict[str, Any]) -> None:
    data = b"data" * 10
    pip = index(site, data)
    site[f"/{WHEEL}"] = (206, {"Content-Range": "bytes 0-39/40"}, data)
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / min(wanted(data).hashes)).write_bytes(data[:8])
    assert locate(tmp_path, pip, wanted(data))


@pytest.mark.parametrize("setting", ["cert", "client_cert"])
def test_a_certificate_file_that_is_not_there(tmp_path: Path, setting: str) -> None:
    pip = PipConfig(index_url="https://127.0.0.1:9/s", retries=0, **{setting: "/absent.pem"})  # type: ignore[arg-type]
    with pytest.raises(BuildError, match=r"/absent\.pem") as caught:
        locate(tmp_path, pip, wanted(b"x"))
    assert "ENVBUILD_STORE" not in (caught.value.hint or "")


def test_a_name_with_a_telling_word_is_retried(site: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the kind of an error says whether a retry helps, never a word of the URL."""
    monkeypatch.setattr("envbuild.cache.http.pause", lambda *_: site["asked"].append("pause"))
    client = Client(PipConfig(retries=1, timeout_s=0.3), {})
    hung = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # accepts, never answers
    with pytest.raises(RequestFailed):
        client.page(f"http://127.0.0.1:{hung.server_address[1]}/simple/Proxy-refused/")
    hung.server_close()
    assert "pause" in site["asked"]


@pytest.mark.parametrize("value", ["²", "soon", "-5", "Wed, 99 Nov 2020"])
def test_a_strange_retry_after(site: dict[str, Any], value: str) -> None:
    site["/p/"] = (429, {"Retry-After": value}, b"")
    with pytest.raises(RequestFailed, match="429"):
        Client(PipConfig(retries=1), {}).page(f"{site['url']}/p/")


# ---- the store


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise OSError(28, "No space left on device")

    with pytest.raises(BuildError, match="No space left"):
        Store(tmp_path).put("trainer", "ab", WHEEL, fail)
    assert not list(tmp_path.glob("trainer/ab/*"))


def test_a_run_removes_stale_downloads(tmp_path: Path) -> None:
    old = Store(tmp_path).folder("partial") / "old"
    old.write_bytes(b"x")
    os.utime(old, (WEEK_OLD, WEEK_OLD))
    with with_tmpdir(load_environment({**os.environ, "ENVBUILD_STORE": str(tmp_path)})):
        assert not list((tmp_path / "partial").iterdir())


def test_a_download_under_way_is_not_stale(tmp_path: Path) -> None:
    """Going on with an old download: another process's cleaning must not take its lock or its bytes."""
    store = Store(tmp_path)
    for name in ("key", "key.lock"):
        (store.folder("partial") / name).write_bytes(b"")
        os.utime(store.folder("partial") / name, (WEEK_OLD, WEEK_OLD))
    with locked_partial(store.folder("partial") / "key", threading.Event()):
        store.clean_stale()
        assert {path.name for path in (tmp_path / "partial").iterdir()} == {"key", "key.lock"}
        with (tmp_path / "partial/key.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
