"""The part of a preflight that runs on every node except the head."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from .files import FileCheck
from .peers import AGAIN_S, FACTS_S, PAIR_S, SHARED_S, Unreached, collected, look_for, open_to_others, try_others
from .place import NodeInfo
from .rules_network import REMEDIES
from .speed import SENDING_S, send_around
from .wire import REFUSED, Wire, WireError, connect, in_a_word

NOT_STARTED = (
    "see what the head prints; when it prints nothing, its process was not started, or a firewall rejects: let the"
    " firewalls of both nodes pass all TCP between the job's nodes"
)


async def run_node(
    place: NodeInfo, environ: Mapping[str, str], provider: str, wait_s: float, files: FileCheck | None, speed: bool
) -> bool:
    """Run the part of a node other than the head; return the head's verdict.

    Raises Unreached when the head cannot be reached.
    """
    facts = asyncio.ensure_future(collected(place, environ, provider, files, speed))
    async with open_to_others(place) as port:
        wire, ahead_s, error_s = await _reach_head(place, wait_s)
        try:
            hello = {
                "node": place.node,
                "interface": place.interface,
                "port": port,
                "ahead_s": ahead_s,
                "error_s": error_s,
                "facts": vars(await facts),
            }
            await wire.send(hello)
            table = await wire.receive(wait_s + FACTS_S)
            ports = {int(number): int(own_port) for number, own_port in table["ports"]}
            path = str(table["path"])
            pairs, shared = await asyncio.gather(
                try_others(place, ports), look_for(path, str(table["content"])) if path else _nothing()
            )
            sent = await send_around(place, ports) if speed else {}
            pairs_sent = {
                "pairs": [list(pair) for pair in pairs.items()],
                "sent": [list(pair) for pair in sent.items()],
            }
            await wire.send({**pairs_sent, "shared": shared})
            verdict = await wire.receive(3 * PAIR_S + SHARED_S + SENDING_S)
            return verdict.get("passed") is True
        except (WireError, KeyError, TypeError, ValueError) as error:
            raise Unreached(
                f"lost the head {place.hosts[0]} at {place.head}:{place.port}: {error}", "see what the head prints"
            ) from error
        finally:
            wire.finish()


async def _nothing() -> str:
    return ""


async def _reach_head(place: NodeInfo, wait_s: float) -> tuple[Wire, float, float]:
    """Return a connection to the head, the offset of this node's clock from the head's, and the offset's error."""
    deadline, tries, word = time.monotonic() + wait_s, 0, ""
    remedy = NOT_STARTED
    while (left := deadline - time.monotonic()) > 0:
        tries += 1
        try:
            wire = await connect(place.head, place.port, place.run, min(left, PAIR_S))
        except OSError as error:
            word = in_a_word(error)
            remedy = {**REMEDIES, REFUSED: NOT_STARTED}.get(word, NOT_STARTED)
        else:
            try:
                return (wire, *(await _clock(wire, min(left, PAIR_S))))
            except WireError as error:
                wire.close()
                word = f"what listens there is not this job's preflight ({error})"
                remedy = "another program has this port: submit again, for another job number gives another port"
        await asyncio.sleep(AGAIN_S)
    raise Unreached(
        f"cannot reach the head {place.hosts[0]} at {place.head}:{place.port}: {word}"
        f" ({tries} attempts in {wait_s:.0f} s)",
        remedy,
    )


async def _clock(wire: Wire, timeout_s: float) -> tuple[float, float]:
    """Return this clock minus the head's, and the error: half of the shortest round trip. As in NTP (RFC 5905, 8)."""
    best = (float("inf"), 0.0)
    for _ in range(3):
        sent = time.time()
        started = time.monotonic()
        await wire.send({"clock": 0})
        clock = (await wire.receive(timeout_s)).get("clock")
        trip = time.monotonic() - started
        if not isinstance(clock, float):
            raise WireError("not a preflight's head")
        best = min(best, (trip / 2, sent + trip / 2 - clock))
    return best[1], best[0]
