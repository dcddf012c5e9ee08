"""Protocol of a preflight: one JSON object per line over TCP, and named results of connection attempts.

Messages are untrusted: each one names its run, lines are bounded, and malformed data raise WireError.
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

# The facts of a node take some tens of KiB: names and versions of packages, and looked-up names.
LIMIT = 4 << 20
# Sent in both directions between each pair of nodes. It is larger than one packet of any network, so that an MTU
# mismatch on the way (jumbo frames on one side only) is detected.
PADDING = "x" * 20000
# Results of an attempt; for other errors, it is the system's message.
OK = "ok"
REFUSED = "refused"
TIMED_OUT = "timed out"
NO_ROUTE = "no route"
STALLED = "stalled"
STRANGER = "stranger"
# Before Python 3.11, this is not the builtin TimeoutError.
Late = asyncio.TimeoutError

_WORDS = {
    errno.ECONNREFUSED: REFUSED,
    errno.ETIMEDOUT: TIMED_OUT,
    errno.EHOSTUNREACH: NO_ROUTE,
    errno.ENETUNREACH: NO_ROUTE,
    errno.EHOSTDOWN: NO_ROUTE,
}


class WireError(Exception):
    """The received data are not a message of this run's preflight, or the connection ended."""


def encode(message: Mapping[str, Any], run: str) -> bytes:
    """Return `message` with the name of the `run`, as a line."""
    return json.dumps({**message, "preflight": run}).encode() + b"\n"


def decode(line: bytes, run: str) -> dict[str, Any]:
    """Return the message in a line. Raises WireError when it is malformed or belongs to another run."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError("the message is not from a preflight") from error
    if not isinstance(message, dict) or not isinstance(message.get("preflight"), str):
        raise WireError("the message is not from a preflight")
    if message["preflight"] != run:
        raise WireError(f"the message is from the preflight of another run, {message['preflight'][:100]!r}")
    return message


class Wire:
    """One connection of the preflight of `run`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, run: str) -> None:
        self._reader, self._writer, self._run = reader, writer, run

    @property
    def peer(self) -> str:
        """Address of the other end, as seen from this one."""
        name = self._writer.get_extra_info("peername")
        return plain(str(name[0])) if name else ""

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises WireError when the other end is gone."""
        try:
            self._writer.write(encode(message, self._run))
            await self._writer.drain()
        except OSError as error:
            raise WireError(f"the connection broke: {error}") from error

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next message. Raises WireError, also for a timeout."""
        try:
            line = await asyncio.wait_for(self._reader.readline(), max(0.0, timeout_s))
        except Late as error:
            raise WireError("no answer in time") from error
        except (OSError, ValueError) as error:  # ValueError: a line over the limit
            raise WireError(f"the connection broke: {error}") from error
        if not line.endswith(b"\n"):
            raise WireError("the other end closed the connection")
        return decode(line, self._run)

    async def pour(self, seconds: float) -> None:
        """Send bytes for the given seconds. Raises WireError."""
        block, end = b"x" * (1 << 20), time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self._writer.write(block)
                await asyncio.wait_for(self._writer.drain(), max(0.05, end - time.monotonic()))
        except Late:
            pass
        except OSError as error:
            raise WireError(f"the connection broke: {error}") from error
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    async def drink(self, seconds: float, most: int) -> tuple[int, float]:
        """Receive until the other end has sent all, at most for `seconds`; return the bytes and the time."""
        size, began = 0, time.monotonic()
        last = end = began
        end += seconds
        with contextlib.suppress(OSError, Late):
            while size < most and (data := await asyncio.wait_for(self._reader.read(1 << 20), max(0.0, end - last))):
                size, last = size + len(data), time.monotonic()
        return size, last - began

    async def ended(self, timeout_s: float) -> None:
        """Wait until the other end has closed, so that this end's port is free at once (no TIME_WAIT here)."""
        try:
            await asyncio.wait_for(self._reader.read(), max(0.0, timeout_s))
        except (OSError, Late):
            return

    def close(self) -> None:
        """Close the connection; if the other end has not closed yet, reset it, so that the kernel keeps no state."""
        sock = self._writer.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.close()

    def finish(self) -> None:
        """Close the connection in order, this end first."""
        self._writer.close()


async def connect(address: str, port: int, run: str, timeout_s: float) -> Wire:
    """Return a connection to a node. Raises OSError, with errno ETIMEDOUT when no answer comes in time."""
    opening = asyncio.open_connection(address, port, limit=LIMIT)
    try:
        reader, writer = await asyncio.wait_for(opening, max(0.05, timeout_s))
    except Late as error:
        raise OSError(errno.ETIMEDOUT, "no answer") from error
    return Wire(reader, writer, run)


async def attempt(address: str, port: int, run: str, node: int, timeout_s: float) -> str:
    """Exchange some packets with `node` at its address; return OK or the kind of failure."""
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
    """Return the name of a connection failure."""
    return _WORDS.get(error.errno or 0, (error.strerror or str(error)).lower())


def plain(address: str) -> str:
    """Return an address without its zone, and an IPv4-mapped IPv6 address as IPv4."""
    address = address.partition("%")[0]
    return address[7:] if address.startswith("::ffff:") and "." in address else address
