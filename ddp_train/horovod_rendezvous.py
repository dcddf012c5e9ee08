"""Rendezvous server for Horovod's ranks without horovodrun: in envbuild's job scripts, rank 0 runs it.

Source: Horovod 0.28.1, horovod/common/gloo/http_store.cc: PUT, GET (404 until the key exists) and DELETE of
/SCOPE/KEY.
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

# All ranks start at the same time, but import torch from cold disks.
PATIENCE_S = 300.0
_STEP_S = 0.2
# A key holds one rank's addresses.
_MOST_BYTES = 1 << 20


class Rendezvous(ThreadingHTTPServer):
    """Rendezvous server; it listens on creation and ends with its process, since other ranks may be a step behind."""

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
        """Suppress the access log."""

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
    """In a job of envbuild (its port is Horovod's), run the server on rank 0; other ranks wait until it answers.

    Returns None if another launcher started the ranks, and on all ranks but 0. Raises TrainError when the server
    does not answer in time, or when its port is in use.
    """
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    if not address or not port.isdigit() or environ.get("ENVBUILD_PORT") != port:
        return None
    if environ.get("HOROVOD_RANK") == "0":
        try:
            return Rendezvous(address, int(port))
        except OSError as error:
            raise TrainError(f"rank 0 cannot listen at {address}:{port}: {os_reason(error)}", BAD_INPUT) from None
    _wait(address, int(port), patience_s)
    return None


def _wait(address: str, port: int, patience_s: float) -> None:
    """Wait until the server answers; Horovod itself gives up after 1.5 s."""
    end = time.monotonic() + patience_s
    while True:
        try:
            with contextlib.closing(socket.create_connection((address, port), timeout=5)):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise TrainError(f"rank 0 does not answer at {address}:{port}: {os_reason(error)}") from None
        time.sleep(_STEP_S)
