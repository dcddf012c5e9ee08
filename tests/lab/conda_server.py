"""A channel served over HTTP, with the faults that servers have: what is asked is recorded, and can go wrong.

Sources: RFC 9110 (conditional requests, ranges, Basic authentication in RFC 7617).
"""

from __future__ import annotations

import base64
import hmac
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

Fault = Literal["401", "404", "500", "truncate", "drop"]
_CHUNK = 1 << 18
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass
class Server:
    """A running server of the files in `folder`, below `prefix`.

    `faults` maps the end of a path to what goes wrong with it, from the next request on: an answer with that
    status, "truncate" (half of the file, as if it were all) or "drop" (the connection ends after half of it). A
    HEAD request sees statuses and truncation. `requests` are the paths asked for, with the prefix, in their order.
    """

    folder: Path
    prefix: str
    authorization: str | None = None
    faults: dict[str, Fault] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    port: int = 0
    _listener: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """The channel's URL, without credentials."""
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def up(self) -> None:
        """Listen, on the same port as before; nothing when it listens."""
        if self._listener is None:
            self._listener = _Listener(("127.0.0.1", self.port), _handler(self))
            self.port = self._listener.server_address[1]
            threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        """Refuse connections; answers under way come to their end."""
        if self._listener is not None:
            self._listener.shutdown()
            self._listener.server_close()
            self._listener = None

    def fault(self, path: str) -> Fault | None:
        """What goes wrong with `path`, if anything."""
        return next((what for end, what in self.faults.items() if path.endswith(end)), None)


@contextmanager
def serve(
    folder: Path, *, prefix: str = "/conda-forge", user: str | None = None, password: str | None = None
) -> Iterator[Server]:
    """Serve `folder` below `prefix`; with `user` and `password`, nobody else is served."""
    authorization = None
    if user is not None:
        pair = f"{user}:{password or ''}".encode()
        authorization = f"Basic {base64.b64encode(pair).decode()}"
    server = Server(folder, prefix.rstrip("/"), authorization)
    server.up()
    try:
        yield server
    finally:
        server.down()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    # A client that goes away in the middle is what tests provoke.
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client's side of it is what counts."""


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: Any) -> None:
            """Keep quiet."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def send_response(self, code: int, message: str | None = None) -> None:
            """Begin an answer. The connection ends with it, so that none outlives `down`."""
            super().send_response(code, message)
            self.send_header("Connection", "close")

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            server.requests.append(path)
            fault = server.fault(path)
            given = self.headers.get("Authorization", "")
            wanted = server.authorization
            if fault == "401" or (wanted and not hmac.compare_digest(wanted, given)):
                self._status(401, {"WWW-Authenticate": 'Basic realm="lab"'})
            elif fault in ("404", "500"):
                self._status(int(fault), {})
            elif (place := self._place(path)) is None:
                self._status(404, {})
            else:
                self._file(place, fault, body)

        def _place(self, path: str) -> Path | None:
            if not path.startswith(server.prefix + "/"):
                return None
            place = (server.folder / path[len(server.prefix) + 1 :]).resolve()
            return place if place.is_relative_to(server.folder.resolve()) and place.is_file() else None

        def _status(self, status: int, headers: dict[str, str]) -> None:
            text = b"" if status == 304 else f"{status} {HTTPStatus(status).phrase}\n".encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if status != 304:
                self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        def _file(self, place: Path, fault: Fault | None, body: bool) -> None:
            about = place.stat()
            size = about.st_size // 2 if fault == "truncate" else about.st_size
            tag = f'"{about.st_mtime_ns:x}-{about.st_size:x}"'
            changed = formatdate(about.st_mtime, usegmt=True)
            headers = {"ETag": tag, "Last-Modified": changed, "Accept-Ranges": "bytes"}
            known = self.headers.get("If-None-Match")
            if tag in (known or "") or (known is None and self.headers.get("If-Modified-Since") == changed):
                self._status(304, headers)
                return
            start, end = 0, size
            found = _RANGE.fullmatch(self.headers.get("Range", ""))
            if found and any(found.groups()) and self.headers.get("If-Range", tag) in (tag, changed):
                first, last = found.groups()
                start = int(first) if first else max(0, size - int(last))
                end = min(size, int(last) + 1) if first and last else size
                if start >= end:
                    self._status(416, {"Content-Range": f"bytes */{size}"})
                    return
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            self.send_response(206 if "Content-Range" in headers else 200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            if body:
                self._send(place, start, start + (end - start) // 2 if fault == "drop" else end)
                if fault == "drop":
                    with suppress(OSError):
                        self.connection.shutdown(SHUT_RDWR)

        def _send(self, place: Path, start: int, end: int) -> None:
            with place.open("rb") as stream:
                stream.seek(start)
                while start < end and (data := stream.read(min(_CHUNK, end - start))):
                    self.wfile.write(data)
                    start += len(data)

    return Handler
