"""The fetcher against real HTTP and HTTPS servers on 127.0.0.1, by the failures that sites really have."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from lab.host import Host
from lab.wheels import make_recipe, make_wheel

from envbuild.base.errors import BuildError
from envbuild.site.pip_config import PipConfig, uv_environment, uv_settings
from envbuild.site.settings import Site
from envbuild.store.fetch import WantedWheel, locate_wheels
from envbuild.store.sources import probe_index
from envbuild.store.store import Store

MEBIBYTE = 1 << 20
CLOSED = "http://127.0.0.1:9/simple"  # the discard port: nothing listens there

# What a request meets before, or instead of, its file: an answer, a cut after some bytes, a stall.
Status = tuple[int, Mapping[str, str]]
Fault = Status | int | Callable[["Handler"], None]


@dataclass
class Index:
    """A package index: pages under /simple/, files under /files/, and what goes wrong with them."""

    files: dict[str, bytes] = field(default_factory=dict)
    pages: dict[str, tuple[str, str]] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    auth: str | None = None
    ranges: bool = True
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def add(self, filename: str, data: bytes, *, listed: str | None = "", yanked: bool = False) -> WantedWheel:
        """Publish a file; `listed` is the sha256 on its page: "" the true one, None none at all."""
        digest = hashlib.sha256(data).hexdigest()
        name, version = filename.split("-")[:2]
        self.files[f"/files/{filename}"] = data
        mark = "" if listed is None else f"#sha256={listed or digest}"
        page = f"/simple/{name}/"
        _, before = self.pages.get(page, ("", ""))
        attribute = ' data-yanked="broken"' if yanked else ""
        row = f'<a href="../../files/{filename}{mark}"{attribute}>{filename}</a><br>\n'
        self.pages[page] = ("text/html", before + row)
        return WantedWheel(name, version, frozenset({digest}))

    def asked(self, path: str) -> list[dict[str, str]]:
        """The headers of each request for `path`."""
        return [headers for seen, headers in self.seen if seen == path]

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    def with_user(self, user: str) -> str:
        return self.url.replace("://", f"://{user}@")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index: Index

    def do_GET(self) -> None:
        index = self.index
        path = urlsplit(self.path).path
        index.seen.append((path, dict(self.headers)))
        if index.auth is not None:
            expected = "Basic " + base64.b64encode(index.auth.encode()).decode()
            if self.headers.get("Authorization") != expected:
                return self.answer(401, b"who are you?", {"WWW-Authenticate": 'Basic realm="x"'})
        fault = index.faults[path].pop(0) if index.faults.get(path) else index.always.get(path)
        if isinstance(fault, int):
            return self.answer(fault)
        if isinstance(fault, tuple):
            return self.answer(fault[0], b"", fault[1])
        if fault is not None:
            self.close_connection = True
            return fault(self)
        if path in index.pages:
            kind, text = index.pages[path]
            return self.answer(200, text.encode(), {"Content-Type": kind})
        if path in index.files:
            return self.send_file(index.files[path])
        return self.answer(404)

    def send_file(self, data: bytes) -> None:
        wanted = self.headers.get("Range")
        if wanted and self.index.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                return self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            span = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self.answer(206, data[start:], {"Content-Range": span})
        return self.answer(200, data)

    def answer(self, code: int, body: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.answer(405, b"")  # as many static servers: uv then asks with GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # the default of 5 drops connections of eight threads at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # cut connections are meant


def cut_after(count: int) -> Fault:
    """Promise the whole file, send `count` bytes of it, and drop the connection."""

    def cut(handler: Handler) -> None:
        path = urlsplit(handler.path).path
        data = handler.index.files.get(path) or handler.index.pages[path][1].encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("Content-Type", "text/html")
        handler.end_headers()
        handler.wfile.write(data[:count])

    return cut


def stall(handler: Handler) -> None:
    """Send nothing for a long time, as a hung server does."""
    time.sleep(30)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Index]]:
    """Start servers on loopback; the caller's proxies, certificates and netrc do not reach the test."""
    for name in list(os.environ):
        bundles = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
        if name.lower().endswith("_proxy") or name in bundles:
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", os.devnull)
    servers: list[Server] = []

    def start(tls: tuple[Path, Path] | None = None, **settings: Any) -> Index:
        index = Index(**settings)
        server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"index": index}))
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        scheme = "https" if tls else "http"
        index.url = f"{scheme}://127.0.0.1:{server.server_address[1]}/simple"
        return index

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def pip_for(*indexes: str, **settings: Any) -> PipConfig:
    """A configuration whose index is the first of `indexes`; quick to give up."""
    first = indexes[0] if indexes else CLOSED
    settings = {"retries": 2, "timeout_s": 5.0, **settings}
    return PipConfig(index_url=first, extra_index_urls=tuple(indexes[1:]), **settings)


def no_default() -> str:
    raise AssertionError("the default index was asked for although pip names one")


def fetch(
    folder: Path,
    pip: PipConfig,
    *wanted: WantedWheel,
    indexes: Sequence[str] = (),
    site: Site | None = None,
    offline: bool = False,
) -> dict[WantedWheel, Path]:
    host = Host(Store(folder), pip, site or Site(store=folder))
    return locate_wheels(wanted, host, indexes, offline=offline)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refusal(folder: Path, pip: PipConfig, *wanted: WantedWheel, **options: Any) -> str:
    with pytest.raises(BuildError) as caught:
        fetch(folder, pip, *wanted, **options)
    assert caught.value.hint
    return caught.value.message


# ---- plain fetching


def test_wheels_go_into_the_store_and_are_not_asked_for_again(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = [index.add(f"demo{n}-1.0-py3-none-any.whl", b"%d" % n * 999) for n in range(20)]
    found = fetch(tmp_path, pip_for(index.url), *wanted)
    assert [digest_of(found[wheel]) for wheel in wanted] == [min(w.hashes) for w in wanted]
    asked = len(index.seen)
    assert fetch(tmp_path, pip_for(CLOSED), *wanted) == found
    assert len(index.seen) == asked == 40
    assert not list((tmp_path / "partial").iterdir())


def test_json_pages_and_yanked_files_are_read(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    yanked = index.add("old-1.0-py3-none-any.whl", b"old", yanked=True)
    plain = index.add("new-1.0-py3-none-any.whl", b"new")
    row = {
        "filename": "new-1.0-py3-none-any.whl",
        "url": "/files/new-1.0-py3-none-any.whl",
        "hashes": {"sha256": min(plain.hashes)},
        "yanked": "bad",
    }
    text = json.dumps({"meta": {"api-version": "1.1"}, "name": "new", "versions": ["1.0"], "files": [row]})
    index.pages["/simple/new/"] = ("application/vnd.pypi.simple.v1+json", text)
    assert len(fetch(tmp_path, pip_for(index.url), yanked, plain)) == 2


def test_a_simple_tree_on_disk_is_an_index_without_a_network(tmp_path: Path, serve: Callable[..., Index]) -> None:
    data = b"from disk"
    (tmp_path / "tree/demo").mkdir(parents=True)
    (tmp_path / "tree/files").mkdir()
    (tmp_path / "tree/files/demo-1.0+cpu-py3-none-any.whl").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    (tmp_path / "tree/demo/index.html").write_text(
        f'<a href="../files/demo-1.0%2Bcpu-py3-none-any.whl#sha256={digest}">demo-1.0+cpu-py3-none-any.whl</a>'
    )
    wanted = WantedWheel("demo", "1.0+cpu", frozenset({digest}))
    proxy = serve()
    pip = pip_for((tmp_path / "tree").as_uri(), proxy=proxy.url)
    for offline in (True, False):
        found = fetch(tmp_path / f"store-{offline}", pip, wanted, offline=offline)
        assert found[wanted].read_bytes() == data
    assert not proxy.seen


def test_a_find_links_folder_is_used_in_place(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "links", "demo")
    (tmp_path / "links/demo-1.0-py2-none-any.whl").write_bytes(b"another file of this version")
    wanted = WantedWheel("demo", "1.0", frozenset({digest_of(wheel)}))
    pip = pip_for(find_links=(str(tmp_path / "links"),))
    assert fetch(tmp_path / "store", pip, wanted) == {wanted: wheel}


def test_find_links_pages_local_and_remote(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    local = make_wheel(tmp_path / "links", "local")
    (tmp_path / "links.html").write_text(f'<a href="links/{local.name}">here</a>')
    remote = index.add("remote-1.0-py3-none-any.whl", b"remote")
    index.pages["/list.html"] = ("text/html", '<a href="files/remote-1.0-py3-none-any.whl">r</a>')
    links = (str(tmp_path / "links.html"), index.url.replace("/simple", "/list.html"))
    wanted = WantedWheel("local", "1.0", frozenset({digest_of(local)}))
    pip = PipConfig(no_index=True, find_links=links, retries=0)
    assert len(fetch(tmp_path / "store", pip, wanted, remote)) == 2


# ---- credentials, certificates, proxies


def test_credentials_from_the_url_reach_pages_and_files(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve(auth="me:p@ss")
    wanted = index.add("demo-1.0-py3-none-any.whl", b"private")
    assert fetch(tmp_path, pip_for(index.with_user("me:p%40ss")), wanted)


def test_credentials_from_netrc(tmp_path: Path, serve: Callable[..., Index], monkeypatch: pytest.MonkeyPatch) -> None:
    index = serve(auth="me:secret")
    wanted = index.add("demo-1.0-py3-none-any.whl", b"private")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert fetch(tmp_path, pip_for(index.url), wanted)


def test_refused_credentials_are_said_and_not_shown(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve(auth="me:secret")
    wanted = index.add("demo-1.0-py3-none-any.whl", b"private")
    said = refusal(tmp_path, pip_for(index.with_user("me:hunter2")), wanted)
    assert "401" in said and f"me:****@{index.host}" in said and "hunter2" not in said


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Path, Path]]:
    """A throw-away certificate authority, and the certificate and key of 127.0.0.1 that it signed."""
    folder = tmp_path_factory.mktemp("ca")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    # As many sites' own authorities, it has no key usage extension: pip and uv accept that with every Python.
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=lab", "-days", "2")
    openssl("req", *key, "-keyout", "host.key", "-out", "host.csr", "-subj", "/CN=127.0.0.1")
    openssl(
        "x509",
        "-req",
        "-in",
        "host.csr",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-out",
        "host.pem",
        "-days",
        "2",
        "-extfile",
        "ext",
    )
    return folder / "ca.pem", (folder / "host.pem", folder / "host.key")


Authority = tuple[Path, tuple[Path, Path]]


def test_a_certificate_of_one_s_own_authority(
    tmp_path: Path, serve: Callable[..., Index], authority: Authority
) -> None:
    index = serve(tls=authority[1])
    wanted = index.add("demo-1.0-py3-none-any.whl", b"secure")
    said = refusal(tmp_path, pip_for(index.url), wanted)
    assert "certificate verify failed" in said
    assert fetch(tmp_path, pip_for(index.url, cert=str(authority[0])), wanted)


@pytest.mark.parametrize("port", [True, False])
def test_a_trusted_host_is_not_verified(
    tmp_path: Path, serve: Callable[..., Index], authority: Authority, port: bool
) -> None:
    index = serve(tls=authority[1])
    wanted = index.add("demo-1.0-py3-none-any.whl", b"secure")
    trusted = (index.host if port else "127.0.0.1",)
    assert fetch(tmp_path, pip_for(index.url, trusted_hosts=trusted), wanted)


def test_trust_does_not_follow_a_redirect_to_another_server(
    tmp_path: Path, serve: Callable[..., Index], authority: Authority
) -> None:
    other = serve(tls=authority[1])
    index = serve(tls=authority[1])
    wanted = other.add("demo-1.0-py3-none-any.whl", b"secure")
    index.always["/simple/demo/"] = (302, {"Location": f"{other.url}/demo/"})
    said = refusal(tmp_path, pip_for(index.url, trusted_hosts=(index.host,)), wanted)
    assert "certificate verify failed" in said and not other.seen


def test_a_redirect_from_https_to_plain_http_is_refused_unless_the_host_is_trusted(
    tmp_path: Path, serve: Callable[..., Index], authority: Authority
) -> None:
    plain, index = serve(), serve(tls=authority[1])
    name = "demo-1.0-py3-none-any.whl"
    wanted = index.add(name, b"data")
    plain.add(name, b"data")
    index.always[f"/files/{name}"] = (302, {"Location": f"http://{plain.host}/files/{name}"})
    ca = str(authority[0])
    said = refusal(tmp_path, pip_for(index.url, cert=ca), wanted)
    assert f"redirects from HTTPS to plain HTTP at {plain.host}" in said and "trusted-host" in said
    assert not plain.seen
    assert fetch(tmp_path, pip_for(index.url, cert=ca, trusted_hosts=(plain.host,)), wanted)


def test_a_lock_whose_pages_came_over_plain_http_is_refused(
    tmp_path: Path, serve: Callable[..., Index], authority: Authority
) -> None:
    plain, index = serve(), serve(tls=authority[1])
    data = make_wheel(tmp_path, "demo").read_bytes()
    for one in (plain, index):
        one.add("demo-1.0-py3-none-any.whl", data)
    make_recipe(tmp_path / "recipes", "one", ["demo"])
    variables = {
        "PIP_INDEX_URL": index.url,
        "PIP_CERT": str(authority[0]),
        "PIP_CONFIG_FILE": os.devnull,
        "ENVBUILD_STORE": str(tmp_path / "store"),
        "PIP_FIND_LINKS": "",
    }
    command = [sys.executable, "-m", "envbuild", "lock", "one", "--wheels"]

    def lock(**more: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **variables, **more}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    redirect = (302, {"Location": f"http://{plain.host}/simple/demo/"})
    index.always["/simple/demo/"] = redirect
    done = lock()
    assert done.returncode == 3 and f"demo is not trusted: {index.url}: it redirects from HTTPS" in done.stderr
    assert not list((tmp_path / "recipes/one").glob("*.requirements.txt"))
    assert lock(PIP_TRUSTED_HOST=plain.host).returncode == 0
    del index.always["/simple/demo/"]
    done = lock()
    assert done.returncode == 0, done.stderr


def test_the_password_does_not_follow_a_redirect_to_another_server(tmp_path: Path, serve: Callable[..., Index]) -> None:
    other = serve()
    index = serve(auth="me:secret")
    wanted = index.add("demo-1.0-py3-none-any.whl", b"data")
    other.add("demo-1.0-py3-none-any.whl", b"data")
    # `localhost` is another host than 127.0.0.1 to every client.
    elsewhere = other.url.replace("127.0.0.1", "localhost").replace("/simple", "/files")
    index.always["/files/demo-1.0-py3-none-any.whl"] = (302, {"Location": f"{elsewhere}/demo-1.0-py3-none-any.whl"})
    assert fetch(tmp_path, pip_for(index.with_user("me:secret")), wanted)
    assert other.seen and "Authorization" not in other.seen[0][1]


def test_a_proxy_of_pip_s_carries_all_requests(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", b"by proxy")
    carried: list[str] = []

    class Proxy(Handler):
        def do_GET(self) -> None:
            carried.append(self.path)
            with urlopen(self.path, timeout=5) as response:
                self.answer(response.status, response.read(), {"Content-Type": "text/html"})

    server = Server(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    proxy = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        assert fetch(tmp_path, pip_for(index.url, proxy=proxy), wanted)
    finally:
        server.shutdown()
        server.server_close()
    assert carried == [f"{index.url}/demo/", f"http://{index.host}/files/demo-1.0-py3-none-any.whl"]


# ---- cut, slow and lying servers


def test_a_dropped_connection_is_resumed(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", os.urandom(3 * MEBIBYTE))
    path = "/files/demo-1.0-py3-none-any.whl"
    index.faults[path] = [cut_after(2 * MEBIBYTE)]
    assert fetch(tmp_path, pip_for(index.url), wanted)
    begun = int(index.asked(path)[1]["Range"].removeprefix("bytes=").rstrip("-"))
    assert len(index.asked(path)) == 2 and begun >= MEBIBYTE


def test_a_later_call_goes_on_where_an_earlier_one_was_cut(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", os.urandom(3 * MEBIBYTE))
    path = "/files/demo-1.0-py3-none-any.whl"
    index.faults[path] = [cut_after(2 * MEBIBYTE)]
    assert path.rpartition("/")[2] in refusal(tmp_path, pip_for(index.url, retries=0), wanted)
    assert fetch(tmp_path, pip_for(index.url), wanted)
    assert "Range" in index.asked(path)[1]


def test_more_cuts_than_retries_are_survived_while_bytes_arrive(tmp_path: Path, serve: Callable[..., Index]) -> None:
    """Each piece is progress: a large file over a bad line must not fail for its number of cuts."""
    index = serve()
    data = os.urandom(4 * MEBIBYTE)
    wanted = index.add("demo-1.0-py3-none-any.whl", data)

    def half_a_mebibyte(handler: Handler) -> None:
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        handler.wfile.write(data[start : start + MEBIBYTE // 2])

    index.always["/files/demo-1.0-py3-none-any.whl"] = half_a_mebibyte
    assert fetch(tmp_path, pip_for(index.url, retries=1), wanted)


def test_a_server_that_ignores_range_is_started_over(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve(ranges=False)
    wanted = index.add("demo-1.0-py3-none-any.whl", os.urandom(2 * MEBIBYTE))
    index.faults["/files/demo-1.0-py3-none-any.whl"] = [cut_after(MEBIBYTE)]
    assert fetch(tmp_path, pip_for(index.url), wanted)


@pytest.mark.parametrize("length", [MEBIBYTE, 3 * MEBIBYTE])
def test_a_partial_that_is_no_beginning_is_started_over(
    tmp_path: Path, serve: Callable[..., Index], length: int
) -> None:
    """Shorter than the file: the digest tells. Longer: the server answers 416."""
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", os.urandom(2 * MEBIBYTE))
    (tmp_path / "partial").mkdir(parents=True)
    (tmp_path / "partial" / min(wanted.hashes)).write_bytes(b"x" * length)
    assert fetch(tmp_path, pip_for(index.url), wanted)


def test_a_cut_page_is_asked_again(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", b"data")
    index.faults["/simple/demo/"] = [cut_after(10)]
    assert fetch(tmp_path, pip_for(index.url), wanted)
    index.always["/simple/demo/"] = cut_after(10)
    assert "cannot be used" in refusal(tmp_path / "two", pip_for(index.url), wanted)


def test_busy_and_failing_servers_are_asked_again(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", b"data")
    index.faults["/simple/demo/"] = [(429, {"Retry-After": "1"}), 500]
    index.faults["/files/demo-1.0-py3-none-any.whl"] = [503]
    started = time.monotonic()
    assert fetch(tmp_path, pip_for(index.url), wanted)
    assert time.monotonic() - started > 1.0
    assert len(index.asked("/simple/demo/")) == 3


@pytest.mark.parametrize("code", [403, 404, 500])
def test_one_project_refused_does_not_hide_the_others(tmp_path: Path, serve: Callable[..., Index], code: int) -> None:
    """Object stores answer 403 for what they do not have; one bad page is not a dead index."""
    index, second = serve(), serve()
    refused = second.add("alpha-1.0-py3-none-any.whl", b"alpha")
    others = [index.add(f"x{n}-1.0-py3-none-any.whl", b"%d" % n) for n in range(30)]
    index.always["/simple/alpha/"] = code
    pip = pip_for(index.url, second.url, retries=0)
    found = fetch(tmp_path, pip, refused, *others)
    assert len(found) == 31


def test_a_dead_index_is_waited_for_once(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index, dead = serve(), serve()
    wanted = [index.add(f"x{n}-1.0-py3-none-any.whl", b"%d" % n) for n in range(40)]
    for wheel in wanted:
        dead.always[f"/simple/{wheel.name}/"] = stall
    started = time.monotonic()
    fetch(tmp_path, pip_for(dead.url, index.url, retries=0, timeout_s=1.0), *wanted)
    assert time.monotonic() - started < 4.0


# ---- wrong content, missing files, and what is said of them


def test_wrong_content_is_refused_and_the_next_index_used(tmp_path: Path, serve: Callable[..., Index]) -> None:
    wrong, right = serve(), serve()
    wanted = right.add("demo-1.0-py3-none-any.whl", b"right")
    wrong.add("demo-1.0-py3-none-any.whl", b"wrong", listed=None)
    found = fetch(tmp_path, pip_for(wrong.url, right.url), wanted)
    assert found[wanted].read_bytes() == b"right"


def test_a_file_listed_with_another_hash_is_not_downloaded(tmp_path: Path, serve: Callable[..., Index]) -> None:
    wrong, right = serve(), serve()
    wanted = right.add("demo-1.0-py3-none-any.whl", b"right")
    wrong.add("demo-1.0-py3-none-any.whl", b"wrong")
    assert fetch(tmp_path, pip_for(wrong.url, right.url), wanted)
    assert not wrong.asked("/files/demo-1.0-py3-none-any.whl")


def test_an_index_that_lies_about_a_hash(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = WantedWheel("demo", "1.0", frozenset({"ab" * 32}))
    index.add("demo-1.0-py3-none-any.whl", b"forged", listed="ab" * 32)
    said = refusal(tmp_path, pip_for(index.url), wanted)
    assert "hash mismatch" in said and hashlib.sha256(b"forged").hexdigest() in said
    assert "ab" * 32 in said and not list(tmp_path.glob("wheels/*/*"))


def test_one_error_says_what_every_source_answered(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    index.add("demo-1.0-py3-none-any.whl", b"other")
    (tmp_path / "links").mkdir()
    wanted = [WantedWheel(name, "1.0", frozenset({"cd" * 32})) for name in ("demo", "absent")]
    closed = CLOSED.replace("://", "://user:hunter2@")
    pip = pip_for(closed, index.url, find_links=(str(tmp_path / "links"),))
    said = refusal(tmp_path / "store", pip, *wanted)
    assert "demo==1.0" in said and "absent==1.0" in said
    assert said.count("refused") == 2 and said.count(f"{tmp_path / 'links'}: not there") == 2
    assert hashlib.sha256(b"other").hexdigest() in said
    assert "hunter2" not in said and "user:****@" in said


@pytest.mark.parametrize("older", [404, "page"])
def test_an_older_page_is_asked_for_again(tmp_path: Path, serve: Callable[..., Index], older: int | str) -> None:
    """One of an index's servers, or a cache in front of it, may not have the upload that the lock was made from."""
    index = serve()
    index.add("demo-0.9-py3-none-any.whl", b"old")
    page = index.pages["/simple/demo/"][1].encode()
    wanted = index.add("demo-1.0-py3-none-any.whl", b"new")
    other = index.add("other-1.0-py3-none-any.whl", b"other")
    old = older if isinstance(older, int) else lambda handler: handler.answer(200, page, {"Content-Type": "text/html"})
    index.faults["/simple/demo/"] = [old]
    assert len(fetch(tmp_path, pip_for(index.url), wanted, other)) == 2
    asked = index.asked("/simple/demo/")
    assert len(asked) == 2 and {headers["Cache-Control"] for headers in asked} == {"max-age=0"}
    assert len(index.asked("/simple/other/")) == 1
    index.always["/simple/demo/"] = old
    said = refusal(tmp_path / "two", pip_for(index.url), wanted)
    assert said.count(f"{index.url}: not there") == 1 and len(index.asked("/simple/demo/")) == 4


def test_a_dead_index_does_not_matter_where_find_links_has_the_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "links", "demo")
    wanted = WantedWheel("demo", "1.0", frozenset({digest_of(wheel)}))
    pip = pip_for(CLOSED, find_links=(str(tmp_path / "links"),))
    assert fetch(tmp_path / "store", pip, wanted, indexes=["http://no-such-host.invalid/simple"])


def test_a_mirror_is_asked_first_and_the_original_is_the_way_out(tmp_path: Path, serve: Callable[..., Index]) -> None:
    mirror, index = serve(), serve()
    both = index.add("both-1.0-py3-none-any.whl", b"both")
    mirror.add("both-1.0-py3-none-any.whl", b"both")
    only = index.add("only-1.0-py3-none-any.whl", b"only")
    site = Site(store=tmp_path, mirrors={index.url: (CLOSED, mirror.url)})
    pip = PipConfig(index_url=CLOSED, retries=0)
    assert fetch(tmp_path, pip, both, only, indexes=[index.url], site=site)
    assert mirror.asked("/files/both-1.0-py3-none-any.whl") and not index.asked("/simple/both/")


def test_no_index_and_offline_ask_no_server(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", b"data")
    refusal(tmp_path, pip_for(index.url, no_index=True), wanted, indexes=[index.url])
    refusal(tmp_path, pip_for(index.url, find_links=(index.url,)), wanted, offline=True)
    assert not index.seen


def test_probing_an_index(serve: Callable[..., Index]) -> None:
    index = serve()
    assert probe_index(index.url, pip_for(), {}) is None  # a 404 is an answer
    index.always["/simple/torch/"] = 503
    assert "503" in (probe_index(index.url, pip_for(), {}) or "")
    assert "refused" in (probe_index(CLOSED, pip_for(), {}) or "")


# ---- processes, interruption, stores that cannot be written, memory

CHILD = """
import json, os, queue, resource, sys, threading
from pathlib import Path
from envbuild.base.errors import EnvbuildError
from envbuild.environment import Environment
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site
from envbuild.store.fetch import WantedWheel, locate_wheels
from envbuild.store.store import Store
import requests, mousebender.simple  # the base line of memory is that of a process with its libraries
store, index, name, version, digest, user = sys.argv[1:]
if user != "-":
    os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
pip = PipConfig(index_url=index, retries=1, timeout_s=20.0)
wanted = WantedWheel(name, version, frozenset({digest}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    found = locate_wheels([wanted], Environment({}, Site(store=Path(store)), pip, Store(Path(store))), offline=False)
except EnvbuildError as error:
    sys.exit(f"{error.message}\\n{error.hint}")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([str(found[wanted]), after - before]))
"""


def child(store: Path, index: Index, wanted: WantedWheel, user: str = "-") -> subprocess.Popen[str]:
    what = (wanted.name, wanted.version, min(wanted.hashes))
    line = [sys.executable, "-c", CHILD, str(store), index.url, *what, user]
    return subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a script ignores Ctrl-C, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_two_processes_fetch_the_same_wheel_at_once(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", os.urandom(30 * MEBIBYTE))
    children = [child(tmp_path, index, wanted) for _ in range(4)]
    said = [process.communicate(timeout=60) for process in children]
    assert [process.returncode for process in children] == [0] * 4, said
    paths = {json.loads(out)[0] for out, _ in said}
    assert len(paths) == 1 and digest_of(Path(paths.pop())) == min(wanted.hashes)
    assert len(index.asked("/files/demo-1.0-py3-none-any.whl")) == 1


def test_memory_stays_small(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", os.urandom(MEBIBYTE) * 100)
    process = child(tmp_path, index, wanted)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)[1] < 40 * 1024  # KiB


@pytest.mark.parametrize("how", ["page", "file"])
def test_an_interrupt_ends_a_hung_transfer_at_once(tmp_path: Path, serve: Callable[..., Index], how: str) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", os.urandom(2 * MEBIBYTE))
    path = "/simple/demo/" if how == "page" else "/files/demo-1.0-py3-none-any.whl"

    def half_then_stall(handler: Handler) -> None:
        if how == "file":
            cut = cut_after(MEBIBYTE)
            assert callable(cut)
            cut(handler)
        stall(handler)

    index.always[path] = half_then_stall
    process = child(tmp_path, index, wanted)
    deadline = time.monotonic() + 20
    while not index.asked(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 10  # the server stalls for much longer
    assert "KeyboardInterrupt" in err
    if how == "file":
        partial = tmp_path / "partial" / min(wanted.hashes)
        assert partial.stat().st_size >= MEBIBYTE // 2
        del index.always[path]
        assert fetch(tmp_path, pip_for(index.url), wanted)
        assert "Range" in index.asked(path)[-1]


def test_a_store_of_another_user(tmp_path: Path, serve: Callable[..., Index]) -> None:
    """Read-only: fine while everything is there, one clear error when something must be written."""
    if os.getuid() != 0:
        pytest.skip("only root may run a child as another user")
    index = serve()
    there = index.add("there-1.0-py3-none-any.whl", b"there")
    absent = index.add("absent-1.0-py3-none-any.whl", b"absent")
    fetch(tmp_path, pip_for(index.url), there)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.owner() == "root" and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    allowed, refused = (child(tmp_path, index, there, "65534"), child(tmp_path, index, absent, "65534"))
    _, err = allowed.communicate(timeout=60)
    assert allowed.returncode == 0, err
    _, err = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert str(tmp_path) in err and "ENVBUILD_STORE" in err and "Traceback" not in err


def test_a_store_below_a_file(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", b"data")
    (tmp_path / "file").write_text("")
    assert "cannot write " in refusal(tmp_path / "file/store", pip_for(index.url), wanted)


def test_a_full_disk(tmp_path: Path, serve: Callable[..., Index]) -> None:
    index = serve()
    wanted = index.add("demo-1.0-py3-none-any.whl", os.urandom(6 * MEBIBYTE))
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.strip()}")
    try:
        said = refusal(disk, pip_for(index.url), wanted)
        assert "No space left" in said and str(disk) in said
    finally:
        subprocess.run(["umount", disk], check=True)


# ---- uv reads the same configuration


def test_uv_resolves_by_the_rendered_settings(tmp_path: Path, serve: Callable[..., Index]) -> None:
    """One project with an old copy on the recipe's index and a new one on pip's, behind a password;
    one in find-links; one in a simple tree on disk."""
    recipe, private = serve(), serve(auth="me:secret")
    for index, version in ((recipe, "1.0"), (private, "2.0")):
        wheel = make_wheel(tmp_path / "made", "alpha", version, requires=["beta", "gamma"])
        index.add(wheel.name, wheel.read_bytes())
    make_wheel(tmp_path / "links", "beta")
    gamma = make_wheel(tmp_path / "tree/gamma", "gamma")
    (gamma.parent / "index.html").write_text(f'<a href="{gamma.name}#sha256={digest_of(gamma)}">{gamma.name}</a>')
    pip = PipConfig(
        index_url=private.with_user("me:secret"),
        extra_index_urls=((tmp_path / "tree").as_uri(),),
        find_links=(str(tmp_path / "links"),),
    )
    settings = tmp_path / "uv.toml"
    settings.touch(0o600)
    settings.write_text(uv_settings(pip, [recipe.url]))
    (tmp_path / "in").write_text("alpha\n")
    from uv import find_uv_bin

    hostile = {"UV_INDEX_STRATEGY": "first-index", "UV_DEFAULT_INDEX": CLOSED, "UV_PRERELEASE": "allow"}
    env = uv_environment(pip, {**os.environ, **hostile}, tmp_path / "cache")
    done = subprocess.run(
        [
            find_uv_bin(),
            "pip",
            "compile",
            "--config-file",
            settings,
            "--no-header",
            "--no-annotate",
            "--python",
            sys.executable,
            tmp_path / "in",
        ],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["alpha==2.0", "beta==1.0", "gamma==1.0"], done.stderr
