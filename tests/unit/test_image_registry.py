"""Faults of registries, served by a fake one; tests/real/test_registry.py has the real one."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.fake_registry import Call, Fake, fake_registry, upload

from envbuild.base.errors import BuildError, UsageError
from envbuild.base.packages import digest_of
from envbuild.base.workers import each
from envbuild.cache.http import HttpClient, RequestFailed, Transport, retry_after
from envbuild.image.layout import Blobs
from envbuild.image.model import MAX_MANIFEST, OCI_LAYER, OCI_MANIFEST, Descriptor, parse
from envbuild.image.registry import Registry, open_registry
from envbuild.image.registry_endpoint import parse_challenges
from envbuild.image.registry_upload import has_blob, mount

MANIFEST = json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST}).encode()
CONTENT = bytes(range(256)) * 4096  # 1 MiB
BLOB = Descriptor(OCI_LAYER, digest_of(CONTENT), len(CONTENT))
Script = Callable[[Call], None]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between tries that nobody asked for are short."""
    monkeypatch.setattr("envbuild.cache.http._FIRST_WAIT_S", 0.01)


def nothing(_count: int) -> None:
    """Progress that nobody looks at."""


def reach(fake: Fake, *, retries: int = 2, env: dict[str, str] | None = None, timeout_s: float = 5) -> Registry:
    transport = Transport(insecure=frozenset({"127.0.0.1"}), retries=retries, timeout_s=timeout_s)
    return open_registry(f"{fake.address}/team/app:1", transport, {"HOME": "/nowhere", **(env or {})})


def login(fake: Fake, **more: str) -> dict[str, str]:
    """The variables of a user with credentials for `fake`."""
    return {
        "ENVBUILD_REGISTRY": fake.address,
        "ENVBUILD_REGISTRY_USER": "ada",
        "ENVBUILD_REGISTRY_PASSWORD": "hunter2",
        **more,
    }


def said(error: BuildError) -> str:
    return f"{error.message} | {error.hint}"


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (401, {"WWW_Authenticate": 'Basic realm="x"'}, "docker login.*netrc"),
        (401, {}, "docker login"),
        (403, {}, "docker login"),
        (404, {}, "check repository and tag"),
        (405, {}, "HTTP 405"),
        (418, {}, "HTTP 418"),
    ],
)
def test_a_fake_refusal_is_said_once_with_what_to_do(status: int, headers: dict[str, str], expected: str) -> None:
    body = b'{"errors":[{"code":"DENIED","message":"requested access is denied"}]}'
    with fake_registry(lambda call: call.reply(status, body, **headers)) as fake:
        with pytest.raises(BuildError) as error:
            reach(fake).manifest()
        assert re.search(expected, said(error.value))
        assert f"{fake.address}/team/app:1" in error.value.message
        assert "DENIED: requested access is denied" in error.value.message
        assert len(fake.seen) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_fake_passing_trouble_is_tried_again_and_at_last_said(status: int) -> None:
    troubles = 2

    def script(call: Call) -> None:
        nonlocal troubles
        troubles -= 1
        call.reply(*((status, b"oops") if troubles >= 0 else (200, MANIFEST)))

    with fake_registry(script) as fake:
        assert reach(fake).manifest()[0] == MANIFEST
        troubles = 99
        with pytest.raises(BuildError, match=f"HTTP {status}"):
            reach(fake).manifest()
        assert len(fake.seen) == 6


def test_a_fake_registry_says_how_long_to_wait() -> None:
    def script(call: Call) -> None:
        call.reply(*((429,) if len(fake.seen) == 1 else (200, MANIFEST)), Retry_After="1")

    with fake_registry(script) as fake:
        began = time.monotonic()
        reach(fake, retries=1).manifest()
        assert 1 <= time.monotonic() - began < 3


def test_a_server_that_is_not_there_and_one_that_is_silent_are_told_apart() -> None:
    silence = threading.Event()
    with fake_registry(lambda _call: None) as gone:
        pass
    with pytest.raises(BuildError, match="refused") as error:
        reach(gone).manifest()
    assert "network" in str(error.value.hint)
    with fake_registry(lambda _call: silence.wait(5) and None) as fake:
        with pytest.raises(BuildError, match="timed out"):
            reach(fake, retries=0, timeout_s=0.2).manifest()
        silence.set()


def bearer(realm: Callable[[], str], life: int = 300) -> Script:
    """A registry with tokens, which is its own token server at /token."""
    tokens: list[str] = []

    def script(call: Call) -> None:
        if call.path.startswith("/token"):
            content = call.content().decode()
            tokens.append(f"t{len(tokens)}")
            query = parse_qs(content or urlsplit(call.path).query)
            assert query["service"] == ["fake"] and "repository:team/app:" in query["scope"][0]
            key = "access_token" if call.command == "POST" else "token"
            call.reply(200, json.dumps({key: tokens[-1], "expires_in": life}).encode())
        elif call.headers.get("Authorization") in {f"Bearer {token}" for token in tokens}:
            call.content()
            call.reply(200, MANIFEST)
        else:
            asked = f'Bearer realm="{realm()}",service="fake",scope="repository:team/app:pull"'
            call.reply(401, WWW_Authenticate=asked)

    return script


def test_a_fake_token_server_is_asked_once_for_a_scope() -> None:
    with fake_registry(bearer(lambda: f"http://{fake.address}/token")) as fake:
        there = reach(fake, env=login(fake))
        for _ in range(3):
            assert there.manifest()[0] == MANIFEST
        assert has_blob(there.endpoint, BLOB.digest, threading.Event())  # pull,push: another scope
        tokens = fake.asked("GET", "/token")
        assert len(tokens) == 2 and len(fake.asked("GET", "/manifests/")) == 4
        basic = "Basic " + base64.b64encode(b"ada:hunter2").decode()
        assert [headers["Authorization"] for headers in tokens] == [basic, basic]
        assert not [h for _, path, h in fake.seen if "/v2/" in path and "Basic" in str(h)]
        # without credentials a token is got all the same
        assert reach(fake).manifest()[0] == MANIFEST
        assert "Authorization" not in fake.asked("GET", "/token")[-1]


def test_a_fake_token_server_takes_an_identity_token(tmp_path: Path) -> None:
    with fake_registry(bearer(lambda: f"http://{fake.address}/token")) as fake:
        auths = {fake.address: {"identitytoken": "ey.secret"}}
        (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
        assert reach(fake, env={"DOCKER_CONFIG": str(tmp_path)}).manifest()[0] == MANIFEST
        assert len(fake.asked("POST", "/token")) == 1 and not fake.asked("GET", "/token")


def test_a_fake_token_that_ended_early_is_renewed() -> None:
    ended = False
    inner: Script = bearer(lambda: f"http://{fake.address}/token")

    def script(call: Call) -> None:
        nonlocal ended
        if ended and call.headers.get("Authorization") == "Bearer t0":
            call.reply(401, WWW_Authenticate=f'Bearer realm="http://{fake.address}/token",service="fake"')
        else:
            inner(call)

    with fake_registry(script) as fake:
        there = reach(fake)
        there.manifest()
        ended = True
        assert there.manifest()[0] == MANIFEST
        assert len(fake.asked("GET", "/token")) == 2


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ((401, b'{"errors":[{"code":"UNAUTHORIZED"}]}'), "no token from .* ENVBUILD_.*401.*docker login"),
        ((503,), "no token from .*HTTP 503"),
        ((200, b"{}"), "holds no token"),
        ((200, b'{"token": "a\\nb"}'), "holds no token"),
        ((200, b'{"token": "a", "expires_in": "x"}'), "holds no token"),
        ((200, b"<html>"), "holds no token"),
        ((302,), "no token from .*HTTP 302"),
    ],
)
def test_a_fake_token_server_that_fails_is_named(reply: tuple[int, bytes], expected: str) -> None:
    def script(call: Call) -> None:
        if call.path.startswith("/token"):
            call.reply(*reply, Location="/elsewhere")
        else:
            realm = f"http://{fake.address}/token"
            call.reply(401, WWW_Authenticate=f'Bearer realm="{realm}",service="fake"')

    with fake_registry(script) as fake:
        with pytest.raises(BuildError) as error:
            reach(fake, retries=0, env=login(fake)).manifest()
        assert re.search(expected, said(error.value)) and "hunter2" not in said(error.value)
        assert not fake.asked("GET", "/elsewhere")


@pytest.mark.parametrize("realm", ["http://127.0.0.1:9/token", "", "ftp://x/y", "https://[bad"])
def test_a_token_server_that_is_down_or_none_is_said(realm: str) -> None:
    challenge = f'Bearer realm="{realm}",service="fake"'
    with fake_registry(lambda call: call.reply(401, WWW_Authenticate=challenge)) as fake:
        there = reach(fake, env=login(fake))
        with pytest.raises(BuildError, match="no token from"):
            there.manifest()


def test_credentials_of_netrc_go_to_no_fake_registry_that_does_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """requests would send them by itself to any host."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login ada password hunter2\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with fake_registry(lambda call: call.reply(200, MANIFEST)) as fake:
        reach(fake, env={"NETRC": str(netrc)}).manifest()
        assert "Authorization" not in fake.asked("GET")[0]


def serve(call: Call, content: bytes = CONTENT) -> None:
    """The blob, from where the request says."""
    start = int(call.headers.get("Range", "bytes=0-")[6:-1])
    spoken = f"bytes {start}-{len(content) - 1}/{len(content)}"
    call.reply(206 if start else 200, content[start:], Content_Range=spoken)


def test_a_blob_on_another_fake_host_is_fetched_without_authorization(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    blobs.partial(BLOB.digest).write_bytes(CONTENT[:5000])
    inner: Script = bearer(lambda: f"http://{fake.address}/token")

    def script(call: Call) -> None:
        if "/blobs/" in call.path and "Authorization" in call.headers:
            call.reply(307, Location=f"http://{store.address}/object?signature=s3cret", Set_Cookie="a=b")
        else:
            inner(call)

    with fake_registry(serve) as store, fake_registry(script) as fake:
        there = reach(fake, env=login(fake))
        assert there.fetch_blob(BLOB, blobs, nothing).read_bytes() == CONTENT
        ((method, _path, headers),) = store.seen
        assert method == "GET" and headers["Range"] == "bytes=5000-"
        assert not {"Authorization", "Cookie"} & set(headers)
        # a store that refuses is not answered with credentials either, nor is its URL shown
        blobs.path(BLOB.digest).unlink()
        store.script = lambda call: call.reply(401, WWW_Authenticate='Basic realm="x"')
        with pytest.raises(BuildError, match="401") as error:
            there.fetch_blob(BLOB, blobs, nothing)
        assert len(store.seen) == 2 and "Authorization" not in store.seen[1][2]
        assert "s3cret" not in said(error.value)


def test_a_fake_redirect_without_end_ends(tmp_path: Path) -> None:
    with fake_registry(lambda call: call.reply(307, Location=call.path)) as fake:
        there = reach(fake)
        with pytest.raises(BuildError, match="redirected more than 5"):
            there.fetch_blob(BLOB, Blobs(tmp_path), nothing)


@pytest.mark.parametrize("location", ["https://[bad/x", "http://h:port/x", "ftp://x/y", "//:1"])
def test_a_fake_redirect_to_no_address_is_said(tmp_path: Path, location: str) -> None:
    with fake_registry(lambda call: call.reply(307, Location=location)) as fake:
        there = reach(fake)
        with pytest.raises(BuildError, match="it names an address"):
            there.fetch_blob(BLOB, Blobs(tmp_path), nothing)


@pytest.mark.parametrize("url", ["http://other.invalid/x", "file:///etc/passwd", "https:///x", "x"])
def test_nothing_leads_from_https_to_plain_http_or_to_no_http_at_all(url: str) -> None:
    http = HttpClient(Transport(insecure=frozenset({"127.0.0.1"})), plain=False)
    with pytest.raises(RequestFailed, match=r"plain HTTP at other.invalid|neither http nor https"):
        http.send("GET", url, {})


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (lambda call: serve(call, CONTENT[:-1] + b"x"), "content with digest sha256:"),
        (lambda call: serve(call, CONTENT + b"x"), "bytes, not 1048576"),
        (lambda call: serve(call, CONTENT[:1000]), "1000 bytes, not 1048576"),
        (lambda call: call.reply(404), "HTTP 404"),
        (lambda call: call.reply(206, b"x" * 9, Content_Range="bytes 7-15/16"), "bytes, not|the rest"),
    ],
)
@pytest.mark.parametrize("before", [b"", CONTENT[:5000], b"x" * 5000])
def test_a_wrong_fake_blob_is_refused_and_not_kept(
    tmp_path: Path, script: Script, expected: str, before: bytes
) -> None:
    blobs, moved = Blobs(tmp_path), [0]
    if before:
        blobs.partial(BLOB.digest).write_bytes(before)
    with fake_registry(script) as fake, pytest.raises(BuildError, match=expected) as error:
        reach(fake, retries=1).fetch_blob(BLOB, blobs, moved.append)
    assert BLOB.digest in error.value.message and not blobs.has(BLOB)
    left = blobs.partial(BLOB.digest)
    assert sum(moved) == (left.stat().st_size if left.exists() else 0)
    if "404" not in expected:
        assert not left.exists()


def test_a_fake_server_without_ranges_or_lengths_serves_whole_blobs(tmp_path: Path) -> None:
    def script(call: Call) -> None:
        if "Range" in call.headers and len(fake.seen) == 1:
            call.reply(416)
            return
        call.send_response(200)
        call.send_header("Transfer-Encoding", "chunked")
        call.end_headers()
        part = CONTENT if len(fake.seen) > 2 else CONTENT[:70000]
        call.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n0\r\n\r\n")

    blobs = Blobs(tmp_path)
    blobs.partial(BLOB.digest).write_bytes(CONTENT[:5000])
    with fake_registry(script) as fake:
        moved = [0]
        assert reach(fake).fetch_blob(BLOB, blobs, moved.append).read_bytes() == CONTENT
        assert sum(moved) == BLOB.size


def test_a_blob_of_no_bytes_is_fetched(tmp_path: Path) -> None:
    empty = Descriptor(OCI_LAYER, digest_of(b""), 0)
    with fake_registry(lambda call: call.reply(200)) as fake:
        assert reach(fake).fetch_blob(empty, Blobs(tmp_path), nothing).read_bytes() == b""


def test_a_fake_connection_that_ends_at_once_is_given_up(tmp_path: Path) -> None:
    with fake_registry(lambda call: call.reply(200, b"", promise=BLOB.size)) as fake:
        with pytest.raises(BuildError, match=r"127\.0\.0\.1"):
            reach(fake, retries=1).fetch_blob(BLOB, Blobs(tmp_path), nothing)
        assert len(fake.seen) == 2


def test_what_came_before_a_failure_is_kept_for_the_next_run(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)

    def once(call: Call) -> None:
        if len(fake.seen) > 1:
            call.reply(500)
        else:
            call.reply(200, CONTENT[:600_000], promise=BLOB.size)

    with fake_registry(once) as fake:
        with pytest.raises(BuildError, match="HTTP 500"):
            reach(fake, retries=1).fetch_blobs([BLOB], blobs, nothing)
        kept = blobs.partial(BLOB.digest).stat().st_size
        assert 0 < kept <= 600_000
        fake.script = serve
        reach(fake).fetch_blob(BLOB, blobs, nothing)
        assert fake.asked("GET")[-1]["Range"] == f"bytes={kept}-"


def test_the_first_failure_of_several_fake_blobs_ends_all(tmp_path: Path) -> None:
    others = [Descriptor(OCI_LAYER, f"sha256:{number:064x}", 10) for number in range(40)]
    with fake_registry(lambda call: call.reply(404)) as fake:
        with pytest.raises(BuildError, match="404"):
            reach(fake).fetch_blobs(others, Blobs(tmp_path), nothing)
        assert len(fake.seen) <= 8


@pytest.mark.parametrize(
    ("body", "pointer", "expected"),
    [
        (b" " * (MAX_MANIFEST + 1), "1", "more than 8388608 bytes"),
        (MANIFEST, digest_of(b"other"), f"a manifest with digest {digest_of(MANIFEST)}"),
    ],
)
def test_a_fake_manifest_that_cannot_be_right_is_refused(body: bytes, pointer: str, expected: str) -> None:
    with fake_registry(lambda call: call.reply(200, body)) as fake, pytest.raises(BuildError, match=expected):
        reach(fake).manifest(pointer)


def test_a_fake_manifest_of_unknown_type_comes_with_its_type() -> None:
    odd = "application/vnd.other+json; charset=utf-8"
    with fake_registry(lambda call: call.reply(200, b"{}", Content_Type=odd)) as fake:
        raw, media_type = reach(fake).manifest()
        with pytest.raises(BuildError, match=r"unknown media type 'application/vnd.other\+json'"):
            parse(raw, "it", media_type)
        accepted = fake.asked("GET")[0]["Accept"]
        assert accepted.count("application/vnd.oci") == accepted.count("vnd.docker") == 2


class Uploads:
    """A fake registry that takes one upload; it keeps what a cut chunk brought, as some real ones do."""

    def __init__(self, cut_at: list[int] | None = None) -> None:
        self.data = b""
        self.cut_at = cut_at or []
        self.committed = False
        self.faults: dict[str, list[int]] = {}  # method → statuses to answer with first

    def __call__(self, call: Call) -> None:
        method = call.command
        if self.faults.get(method):
            call.content()
            call.reply(self.faults[method].pop(0))
        elif method == "POST":
            self.data = b""
            call.reply(202, Location="/up/1?state=a")
        elif method == "HEAD":
            call.reply(200 if self.committed else 404)
        elif method == "GET":
            call.reply(204, Range=f"0-{max(len(self.data) - 1, 0)}", Location="/up/1?state=b")
        elif method == "PATCH":
            self._patch(call)
        else:
            self.data += call.content()
            self.committed = self.data == CONTENT
            call.reply(201 if self.committed else 400)

    def _patch(self, call: Call) -> None:
        start = int(call.headers["Content-Range"].partition("-")[0])
        if start != len(self.data):
            call.content()
            call.reply(416)
        elif self.cut_at and self.cut_at[0] <= start + int(call.headers["Content-Length"]):
            take = self.cut_at.pop(0) - start
            self.data += call.rfile.read(take)
            call.cut()
        else:
            self.data += call.content()
            call.reply(202, Range=f"0-{len(self.data) - 1}", Location="/up/1?state=c")


def send(fake: Fake, tmp_path: Path, *, chunk: int = 300_000, retries: int = 2) -> None:
    (tmp_path / "blob").write_bytes(CONTENT)
    moved = [0]
    upload(reach(fake, retries=retries), BLOB, tmp_path / "blob", moved.append, chunk)
    assert sum(moved) == BLOB.size


def test_an_upload_to_a_fake_registry_goes_on_inside_a_cut_chunk(tmp_path: Path) -> None:
    uploads = Uploads(cut_at=[100_000, 450_000, 520_000, 590_000, 1_000_000])
    with fake_registry(uploads) as fake:
        send(fake, tmp_path)
        assert uploads.committed and not uploads.cut_at
        assert len(fake.asked("POST")) == 1 and len(fake.asked("GET")) == 5
        ranges = [headers["Content-Range"] for headers in fake.asked("PATCH")]
        assert ranges[:3] == ["0-299999", "100000-399999", "400000-699999"]


@pytest.mark.parametrize(
    ("faults", "posts"),
    [
        ({"PATCH": [500, 502]}, 1),
        ({"PATCH": [405]}, 2),  # no chunks: all at once
        ({"PATCH": [501], "PUT": [503]}, 2),
        ({"POST": [503, 429]}, 3),
        ({"PUT": [500]}, 1),
        ({"GET": [404], "PATCH": [500]}, 2),  # it lost the upload
        ({"GET": [405], "PUT": [500]}, 2),
    ],
)
def test_faults_of_a_fake_registry_during_an_upload_are_overcome(
    tmp_path: Path, faults: dict[str, list[int]], posts: int
) -> None:
    uploads = Uploads()
    uploads.faults = faults
    with fake_registry(uploads) as fake:
        send(fake, tmp_path)
        assert uploads.committed and len(fake.asked("POST")) == posts


def test_a_blob_up_to_a_chunk_goes_to_a_fake_registry_at_once(tmp_path: Path) -> None:
    with fake_registry(Uploads()) as fake:
        send(fake, tmp_path, chunk=BLOB.size)
        assert [method for method, _, _ in fake.seen] == ["POST", "PUT"]
        assert fake.asked("PUT", "/up/1?state=a&digest=sha256")


def test_an_answer_lost_by_a_fake_registry_does_not_send_a_blob_twice(tmp_path: Path) -> None:
    uploads = Uploads()

    def script(call: Call) -> None:
        if call.command == "PUT":
            uploads.committed = (uploads.data + call.content()) == CONTENT
            call.cut()
        elif call.command == "GET":
            call.reply(404)
        else:
            uploads(call)

    with fake_registry(script) as fake:
        send(fake, tmp_path)
        assert len(fake.asked("PUT")) == len(fake.asked("POST")) == 1


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({"PATCH": [500] * 9, "GET": [500] * 9}, "pushing blob sha256:.*HTTP 500"),
        ({"POST": [403]}, "HTTP 403.*docker login"),
        ({"PATCH": [413], "PUT": [413]}, "HTTP 413.*limits the size"),
        ({"PUT": [400]}, "HTTP 400"),
    ],
)
def test_a_fake_registry_that_will_not_take_a_blob_is_not_asked_for_ever(
    tmp_path: Path, faults: dict[str, list[int]], expected: str
) -> None:
    uploads = Uploads()
    uploads.faults = faults
    chunk = BLOB.size if list(faults) == ["PUT"] else 300_000
    with fake_registry(uploads) as fake:
        with pytest.raises(BuildError) as error:
            send(fake, tmp_path, chunk=chunk)
        assert re.search(expected, said(error.value)) and len(fake.seen) < 12


def test_a_file_that_changed_is_not_sent_to_a_fake_registry(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(CONTENT + b"more")
    with fake_registry(Uploads()) as fake:
        with pytest.raises(BuildError, match="it changed"):
            upload(reach(fake), BLOB, tmp_path / "blob", nothing)
        assert not fake.seen


def test_a_fake_upload_elsewhere_is_sent_there_without_authorization(tmp_path: Path) -> None:
    uploads = Uploads()

    def script(call: Call) -> None:
        if "Authorization" not in call.headers:
            call.reply(401, WWW_Authenticate="Basic realm=x")
        else:
            call.reply(202, Location=f"http://{store.address}/up/1?state=a")

    (tmp_path / "blob").write_bytes(CONTENT)
    with fake_registry(uploads) as store, fake_registry(script) as fake:
        there = reach(fake, env=login(fake))
        upload(there, BLOB, tmp_path / "blob", nothing, 300_000)
        assert uploads.committed and len(store.asked("PATCH")) == 4
        assert not [path for _, path, headers in store.seen if "Authorization" in headers]


def test_a_missing_file_is_named_before_a_fake_registry_has_the_manifest(tmp_path: Path) -> None:
    with fake_registry(Uploads()) as fake:
        with pytest.raises(BuildError, match="No such file"):
            reach(fake).push(Blobs(tmp_path), [BLOB], MANIFEST, OCI_MANIFEST, "1")
        assert not fake.asked("PUT")


def test_a_fake_registry_that_reads_its_half_written_link_gets_the_manifest_again() -> None:
    """Docker's registry answered 40 of 900 manifests so while six clients uploaded the blob that these name."""
    body = b'{"errors":[{"code":"DIGEST_INVALID","message":"provided digest did not match uploaded content"}]}'
    races = 1

    def script(call: Call) -> None:
        nonlocal races
        races -= 1
        call.content()
        call.reply(*((400, body) if races >= 0 else (201, b"")))

    with fake_registry(script) as fake:
        reach(fake).put_manifest(MANIFEST, OCI_MANIFEST, "1")
        assert len(fake.asked("PUT")) == 2
        races = 99
        with pytest.raises(BuildError, match="DIGEST_INVALID"):
            reach(fake).put_manifest(MANIFEST, OCI_MANIFEST, "1")
        assert len(fake.asked("PUT")) == 5


def test_a_fake_proxy_is_used_unless_no_proxy_names_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_registry(lambda call: call.reply(200, MANIFEST)) as fake:
        proxies = {"http": f"http://ada:hunter2@{fake.address}"}
        insecure = frozenset({"registry.invalid", "127.0.0.1"})
        transport = Transport(insecure=insecure, proxies=proxies, retries=0)
        away = open_registry("registry.invalid/a:1", transport, {})
        away.manifest()
        assert fake.asked("GET", "http://registry.invalid/v2/a/manifests/1")
        assert "hunter2" not in repr(away)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        open_registry(f"{fake.address}/a:1", transport, {}).manifest()
        assert fake.seen[-1][1] == "/v2/a/manifests/1"
    away.close()  # not on the connection that the fake still holds
    with pytest.raises(BuildError) as error:
        away.manifest()
    assert "hunter2" not in said(error.value) and "proxy" in str(error.value.hint)


@pytest.mark.parametrize("mirror", ["", "ftp://x", "https://", "http://a:b@", "https://u:hunter2@h:no/x"])
def test_a_mirror_that_is_none_is_a_usage_error_without_its_password(mirror: str) -> None:
    with pytest.raises(UsageError, match="neither a host nor a URL") as error:
        open_registry("a", Transport(), {}, [mirror])
    assert "hunter2" not in error.value.message


def test_a_fake_mirror_gets_the_credentials_of_its_own_url_and_no_push(tmp_path: Path) -> None:
    def script(call: Call) -> None:
        if "Authorization" in call.headers:
            call.reply(200, MANIFEST)
        else:
            call.reply(401, WWW_Authenticate='Basic realm="x"')

    with fake_registry(script) as mirror, fake_registry(Uploads()) as fake:
        mirrors = [f"http://m:hunter2@{mirror.address}/hub"]
        transport = Transport(insecure=frozenset({fake.address}), retries=0)
        there = open_registry(f"{fake.address}/team/app", transport, login(fake), mirrors)
        assert there.manifest("1")[0] == MANIFEST
        basic = "Basic " + base64.b64encode(b"m:hunter2").decode()
        assert mirror.asked("GET", "/v2/hub/team/app/manifests/1")[-1]["Authorization"] == basic
        mirror.seen.clear()
        (tmp_path / "blob").write_bytes(CONTENT)
        upload(there, BLOB, tmp_path / "blob", nothing)
        assert not mount(there.endpoint, BLOB.digest, "other", threading.Event()) and not mirror.seen
        assert "hunter2" not in repr(there)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", []),
        ('Basic realm="a b"', [("basic", {"realm": "a b"})]),
        ("Basic realm=a", [("basic", {"realm": "a"})]),
        (
            'Bearer realm="https://x/t",service="s",scope="repository:a:pull,push"',
            [("bearer", {"realm": "https://x/t", "service": "s", "scope": "repository:a:pull,push"})],
        ),
        (
            'Negotiate, BASIC realm="q\\"uote", Bearer realm="x" , error="e"',
            [("negotiate", {}), ("basic", {"realm": 'q"uote'}), ("bearer", {"realm": "x", "error": "e"})],
        ),
    ],
)
def test_challenges_are_read(header: str, expected: list[tuple[str, dict[str, str]]]) -> None:
    assert [(one.scheme, one.parameters) for one in parse_challenges(header)] == expected


@given(st.text(max_size=60) | st.from_regex(r'[a-zA-Z=", \\]{0,60}', fullmatch=True))
def test_any_header_is_read_as_some_challenges(header: str) -> None:
    for challenge in parse_challenges(header):
        assert challenge.scheme == challenge.scheme.lower() != ""


@given(
    st.from_regex(r"[A-Za-z]{1,8}", fullmatch=True),
    st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.text(max_size=20), max_size=4),
)
def test_quoted_challenges_are_read_back(scheme: str, parameters: dict[str, str]) -> None:
    def quoted(value: str) -> str:
        return re.sub(r'(["\\])', r"\\\1", value)

    text = f"{scheme} " + ", ".join(f'{key}="{quoted(value)}"' for key, value in parameters.items())
    (challenge,) = parse_challenges(text)
    assert (challenge.scheme, challenge.parameters) == (scheme.lower(), parameters)


@given(st.text(max_size=40))
def test_any_retry_after_is_a_time_or_none(value: str) -> None:
    wait = retry_after(value)
    assert wait is None or wait >= 0


def test_work_in_parallel_keeps_its_order_and_ends_with_the_first_error() -> None:
    assert each(range(20), lambda item, _stop: item * item, 4) == [n * n for n in range(20)]
    assert each([], lambda item, _stop: item, 4) == []
    done = []

    def work(item: int, stop: threading.Event) -> None:
        if item == 3:
            raise ValueError("third")
        if not stop.wait(0.05):
            done.append(item)

    with pytest.raises(ValueError, match="third"):
        each(range(1000), work, 4)
    assert len(done) < 20
