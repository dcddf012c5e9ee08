"""A fake registry for faults that a real one shows only when it is ill: an HTTP server a test scripts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from envbuild.cache.http import RequestFailed
from envbuild.image.model import Descriptor
from envbuild.image.registry import Registry
from envbuild.image.registry_endpoint import complain
from envbuild.image.registry_upload import CHUNK, push_blob


class Call(BaseHTTPRequestHandler):
    """One request; a script answers it by `reply`, or cuts it."""

    protocol_version = "HTTP/1.1"

    def content(self) -> bytes:
        """The request's body."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, body: bytes = b"", *, promise: int | None = None, **headers: str) -> None:
        """Answer; `promise` is a Content-Length other than the body's, and then the connection ends.

        In the names of `headers` an underscore stands for a dash.
        """
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 204:
            self.send_header("Content-Length", str(len(body) if promise is None else promise))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = promise is not None

    def cut(self, take: int = 0) -> None:
        """Read `take` bytes of the request's body and close the connection."""
        self.rfile.read(take)
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_arguments: object) -> None:
        """Nothing on the terminal."""

    def _serve(self) -> None:
        assert isinstance(self.server, _Server)
        fake = self.server.fake
        fake.seen.append((self.command, self.path, dict(self.headers.items())))
        fake.script(self)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve


@dataclass
class Fake:
    """A running fake: its `address`, and what it was asked: (method, path, headers)."""

    address: str
    script: Callable[[Call], None]
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def asked(self, method: str, part: str = "") -> list[dict[str, str]]:
        """The headers of the requests with this method whose path holds `part`."""
        return [headers for verb, path, headers in self.seen if verb == method and part in path]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    fake: Fake

    def handle_error(self, *_arguments: object) -> None:
        """A client that goes away is what these tests are about."""


@contextmanager
def fake_registry(script: Callable[[Call], None]) -> Iterator[Fake]:
    """A server on this machine whose every request `script` answers."""
    server = _Server(("127.0.0.1", 0), Call)
    server.fake = Fake(f"127.0.0.1:{server.server_address[1]}", script)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.fake
    finally:
        server.shutdown()
        server.server_close()


def upload(
    there: Registry, blob: Descriptor, path: Path, on_progress: Callable[[int], None], chunk: int = CHUNK
) -> None:
    """Upload one blob without asking whether the registry has it; errors are those of a push."""
    try:
        push_blob(there.endpoint, blob, path, on_progress, threading.Event(), chunk)
    except RequestFailed as error:
        raise complain(f"{there.reference.name}: pushing blob {blob.digest}", [(there.endpoint, error)]) from None
