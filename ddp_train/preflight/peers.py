"""Common parts of all nodes: collect facts, accept connections, try other nodes, look into the run's folder."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from .facts import collect
from .files import FileCheck
from .model import Facts
from .place import NodeInfo
from .speed import measure, take_in
from .wire import LIMIT, PADDING, Wire, WireError, attempt

PAIR_S = 5.0
FACTS_S = 10.0
SHARED_S = 3.0
AGAIN_S = 0.25


class Unreached(Exception):
    """Failure of this node to take part in the preflight: `problem` is the reason, `remedy` the advised change."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


async def collected(
    place: NodeInfo, environ: Mapping[str, str], provider: str, files: FileCheck | None, speed: bool
) -> Facts:
    """Return this node's facts. It looks up its own name, the head's, and those of the nodes that it tries."""
    near = sorted({place.node, 0, *place.partners(place.node)})
    hosts = [place.hosts[number] for number in near]
    addresses = {place.address, place.head}
    loop = asyncio.get_running_loop()
    facts = await loop.run_in_executor(
        None, lambda: collect(environ, place.head, place.interface, hosts, sorted(addresses), provider, files)
    )
    if speed:  # with nothing beside it
        facts = replace(facts, speeds=await loop.run_in_executor(None, measure, facts.gpus))
    return facts


@asynccontextmanager
async def open_to_others(place: NodeInfo) -> AsyncIterator[int]:
    """Accept connections of other nodes; yield the port, or 0 if this node's address is not local."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, place.run)
        with suppress(WireError):
            message = await wire.receive(PAIR_S)
            if "stream" in message:
                await take_in(wire)
            else:
                await wire.send({"node": place.node, "padding": PADDING})
            await wire.ended(PAIR_S)
        wire.close()

    try:
        server = await asyncio.start_server(answer, place.address, 0, limit=LIMIT, backlog=1024)
    except OSError:
        yield 0
        return
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def try_others(place: NodeInfo, ports: Mapping[int, int]) -> dict[int, str]:
    """Return the results of connections to this node's partners; `ports` has the connected nodes."""
    others = [number for number in place.partners(place.node) if ports.get(number)]
    words = await asyncio.gather(
        *(attempt(place.addresses[number], ports[number], place.run, number, PAIR_S) for number in others)
    )
    return dict(zip(others, words))  # noqa: B905 - Python 3.10 has strict=


async def look_for(path: str, content: str) -> str:
    """Return why the head's file is not visible here, or "". Network file systems get some time."""
    deadline = time.monotonic() + SHARED_S
    while True:
        try:
            os.listdir(os.path.dirname(path))  # makes NFS refresh its cache
            with open(path, encoding="ascii", errors="replace") as file:
                if file.read(1000) == content:
                    return ""
            reason = "another file has its name"
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
        if time.monotonic() > deadline:
            return f"does not see what the head wrote into {os.path.dirname(path)}: {reason}"
        await asyncio.sleep(AGAIN_S)
