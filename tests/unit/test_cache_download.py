"""Downloads by pip's configuration from a fake server: limits, resumption, and servers that do not answer."""

from __future__ import annotations

import gzip
import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest
from lab.fake_registry import Call, fake_registry

from envbuild.cache.http import Mismatch, NotFound, RequestFailed
from envbuild.site.pip_config import PipConfig
from envbuild.store.client import Client

CONTENT = bytes(range(256)) * 4096
HASHES = frozenset({hashlib.sha256(CONTENT).hexdigest()})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.cache.http._FIRST_WAIT_S", 0.01)


def client(retries: int = 2) -> Client:
    return Client(PipConfig(retries=retries, timeout_s=5), {})


def serve(call: Call, content: bytes = CONTENT) -> None:
    start = int(call.headers.get("Range", "bytes=0-")[6:-1])
    spoken = f"bytes {start}-{len(content) - 1}/{len(content)}"
    call.reply(206 if start else 200, content[start:], Content_Range=spoken)


def endless(call: Call) -> None:
    """More than was wanted, of a length that the server does not tell."""
    call.send_response(200)
    call.send_header("Transfer-Encoding", "chunked")
    call.end_headers()
    for part in (CONTENT, CONTENT):
        call.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
    call.wfile.write(b"0\r\n\r\n")


@pytest.mark.parametrize("script", [endless, lambda call: serve(call, CONTENT + b"x")])
def test_more_bytes_than_locked_are_not_taken(tmp_path: Path, script: object) -> None:
    partial, moved = tmp_path / "partial", [0]
    with fake_registry(script) as fake, pytest.raises(RequestFailed, match="bytes") as caught:  # type: ignore[arg-type]
        client().download(f"http://{fake.address}/f", partial, HASHES, moved.append, size=len(CONTENT))
    assert not caught.value.is_down and not partial.exists() and sum(moved) == 0
    assert len(fake.seen) == 1


def test_a_file_without_an_end_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.cache.download._MOST", len(CONTENT))
    partial = tmp_path / "partial"
    with fake_registry(endless) as fake, pytest.raises(RequestFailed, match=f"it sent more than {len(CONTENT)} bytes"):
        client().download(f"http://{fake.address}/f", partial, frozenset({"0" * 64}), lambda _: None)
    assert not partial.exists()


def test_fewer_bytes_than_locked_are_other_content(tmp_path: Path) -> None:
    with fake_registry(lambda call: serve(call, b"short")) as fake, pytest.raises(Mismatch):
        client().download(f"http://{fake.address}/f", tmp_path / "f", HASHES, lambda _: None, size=len(CONTENT))


@pytest.mark.parametrize("size", [1000, 100_000])  # a short answer, which is read at once, and a long one
@pytest.mark.parametrize("encoding", ["gzip", "x-gzip"])
def test_a_file_that_a_server_calls_encoded_is_taken_as_it_is(tmp_path: Path, size: int, encoding: str) -> None:
    packed = gzip.compress(random.Random(size).randbytes(size))
    digest = hashlib.sha256(packed).hexdigest()

    def script(call: Call) -> None:
        call.reply(200, packed, Content_Encoding=encoding)

    with fake_registry(script) as fake:
        url, partial = f"http://{fake.address}/x-1.0.tar.gz", tmp_path / "partial"
        assert client().download(url, partial, frozenset({digest}), lambda _: None) == digest
        assert client().page(url).content == gzip.decompress(packed)  # a page was asked for in any encoding
    assert partial.read_bytes() == packed


def test_content_that_changes_between_two_parts_is_loaded_again(tmp_path: Path) -> None:
    def script(call: Call) -> None:
        if len(fake.seen) == 1:
            call.reply(200, b"x" * 600_000, promise=len(CONTENT))
        else:
            serve(call)

    moved = [0]
    with fake_registry(script) as fake:
        url, partial = f"http://{fake.address}/f", tmp_path / "f"
        assert client().download(url, partial, HASHES, moved.append) in HASHES
    assert partial.read_bytes() == CONTENT and sum(moved) == len(CONTENT)
    assert [("Range" in headers) for _, _, headers in fake.seen] == [False, True, False]


def test_a_failed_source_takes_back_what_it_told(tmp_path: Path) -> None:
    """The next source tells the bytes that are there again."""

    def script(call: Call) -> None:
        if len(fake.seen) == 1:
            call.reply(200, CONTENT[:600_000], promise=len(CONTENT))
        else:
            call.reply(403)

    moved, partial = [0], tmp_path / "f"
    with fake_registry(script) as fake:
        with pytest.raises(RequestFailed, match=r"403.*netrc"):
            client().download(f"http://{fake.address}/f", partial, HASHES, moved.append)
        assert sum(moved) == 0 and partial.stat().st_size > 0
        fake.script = serve
        client().download(f"http://{fake.address}/f", partial, HASHES, moved.append)
        assert sum(moved) == len(CONTENT)


@pytest.mark.parametrize(("code", "down"), [(401, True), (407, True), (403, False), (404, False), (500, False)])
def test_a_server_that_refuses_us_is_down_and_one_that_lacks_a_page_is_not(code: int, down: bool) -> None:
    with (
        fake_registry(lambda call: call.reply(code)) as fake,
        pytest.raises(RequestFailed, match=f"HTTP {code}") as caught,
    ):
        client(0).page(f"http://{fake.address}/p")
    assert caught.value.is_down is down and isinstance(caught.value, NotFound) is (code == 404)


def test_a_page_that_is_cut_or_too_large_leaves_the_server_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.store.client._MOST_PAGE", 1000)
    for script, expected in [
        (lambda call: call.reply(200, b"x" * 2000), "more than 1000 bytes"),
        (lambda call: call.reply(200, b"x" * 20, promise=30), "IncompleteRead"),
    ]:
        with fake_registry(script) as fake, pytest.raises(RequestFailed, match=expected) as caught:
            client(0).page(f"http://{fake.address}/p")
        assert not caught.value.is_down
    with pytest.raises(RequestFailed, match="refused") as caught:
        client(0).page("http://127.0.0.1:9/t/s3cret/p")
    assert caught.value.is_down and "s3cret" not in str(caught.value)


_BESIDE_AN_IMPORT = """
import sys, threading, time
from envbuild.cache.http import HttpClient, Transport
from envbuild.cache.http import RequestFailed

begun = threading.Event()

class Slow:
    def find_spec(self, name, path, target=None):
        if name == "requests.exceptions":  # the first of its modules that requests itself imports
            begun.set()
            time.sleep(0.3)

def send():
    begun.wait()
    try:
        HttpClient(Transport(retries=0), plain=True).send("GET", "http://127.0.0.1:1/f", {})
    except RequestFailed:
        print("asked")

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=send)
thread.start()
import requests
thread.join()
"""


def test_a_thread_may_ask_while_another_imports_requests() -> None:
    """As doctor's checks do: one asks a mirror while another imports docker, which imports requests."""
    done = subprocess.run([sys.executable, "-c", _BESIDE_AN_IMPORT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "asked\n"), done.stderr


def test_a_link_in_the_place_of_a_download_leads_nowhere(tmp_path: Path) -> None:
    """In a store that several users write to, each knows the name of a download before it begins."""
    (tmp_path / "victim").write_bytes(b"")
    (tmp_path / "partial").symlink_to(tmp_path / "victim")
    with fake_registry(serve) as fake:
        client().download(f"http://{fake.address}/f", tmp_path / "partial", HASHES, lambda _: None)
    assert (tmp_path / "victim").read_bytes() == b"" and (tmp_path / "partial").read_bytes() == CONTENT
    assert not (tmp_path / "partial").is_symlink()
