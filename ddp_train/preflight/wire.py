"""How the nodes of a preflight talk: one JSON object a line over TCP, and attempts at a connection in words.

Everything that arrives is taken for what a stranger may have sent: a message names the run that it belongs to, lines
are bounded, and what cannot be understood is a WireError.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

# The facts of a node are some tens of KiB: names and versions of its packages, and looked-up names.
LIMIT = 4 << 20
# What travels both ways between each pair of nodes: more than one packet of any network, so that packets too large
# for a link on the way (jumbo frames on one side only) are noticed.
PADDING = "x" * 20000
# What an attempt may end with besides OK.
OK = "ok"
REFUSED = "refused"
TIMED_OUT = "timed out"
NO_ROUTE = "no route"
STALLED = "stalled"
STRANGER = "stranger"
# Before Python 3.11 not the builtin TimeoutError.
Late = asyncio.TimeoutError

_WORDS = {
    errno.ECONNREFUSED: REFUSED,
    errno.ETIMEDOUT: TIMED_OUT,
    errno.EHOSTUNREACH: NO_ROUTE,
    errno.ENETUNREACH: NO_ROUTE,
    errno.EHOSTDOWN: NO_ROUTE,
}


class WireError(Exception):
    """What arrived is not a message of this run's preflight, or nothing more arrives."""


def encode(message: Mapping[str, Any], run: str) -> bytes:
    """`message` as a line, with the name of the `run`."""
    return json.dumps({**message, "preflight": run}).encode() + b"\n"


def decode(line: bytes, run: str) -> dict[str, Any]:
    """The message in a line. Raises WireError when it is none, or another run's."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError("not a message of a preflight") from error
    if not isinstance(message, dict) or not isinstance(message.get("preflight"), str):
        raise WireError("not a message of a preflight")
    if message["preflight"] != run:
        raise WireError(f"a preflight of another run, {message['preflight'][:100]!r}")
    return message


class Wire:
    """One connection of the preflight of `run`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, run: str
    ) -> None:
        self._reader, self._writer, self._run = reader, writer, run

    @property
    def peer(self) -> str:
        """The address at the other end, as this one sees it."""
        name = self._writer.get_extra_info("peername")
        return plain(str(name[0])) if name else ""

    async def send(self, message: Mapping[str, Any]) -> None:
        """Raises WireError when the other end is gone."""
        try:
            self._writer.write(encode(message, self._run))
            await self._writer.drain()
        except OSError as error:
            raise WireError(f"the connection broke: {error}") from error

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message. Raises WireError, also when none came in time."""
        try:
            line = await asyncio.wait_for(self._reader.readline(), max(0.0, timeout_s))
        except Late as error:
            raise WireError("no answer in time") from error
        except (OSError, ValueError) as error:  # ValueError: a line over the limit
            raise WireError(f"the connection broke: {error}") from error
        if not line.endswith(b"\n"):
            raise WireError("the other end closed the connection")
        return decode(line, self._run)

    async def ended(self, timeout_s: float) -> None:
        """Wait until the other end has closed: then this end's port is free at once (no TIME_WAIT here)."""
        try:
            await asyncio.wait_for(self._reader.read(), max(0.0, timeout_s))
        except (OSError, Late):
            return

    def close(self) -> None:
        """End the connection; nothing of it stays in the kernel when the other end has not closed yet."""
        sock = self._writer.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.close()

    def finish(self) -> None:
        """End the connection in order: this end first."""
        self._writer.close()


async def connect(address: str, port: int, run: str, timeout_s: float) -> Wire:
    """A connection to a node. Raises OSError; when nothing answers in time, one with errno ETIMEDOUT."""
    opening = asyncio.open_connection(address, port, limit=LIMIT)
    try:
        reader, writer = await asyncio.wait_for(opening, max(0.05, timeout_s))
    except Late as error:
        raise OSError(errno.ETIMEDOUT, "no answer") from error
    return Wire(reader, writer, run)


async def attempt(address: str, port: int, run: str, node: int, timeout_s: float) -> str:
    """Try to exchange some packets with `node` at its address: OK, or what happened instead."""
    deadline = time.monotonic() + timeout_s
    try:
        wire = await connect(address, port, run, timeout_s)
    except OSError as error:
        return in_a_word(error)
    try:
        await wire.send({"padding": PADDING})
        answer = await wire.receive(deadline - time.monotonic())
    except WireError:
        return STALLED
    finally:
        wire.finish()
    return OK if answer.get("node") == node else STRANGER


def in_a_word(error: OSError) -> str:
    """What a connection failed with."""
    return _WORDS.get(error.errno or 0, (error.strerror or str(error)).lower())


def plain(address: str) -> str:
    """An address without its zone, and an IPv4 one without IPv6 around it."""
    address = address.partition("%")[0]
    return address[7:] if address.startswith("::ffff:") and "." in address else address
