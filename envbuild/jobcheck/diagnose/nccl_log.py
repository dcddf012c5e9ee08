"""Parser for NCCL's log of one rank: version, networks, plugins, the transports of its channels, and faults.

A line is `host:pid:tid [gpu] NCCL INFO text`, or, for warnings, `host:pid:tid [gpu] file.cc:line NCCL WARN
text`; log collectors may add a prefix. The lines and their causes are in data/nccl_log.toml.
Source: NVIDIA/nccl, src/debug.cc of v2.18.5-1 to v2.29.7-1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from envbuild.data import load_table
from envbuild.jobcheck.diagnose.rules import needles

FaultKind = Literal["plugin missing", "plugin failed", "no adapter", "fatal", "error"]
Kind = Literal["version", "network", "transport", "plugin", "provider"] | FaultKind
FAULTS: tuple[Kind, ...] = get_args(FaultKind)
_MESSAGE = re.compile(r"\bNCCL (?P<level>INFO|WARN|TRACE|ATTN|ABORT) (?P<text>.*)")
# Printed without a prefix; some releases print it to standard output even if the log goes to a file.
_VERSION = re.compile(r"\bNCCL version (\d\S*)\s*$")


@dataclass(frozen=True, slots=True)
class NcclFault:
    """Line that reports a failure: its text, and the cause ("" if unknown)."""

    kind: Kind
    text: str
    cause: str


@dataclass(frozen=True, slots=True)
class NcclLog:
    """Content of one rank's log; every list is in the order of the log, without repetitions.

    `networks` are the networks of NCCL's communicators, `transports` the transports of its channels ("NET/IB",
    "P2P", "SHM"), `providers` are libfabric's, and `plugins` are the loaded plugins. Among the `faults`, NCCL
    continues with another network after a missing or failed plugin and after a missing adapter; "fatal" ended
    the run, "error" is any other warning.
    """

    version: str
    networks: tuple[str, ...]
    transports: tuple[str, ...]
    plugins: tuple[str, ...]
    providers: tuple[str, ...]
    faults: tuple[NcclFault, ...]

    def having(self, *kinds: Kind) -> list[NcclFault]:
        """Return the faults of these kinds, grouped in the order of `kinds`."""
        return [fault for kind in kinds for fault in self.faults if fault.kind == kind]


@functools.cache
def load_patterns() -> list[tuple[Kind, re.Pattern[str], str]]:
    """Return (kind, pattern, cause) of each row of data/nccl_log.toml, whose header explains them."""
    shared = {f"={name}": cause for name, cause in load_table("nccl_log")["causes"].items()}
    rows = ((row, row.get("cause", "")) for row in load_table("nccl_log")["lines"])
    return [(row["kind"], re.compile(row["regex"]), shared.get(cause, cause)) for row, cause in rows]


def needles_of_forms() -> tuple[str, ...]:
    """Return constant texts; every line about a network, a provider or a fault contains at least one of them."""
    kinds = ("network", "provider", *FAULTS)
    every = [needles(pattern.pattern) for kind, pattern, _ in load_patterns() if kind in kinds]
    return (*(text for some in every for text in some), "NCCL WARN") if all(every) else ("NCCL",)


def parse_nccl_log(text: str) -> NcclLog:
    """Parse `text`, the log of one rank. Other lines between NCCL's are skipped."""
    events: dict[tuple[Kind, str], str] = {}
    for kind, value, cause in _events(text.splitlines()):
        events.setdefault((kind, value), cause)

    def values(kind: Kind) -> tuple[str, ...]:
        return tuple(value for event, value in events if event == kind)

    return NcclLog(
        next(iter(values("version")), ""),
        networks=values("network"),
        transports=values("transport"),
        plugins=values("plugin"),
        providers=values("provider"),
        faults=tuple(NcclFault(kind, value, cause) for (kind, value), cause in events.items() if kind in FAULTS),
    )


def _events(lines: Iterable[str]) -> Iterator[tuple[Kind, str, str]]:
    """Yield (kind, value, cause) for each recognised line."""
    harmless = re.compile(load_table("nccl_log")["harmless"])
    for line in lines:
        match = _MESSAGE.search(line)
        if match is None:
            if version := _VERSION.search(line):
                yield "version", version[1], ""
            continue
        text = match["text"].strip()
        if harmless.search(text):
            continue
        for kind, pattern, cause in load_patterns():
            if detail := pattern.search(text):
                yield kind, detail[1], cause
                break
        else:
            if match["level"] == "WARN":
                yield "error", text, ""
