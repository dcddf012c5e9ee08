"""The head's part of a preflight.

1. Each node collects its facts, opens a port of its own and connects to the head at the rendezvous port.
2. When all nodes are connected, or after the time limit, the head sends the ports of all nodes to all nodes. Each
   node tries to connect to the others (a sample of them in large jobs) and looks for the file that the head wrote
   into the run's folder.
3. Each node reports its results to the head; the head judges them and sends the verdict to each node.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from .files import FileCheck
from .model import Node, facts_of
from .peers import FACTS_S, PAIR_S, SHARED_S, Unreached, collected, open_to_others, try_others
from .place import NodeInfo
from .speed import SENDING_S, send_around
from .wire import LIMIT, Late, Wire, WireError


@dataclass
class _Arrived:
    """A node that has connected to the head."""

    wire: Wire
    node: Node
    port: int
    more: list[Wire] = field(default_factory=list)


class Head:
    """The head's part of a preflight."""

    def __init__(
        self,
        place: NodeInfo,
        environ: Mapping[str, str],
        provider: str,
        wait_s: float,
        files: FileCheck | None,
        speed: bool,
    ) -> None:
        self._place, self._environ, self._provider, self._files = place, environ, provider, files
        self._speed = speed
        self._wait_s = wait_s
        self._arrived: dict[int, _Arrived] = {}
        self._all = asyncio.Event()
        self._over = False

    async def run(self) -> list[Node]:
        """Collect the results of all nodes. Raises Unreached when the rendezvous port cannot be opened."""
        place = self._place
        facts = asyncio.ensure_future(collected(place, self._environ, self._provider, self._files, self._speed))
        async with open_to_others(place) as port:
            server = await self._listen()
            try:
                if place.nodes > 1:
                    with suppress(Late):
                        await asyncio.wait_for(self._all.wait(), self._wait_s)
                # A node that connects later finds the port closed.
                server.close()
                self._over = True
                own = replace(place.empty(0), interface=place.interface, facts=await facts, finished=True)
                nodes = await self._consult(own, port)
            finally:
                server.close()
        return nodes

    async def tell(self, passed: bool) -> None:
        """Send the verdict to all nodes and wait until they close: if they close first, the port is free at once."""

        async def answer(arrived: _Arrived) -> None:
            with suppress(WireError):
                await arrived.wire.send({"passed": passed})
                await arrived.wire.ended(1.0)
            for wire in (arrived.wire, *arrived.more):
                wire.close()

        await asyncio.gather(*(answer(arrived) for arrived in self._arrived.values()))

    async def _listen(self) -> asyncio.AbstractServer:
        place = self._place
        try:
            return await asyncio.start_server(self._hear, place.head, place.port, limit=LIMIT, backlog=4096)
        except OSError as error:
            where = f"cannot listen at {place.head}:{place.port}, where the rendezvous will be"
            if error.errno == errno.EADDRINUSE:
                raise Unreached(
                    f"{where}: the port is in use",
                    "another job, or a left-over process, has it (ss -ltnp): submit again, for another job number gives"
                    " another port; when several processes started here, start one a node",
                ) from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise Unreached(
                    f"{where}: that address is not this machine's",
                    "the first of the job's nodes must run as node 0: see how the launcher counts nodes",
                ) from error
            raise Unreached(f"{where}: {(error.strerror or str(error)).lower()}", "read the reason") from error

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection up to the node's facts; then it waits in `_arrived`."""
        wire = Wire(reader, writer, self._place.run)
        try:
            while "clock" in (message := await wire.receive(self._wait_s + FACTS_S)):
                await wire.send({"clock": time.time()})
            arrived = self._understood(message, wire)
        except (WireError, ValueError, KeyError, TypeError):
            with suppress(WireError):
                await wire.send({"error": "not understood"})
            wire.close()
            return
        if self._over:
            wire.close()
        elif arrived.node.number in self._arrived:
            first = self._arrived[arrived.node.number]
            first.more.append(wire)
            first.node = replace(first.node, doubled=True)
        else:
            self._arrived[arrived.node.number] = arrived
            if len(self._arrived) == self._place.nodes - 1:
                self._all.set()

    def _understood(self, message: Mapping[str, Any], wire: Wire) -> _Arrived:
        number = message["node"]
        if type(number) is not int or not 0 < number < self._place.nodes:
            raise ValueError("no such node")
        node = replace(
            self._place.empty(number),
            interface=str(message["interface"]),
            facts=facts_of(message["facts"]),
            seen=wire.peer,
            ahead_s=float(message["ahead_s"]),
            error_s=float(message["error_s"]),
        )
        return _Arrived(wire, node, int(message["port"]))

    async def _consult(self, own: Node, port: int) -> list[Node]:
        """Have all connected nodes try each other, and return the results."""
        place = self._place
        ports = {0: port, **{number: node.port for number, node in self._arrived.items()}}
        path = os.path.join(place.folder, f".preflight-{secrets.token_hex(8)}")
        content = secrets.token_hex(16)
        try:
            with open(path, "x", encoding="ascii") as file:
                file.write(content)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            own = replace(own, shared=f"cannot write into the run's folder {place.folder}: {reason}")
            path = ""
        table = {"ports": list(ports.items()), "path": path, "content": content}
        try:
            (pairs, sent), others = await asyncio.gather(
                self._try(ports), asyncio.gather(*(self._report(node, table) for node in self._arrived.values()))
            )
        finally:
            if path:
                with suppress(OSError):
                    os.unlink(path)
        results = {0: replace(own, pairs=pairs, sent=sent), **{other.number: other for other in others}}
        return [results.get(number, place.empty(number)) for number in range(place.nodes)]

    async def _try(self, ports: Mapping[int, int]) -> tuple[dict[int, str], dict[int, float]]:
        pairs = await try_others(self._place, ports)
        return pairs, await send_around(self._place, ports) if self._speed else {}

    async def _report(self, arrived: _Arrived, table: Mapping[str, Any]) -> Node:
        try:
            await arrived.wire.send(table)
            message = await arrived.wire.receive(2 * PAIR_S + SHARED_S + SENDING_S)
            pairs = {int(number): str(word) for number, word in message["pairs"]}
            sent = {int(number): float(rate) for number, rate in message["sent"]}
            return replace(arrived.node, pairs=pairs, sent=sent, shared=str(message["shared"]), finished=True)
        except (WireError, KeyError, TypeError, ValueError) as error:
            return replace(arrived.node, error=str(error))
