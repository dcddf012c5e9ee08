"""A line that breaks: a TCP forwarder on this machine that closes connections where a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Judge = Callable[[bytes], bool]


@dataclass
class Line:
    """A running forwarder at `address`; `cuts` counts the connections that it closed.

    `up` is the number of bytes to the server, `down` of those to the client, after which the next
    connection is cut, once for each number. `swallow` judges what comes from the client: where it says
    True, the connection is cut before the server has any of it.
    """

    address: str
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    swallow: Judge = lambda _data: False
    cuts: int = 0


@contextmanager
def forwarder(server: str) -> Iterator[Line]:
    """A line to `server` (host:port)."""
    host, _, port = server.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    line = Line(f"127.0.0.1:{listener.getsockname()[1]}")
    lock = threading.Lock()

    def pump(source: socket.socket, sink: socket.socket, limits: list[int], judge: Judge) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                with lock:
                    cut = bool(limits) and passed + len(data) > limits[0]
                    if cut:
                        data = data[: limits.pop(0) - passed]
                    elif judge(data):
                        cut, data = True, b""
                    line.cuts += cut
                sink.sendall(data)
                passed += len(data)
                if cut:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
                behind = socket.create_connection((host, int(port)))
            except OSError:
                return
            judge: Judge = lambda data: line.swallow(data)  # noqa: E731 - looked up at each call
            for arguments in ((client, behind, line.up, judge), (behind, client, line.down, lambda _data: False)):
                threading.Thread(target=pump, args=arguments, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield line
    finally:
        # close() alone would not wake a thread in accept()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
