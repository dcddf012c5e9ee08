"""The server at which Horovod's ranks meet when no horovodrun runs one: a job script of envbuild has rank 0 do it.

Source: Horovod 0.28.1, horovod/common/gloo/http_store.cc: PUT, GET (404 until it is there) and DELETE of /SCOPE/KEY.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .errors import BAD_INPUT, TrainError, os_reason

# Ranks are started at the same time, but import torch from cold disks.
PATIENCE_S = 300.0
_STEP_S = 0.2
# A key holds one rank's addresses.
_MOST_BYTES = 1 << 20


class Rendezvous(ThreadingHTTPServer):
    """The server, listening already. It ends with its process: others may be a step behind."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.values: dict[str, bytes] = {}
        super().__init__((address, port), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    timeout = 60

    def do_GET(self) -> None:
        value = self._server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _MOST_BYTES:
            self._answer(400)
            return
        self._server.values[self.path] = self.rfile.read(int(length))
        self._answer(200)

    def do_DELETE(self) -> None:
        self._answer(200)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    @property
    def _server(self) -> Rendezvous:
        assert isinstance(self.server, Rendezvous)
        return self.server

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def meet(environ: Mapping[str, str], patience_s: float = PATIENCE_S) -> Rendezvous | None:
    """In a job of envbuild (its port is Horovod's), run the server on rank 0; the others wait until it answers.

    None where another started the ranks, and on all ranks but 0. Raises TrainError when there is no server in time, or
    its port is taken.
    """
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    if not address or not port.isdigit() or environ.get("ENVBUILD_PORT") != port:
        return None
    if environ.get("HOROVOD_RANK") == "0":
        try:
            return Rendezvous(address, int(port))
        except OSError as error:
            raise TrainError(
                f"rank 0 cannot listen at {address}:{port}: {os_reason(error)}", BAD_INPUT
            ) from None
    _wait(address, int(port), patience_s)
    return None


def _wait(address: str, port: int, patience_s: float) -> None:
    """Horovod itself gives up after 1.5 s."""
    end = time.monotonic() + patience_s
    while True:
        try:
            with contextlib.closing(socket.create_connection((address, port), timeout=5)):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise TrainError(
                    f"rank 0 does not answer at {address}:{port}: {os_reason(error)}"
                ) from None
        time.sleep(_STEP_S)
