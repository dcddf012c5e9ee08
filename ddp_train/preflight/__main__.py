"""`python -m ddp_train.preflight`, on every node of a job before training: find faults that would make training hang.

It needs Python alone. The ENVBUILD_* variables of the job's script name this node and the others. Node 0 prints the
verdict; another node prints only the reason why it cannot take part.

Exit codes: 0 success, perhaps with warnings; 1 training would fail; 2 invalid command line or variable.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..ending import leave
from ..errors import BAD_INPUT, RUNTIME, TrainError
from .files import FileCheck
from .head import Head
from .judge import judge
from .model import DEVICES, FAIL, SPEED, WARN, Finding, Node, Requirements, listed, nccl_version, torch_version
from .node import run_node
from .peers import Unreached
from .place import NodeInfo, find_node_info

WAIT_S = 15.0
# Nodes give up this long before the head: when the head exits, the launcher kills all processes, and the output
# of the nodes must be complete by then.
_EARLIER_S = 2.0
# Time for the comparison of files; of a longer wait, all but this.
_FILES_S = 9.0
# Time that a node then stays alive, for the same reason.
_STAY_S = 8.0
# Limits on the number of findings in the output.
_MOST = {FAIL: 30, WARN: 10}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TrainError(f"{message} (see python -m ddp_train.preflight --help)", BAD_INPUT)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raises TrainError."""
    parser = _Parser(prog="python -m ddp_train.preflight", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--digest", default="", help="digest of the artifact that all nodes must use (environments in folders)")
    add("--manifest", default="", help="digest of the manifest of that environment, whose files are then compared")
    add("--exact", action="store_true", help="compare the contents of files, too, which reads all of them")
    add("--gpus", type=int, default=0, help="GPUs that each node must offer")
    add("--provider", default="", help="libfabric provider that each node must have, such as efa")
    add("--arch", default="", help="x86_64 or aarch64")
    add("--shm", type=int, default=0, metavar="BYTES", help="least size of /dev/shm")
    add("--free", type=int, default=0, metavar="BYTES", help="least free space in the run's folder")
    add("--speed", action="store_true", help="compare how fast nodes compute, copy memory and send; name slow ones")
    add("--exclude-slow", action="store_true", help="a slow node is a failure; the run's folder then tells which")
    add("--wait", type=float, default=WAIT_S, metavar="SECONDS", help="how long nodes may take to answer (%(default)s)")
    add("--json", action="store_true", help="the head prints one JSON object on standard output")
    options = parser.parse_args(argv)
    if not 0 < options.wait <= 3600:
        raise TrainError("--wait is between 0 and 3600 seconds", BAD_INPUT)
    return options


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run this node's part and return the exit code."""
    started = time.monotonic()
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        place = find_node_info(environ)
    except TrainError as error:
        _print([f"preflight: error: {error.message}"])
        return error.exit_code
    try:
        return asyncio.run(_part(place, environ, options, started))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


async def _part(place: NodeInfo, environ: Mapping[str, str], options: Any, started: float) -> int:
    task = asyncio.current_task()
    if task is not None:
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not in the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    files = FileCheck(options.manifest, options.exact, max(_FILES_S, options.wait - _EARLIER_S - _FILES_S))
    asked = files if options.manifest else None
    speed = options.speed or options.exclude_slow
    try:
        if place.node > 0:
            earlier = max(options.wait - _EARLIER_S, options.wait / 2)
            return 0 if await run_node(place, environ, options.provider, earlier, asked, speed) else RUNTIME
        head = Head(place, environ, options.provider, options.wait, asked, speed)
        nodes = await head.run()
    except Unreached as error:
        me = f"{place.hosts[place.node]} ({place.address})"
        _print([f"preflight: FAILED  {me}: {error.problem}", f"    fix: {error.remedy}"])
        if place.node > 0:
            await asyncio.sleep(max(0.0, started + options.wait + min(_STAY_S, options.wait) - time.monotonic()))
        return RUNTIME
    required = Requirements(
        options.digest,
        options.gpus,
        options.provider,
        options.arch,
        options.shm,
        options.free,
        pins=bool(options.provider and environ.get(DEVICES)),
        manifest=options.manifest,
        fast=options.exclude_slow,
    )
    findings = judge(nodes, required)
    failed = [finding for finding in findings if finding.status == FAIL]
    passed = not failed
    if failed and all(finding.check == SPEED for finding in failed):
        names = sorted({nodes[number].host for finding in failed for number in finding.nodes})
        path = os.path.join(place.folder, f"slow.{place.run}")  # for the job's script
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write("".join(f"{name}\n" for name in names))
    seconds = time.monotonic() - started
    _print(_lines(nodes, findings, seconds))
    if options.json:
        print(json.dumps(as_json(nodes, findings, seconds), indent=1), flush=True)
    await head.tell(passed)
    if any(node.facts is None for node in nodes):
        await asyncio.sleep(_EARLIER_S)  # their own output may be on the way
    return 0 if passed else RUNTIME


def _lines(nodes: Sequence[Node], findings: Sequence[Finding], seconds: float) -> list[str]:
    lines = []
    for status, most in _MOST.items():
        several = [finding for finding in findings if finding.status == status]
        lines += _finding_lines(nodes, several[:most])
        if len(several) > most:
            word = "failures" if status == FAIL else "warnings"
            lines.append(f"preflight: and {len(several) - most} more {word}, which --json shows")
    failures = sum(finding.status == FAIL for finding in findings)
    warnings = len(findings) - failures
    there = [node for node in nodes if node.facts is not None]
    facts = nodes[0].known
    parts = [f"{len(there)} of {len(nodes)} nodes"]
    parts += [f"torch {torch_version(facts)}"] if torch_version(facts) else []
    parts += [f"{facts.gpus} GPU{'s' * (facts.gpus > 1)} a node"] if facts.gpus else []
    parts += [f"{warnings} warning{'s' if warnings > 1 else ''}"] if warnings else []
    parts += [f"{failures} failure{'s' if failures > 1 else ''}"] if failures else []
    verdict = "failed" if failures else "ok"
    return [*lines, f"preflight: {verdict}: {', '.join(parts)}, in {seconds:.1f} s"]


def _finding_lines(nodes: Sequence[Node], findings: Sequence[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        who = f"{listed(nodes, finding.nodes)}: " if finding.nodes else ""
        lines.append(f"preflight: {'FAILED ' if finding.status == FAIL else 'warning'} {who}{finding.fault}")
        lines.append(f"    fix: {finding.remedy}")
    return lines


def as_json(nodes: Sequence[Node], findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """Return the verdict as a JSON object."""
    return {
        "format": 1,
        "passed": not any(finding.status == FAIL for finding in findings),
        "seconds": round(seconds, 3),
        "findings": [
            {
                "status": finding.status,
                "check": finding.check,
                "nodes": [nodes[n].host for n in finding.nodes],
                "what": finding.fault,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
        "nodes": [_node_as_json(node) for node in nodes],
    }


def _node_as_json(node: Node) -> dict[str, Any]:
    facts = node.known
    shown = {name: value for name, value in vars(facts).items() if name not in ("packages", "lines", "reverse")}
    return {
        "node": node.number,
        "host": node.host,
        "address": node.address,
        "interface": node.interface,
        "answered": node.facts is not None,
        "clock_ahead_s": round(node.ahead_s, 6),
        "clock_error_s": round(node.error_s, 6),
        "pairs": {str(number): word for number, word in node.pairs.items()},
        **({**shown, "torch": torch_version(facts), "nccl": nccl_version(facts)} if node.facts else {}),
    }


def _print(lines: Sequence[str]) -> None:
    """Print lines with one write, since all nodes share the job's log; replace unprintable characters."""
    clean = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]
    sys.stderr.write("".join(f"{line}\n" for line in clean))
    sys.stderr.flush()


if __name__ == "__main__":
    leave(main)
