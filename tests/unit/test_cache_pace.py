"""Servers that send or take a byte now and then, which never time out: transfers have a lower bound on their speed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lab.fake_registry import Call, fake_registry, upload

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.cache import http
from envbuild.cache.http import Pace, RequestFailed, TooSlow, Transport
from envbuild.image.layout import Blobs
from envbuild.image.model import Descriptor, canonical
from envbuild.image.registry import Registry, open_registry
from envbuild.site.pip_config import PipConfig
from envbuild.store.client import Client

CONTENT = canonical({"schemaVersion": 2, "text": "x" * 200_000})
HASHES = frozenset({hashlib.sha256(CONTENT).hexdigest()})
BLOB = Descriptor("application/octet-stream", digest_of(CONTENT), len(CONTENT))
TIMEOUT_S = 0.3  # a byte comes three times in it


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.cache.http._FIRST_WAIT_S", 0.01)


def dribble(call: Call, data: bytes) -> None:
    """Send a byte now and then, as long as somebody listens, and 60 s at most."""
    call.close_connection = True
    with suppress(OSError):
        for number in range(600):
            call.wfile.write(data[number : number + 1])
            call.wfile.flush()
            time.sleep(0.1)


def head(call: Call) -> None:
    dribble(call, b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 1000)


def body(length: int) -> Callable[[Call], None]:
    def answer(call: Call) -> None:
        call.send_response(200)
        call.send_header("Content-Length", str(length))
        call.end_headers()
        dribble(call, CONTENT)

    return answer


def chunked(call: Call) -> None:
    call.send_response(200)
    call.send_header("Transfer-Encoding", "chunked")
    call.end_headers()
    dribble(call, b"1\r\nx\r\n" * 200)


SLOW = {"head": head, "small body": body(1000), "body": body(len(CONTENT)), "chunked": chunked}


def registry(address: str) -> Registry:
    return open_registry(
        f"{address}/team/x:1", Transport(timeout_s=TIMEOUT_S, retries=1, insecure=frozenset([address])), {}
    )


def pip_client() -> Client:
    return Client(PipConfig(timeout_s=TIMEOUT_S, retries=1), {})


def blob(address: str, folder: Path) -> None:
    registry(address).fetch_blob(BLOB, Blobs(folder), lambda _: None)


TRANSFERS: dict[str, Callable[[str, Path], object]] = {
    "index page": lambda address, _: pip_client().page(f"http://{address}/simple/x/"),
    "file": lambda address, to: pip_client().download(f"http://{address}/x.whl", to / "x", HASHES, lambda _: None),
    "manifest": lambda address, _: registry(address).manifest(),
    "blob": blob,
}


@pytest.fixture
def quick() -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("how", SLOW)
@pytest.mark.parametrize("what", TRANSFERS)
def test_a_server_that_sends_a_byte_now_and_then_is_given_up(what: str, how: str, tmp_path: Path, quick: None) -> None:
    with (
        fake_registry(SLOW[how]) as fake,
        pytest.raises((TooSlow, BuildError), match=r"fewer than 10 kB a second for 0\.6 s"),
    ):
        TRANSFERS[what](fake.address, tmp_path)
    assert len(fake.seen) == 2  # once more, although bytes came


@pytest.mark.parametrize("what", ["file", "blob"])
def test_a_server_that_sends_a_byte_for_each_request_is_given_up(what: str, tmp_path: Path, quick: None) -> None:
    def script(call: Call) -> None:
        start = int(call.headers.get("Range", "bytes=0-")[6:-1])
        spoken = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
        call.reply(
            206 if start else 200, CONTENT[start : start + 1], promise=len(CONTENT) - start, Content_Range=spoken
        )

    with fake_registry(script) as fake, pytest.raises((RequestFailed, BuildError)):
        TRANSFERS[what](fake.address, tmp_path)
    assert len(fake.seen) == 2


def test_an_upload_of_which_a_byte_is_taken_for_each_request_is_given_up(tmp_path: Path, quick: None) -> None:
    sent = 0

    def script(call: Call) -> None:
        nonlocal sent
        if call.command == "PATCH":
            sent += 1
            call.content()
            return call.reply(500 if sent % 2 else 202, Range=f"0-{sent}", Location="/v2/team/x/blobs/uploads/1")
        call.reply(202 if call.command == "POST" else 204, Range=f"0-{sent}", Location="/v2/team/x/blobs/uploads/1")

    (tmp_path / "blob").write_bytes(CONTENT)
    with fake_registry(script) as fake, pytest.raises(BuildError, match="HTTP 500"):
        upload(registry(fake.address), BLOB, tmp_path / "blob", lambda _: None, chunk=100)


def test_a_token_server_is_given_up_too(quick: None) -> None:
    def script(call: Call) -> None:
        if call.path.startswith("/token"):
            body(1000)(call)
        else:
            call.reply(401, WWW_Authenticate=f'Bearer realm="http://{fake.address}/token",service="x"')

    with fake_registry(script) as fake, pytest.raises(BuildError, match=r"no token from .*: fewer than 10 kB a second"):
        registry(fake.address).manifest()


def test_an_upload_that_is_taken_slowly_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(http, "SLOWEST", 1 << 30)
    data = bytes(64 << 20)

    def script(call: Call) -> None:
        if call.command == "POST":
            return call.reply(202, Location="/v2/team/x/blobs/uploads/1")
        if call.command == "GET":
            return call.reply(204, Range="0-0", Location="/v2/team/x/blobs/uploads/1")
        call.close_connection = True
        while call.rfile.read(1 << 16):
            time.sleep(0.01)

    (tmp_path / "blob").write_bytes(data)
    there = Descriptor("x", digest_of(data), len(data))
    with fake_registry(script) as fake, pytest.raises(BuildError, match=r"fewer than .* kB a second for 0\.6 s"):
        upload(registry(fake.address), there, tmp_path / "blob", lambda _: None, chunk=64 << 20)


def test_what_comes_steadily_is_taken_and_a_pause_before_it_does_not_count(tmp_path: Path) -> None:
    def script(call: Call) -> None:
        call.send_response(200)
        call.send_header("Content-Length", str(len(CONTENT)))
        call.end_headers()
        time.sleep(TIMEOUT_S * 0.8)
        for start in range(0, len(CONTENT), 10_000):
            call.wfile.write(CONTENT[start : start + 10_000])
            time.sleep(0.05)

    with fake_registry(script) as fake:
        assert pip_client().download(f"http://{fake.address}/x", tmp_path / "x", HASHES, lambda _: None) in HASHES


def test_only_the_wait_for_a_server_counts_and_what_was_fast_once_does_not() -> None:
    one = Pace(30.0)
    for _ in range(1000):  # each block was there at once; writing it may have taken hours
        one.note(1, 0.001)
    one.note(1 << 30, 40.0)
    with pytest.raises(TooSlow):
        for _ in range(11):
            one.note(1, 3.0)
