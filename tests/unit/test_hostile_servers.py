"""Answers of registries and redirects that lead credentials, memory, time or numbers astray."""

from __future__ import annotations

import gzip
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from lab.fake_registry import Call, fake_registry, upload

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.build.share import ATTESTATIONS, open_pushed
from envbuild.cache.http import HttpClient, RequestFailed, Transport, split
from envbuild.image.credentials import Credentials
from envbuild.image.layout import Blobs
from envbuild.image.model import OCI_MANIFEST, Descriptor, canonical
from envbuild.image.registry import Registry, open_registry
from envbuild.image.registry_endpoint import Login
from envbuild.store.pieces import ARTIFACT, CONFIG, RECEIPT, render
from envbuild.store.store import Store

BLOB = Descriptor("x", digest_of(b"abc"), 3)


def registry(address: str, **env: str) -> Registry:
    return open_registry(f"{address}/team/x:1", Transport(timeout_s=5, retries=0, insecure=frozenset([address])), env)


def endless(call: Call) -> None:
    """A body that a reader of its Content-Length alone takes for a short one."""
    call.send_response(200)
    call.send_header("Content-Length", "10")
    call.send_header("Transfer-Encoding", "chunked")
    call.end_headers()
    with suppress(OSError):
        for _ in range(200):
            call.wfile.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")


def heads(call: Call) -> None:
    with suppress(OSError):
        for _ in range(1 << 20):
            call.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def packed(call: Call) -> None:
    call.reply(200, gzip.compress(gzip.compress(bytes(1 << 24))), Content_Encoding="gzip, gzip")


@pytest.mark.parametrize(
    ("script", "says"),
    [(endless, "it sent more than 8388608 bytes"), (heads, "it sent 20 heads"), (packed, "with several encodings")],
)
def test_an_answer_without_an_end_is_given_up(script: Callable[[Call], None], says: str) -> None:
    tracemalloc.start()
    try:
        with fake_registry(script) as fake, pytest.raises(BuildError, match=says):
            registry(fake.address).manifest()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "value", ["bytes {n}-2/3", "bytes 0-{n}/3", "bytes 0-2/{n}", "bytes \u00b2-2/3", "bytes 0-2/3x"]
)
def test_a_range_of_no_number_is_no_traceback(tmp_path: Path, value: str) -> None:
    def script(call: Call) -> None:
        call.reply(206, b"abc", Content_Range=value.format(n="1" * 5000))

    with fake_registry(script) as fake, pytest.raises(BuildError, match="does not send the rest"):
        registry(fake.address).fetch_blob(BLOB, Blobs(tmp_path), lambda _: None)


def test_numbers_of_an_upload_are_no_traceback(tmp_path: Path) -> None:
    def script(call: Call) -> None:
        call.content()
        least = {"OCI_Chunk_Min_Length": "9" * 5000} if call.command == "POST" else {}
        status = {"POST": 202, "PATCH": 202, "GET": 204}.get(call.command, 201)
        call.reply(status, Location="/v2/team/x/blobs/uploads/1", Range="0-" + "9" * 5000, **least)

    (tmp_path / "blob").write_bytes(b"abc")
    with fake_registry(script) as fake:
        upload(registry(fake.address), BLOB, tmp_path / "blob", lambda _: None, chunk=1)


@pytest.mark.parametrize("form", ["http://{evil}\\@{own}/x", "http://{evil}\\@{own}", "http:\\\\{evil}\\@{own}/x"])
def test_a_redirect_in_which_readers_see_different_hosts_gets_no_credentials(form: str) -> None:
    """requests connects to the host before a backslash, and urllib.parse takes the one behind it for the host."""
    with fake_registry(lambda call: call.reply(200, b"{}")) as evil:

        def script(call: Call) -> None:
            if "Authorization" in call.headers:
                call.reply(307, Location=form.format(evil=evil.address, own=fake.address))
            else:
                call.reply(401, WWW_Authenticate="Basic realm=x")

        with fake_registry(script) as fake:
            login = {"ENVBUILD_REGISTRY_USER": "u", "ENVBUILD_REGISTRY_PASSWORD": "secret"}
            with suppress(BuildError):
                registry(fake.address, ENVBUILD_REGISTRY=fake.address, **login).manifest()
        assert not any("Authorization" in headers for _, _, headers in evil.seen)


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example\\@b.example/",
        "https://a.example/\\x",
        "https://a.example\t@b.example/",
        "https://a.example:x/",
        "https://[::1/",
        "https://a.example\r\nX: y/",
    ],
)
def test_an_address_of_two_meanings_is_refused(url: str) -> None:
    with pytest.raises(RequestFailed, match="it names an address"):
        split(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example/x?y=1#z",
        "https://U:p%40@A.example:5000/%5Cx",
        "http://[::1]:5000/",
        "http://[FE80::1%25eth0]/",
        "https://b\u00fccher.example/x",
        "/v2/x",
        "//a.example/x",
        "https://a.example/a b",
    ],
)
def test_an_address_of_one_meaning_is_taken(url: str) -> None:
    assert split(url).geturl()


@pytest.mark.parametrize("identity", ["", "token"])
def test_the_credentials_of_an_https_registry_go_to_no_token_server_by_plain_http(identity: str) -> None:
    with fake_registry(lambda call: call.reply(200, b'{"token": "x"}')) as other:
        http = HttpClient(Transport(insecure=frozenset([other.address])), plain=False)
        login = Login(lambda: Credentials("u", "secret", identity, "here"), http, 0)
        assert login.refused(None, f'Bearer realm="http://{other.address}/token"')
        with pytest.raises(RequestFailed, match=r"no token from .* it is asked by plain HTTP"):
            login.header(["repository:x:pull"], threading.Event())
        assert not other.seen
        anonymous = Login(lambda: None, http, 0)
        assert anonymous.refused(None, f'Bearer realm="http://{other.address}/token"')
        assert anonymous.header(["repository:x:pull"], threading.Event()) == "Bearer x"


def test_what_was_pushed_has_one_receipt(tmp_path: Path) -> None:
    """A manifest could name any number of them, of 16 MB each, and readers would take different ones."""
    about = b"{}"
    config = Descriptor(CONFIG, digest_of(about), len(about))
    for media in (RECEIPT, *ATTESTATIONS):
        rows = [Descriptor(media, digest_of(bytes([number])), 1) for number in range(2)]
        manifest = render(config, rows)
        assert ARTIFACT.encode() in manifest

        def script(call: Call, manifest: bytes = manifest) -> None:
            call.reply(200, manifest if "/manifests/" in call.path else about, Content_Type=OCI_MANIFEST)

        with fake_registry(script) as fake, pytest.raises(BuildError, match="several receipts, or attestations"):
            open_pushed(registry(fake.address), Store(tmp_path))
        assert not fake.asked("GET", "/blobs/")


def test_a_mirror_that_is_too_slow_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.cache.http.SLOWEST", 1 << 40)
    monkeypatch.setattr("envbuild.cache.http._PERIOD", 0)
    body = canonical({"text": "x" * 200_000})

    with fake_registry(lambda call: call.reply(200, body, Content_Type=OCI_MANIFEST)) as mirror:
        with fake_registry(lambda call: call.reply(404)) as fake:
            reach = Transport(timeout_s=5, retries=0, insecure=frozenset([fake.address]))
            asked = open_registry(f"{fake.address}/team/x:1", reach, {}, [f"http://{mirror.address}"])
            for _ in range(3):
                with pytest.raises(BuildError):
                    asked.manifest()
        assert len(mirror.seen) == 1
