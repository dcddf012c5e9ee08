"""NCCL's log of one rank: which version, which network, which plugin, over what its channels go, what went wrong.

A line is `host:pid:tid [gpu] NCCL INFO text`, or, for warnings, `host:pid:tid [gpu] file.cc:line NCCL WARN text`; where
others collected it, something may stand before it.
Source: NVIDIA/nccl, src/debug.cc of v2.18.5-1 to v2.29.7-1. The lines and their causes are in data/nccl_log.toml.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

Kind = Literal[
    "version", "network", "transport", "plugin", "provider",
    "plugin missing", "plugin failed", "no adapter", "fatal", "error",
]  # fmt: skip


FAULTS: tuple[Kind, ...] = ("plugin missing", "plugin failed", "no adapter", "fatal", "error")
_SAID = re.compile(r"\bNCCL (?P<level>INFO|WARN|TRACE|ATTN|ABORT) (?P<text>.*)")
# Printed without a head, in some releases on standard output even where the log goes to a file.
_VERSION = re.compile(r"\bNCCL version (\d\S*)\s*$")


@dataclass(frozen=True, slots=True)
class NcclLine:
    """A row of data/nccl_log.toml, whose head explains each key."""

    kind: Kind
    regex: re.Pattern[str]
    source: str
    date: str
    texts: tuple[str, ...] = ()
    cause: str = ""
    of: Literal["nccl", "plugin"] = "nccl"


@dataclass(frozen=True, slots=True)
class NcclFault:
    """A line that tells of a failure: the line's text, and what is behind it ("" if nobody knows)."""

    kind: Kind
    text: str
    cause: str


@dataclass(frozen=True, slots=True)
class NcclLog:
    """What one rank's log says; every list in the order of the log, without repetitions.

    `networks` are those that NCCL used for its communicators, `transports` what its channels go over ("NET/IB",
    "P2P", "SHM"), `providers` libfabric's, `plugins` those loaded. Of the `faults`, NCCL goes on after a plugin that
    is missing or failed and after a missing adapter, with another network; "fatal" ended the run, "error" is any other
    warning. `lines` counts what was understood.
    """

    version: str
    networks: tuple[str, ...]
    transports: tuple[str, ...]
    plugins: tuple[str, ...]
    providers: tuple[str, ...]
    faults: tuple[NcclFault, ...]
    lines: int

    def having(self, *kinds: Kind) -> list[NcclFault]:
        """The faults of these kinds, in their order."""
        return [fault for kind in kinds for fault in self.faults if fault.kind == kind]


@functools.cache
def _data() -> dict[str, Any]:
    table = resources.files("envbuild.data") / "nccl_log.toml"
    return tomllib.loads(table.read_text(encoding="utf-8"))


@functools.cache
def load_lines() -> tuple[NcclLine, ...]:
    """The rows of data/nccl_log.toml."""
    return tuple(_line(row) for row in _data()["lines"])


def _line(row: Mapping[str, Any]) -> NcclLine:
    cause = row.get("cause", "")
    cause = _data()["causes"][cause[1:]] if cause.startswith("=") else cause
    regex, texts = re.compile(row["regex"]), tuple(row.get("texts", ()))
    return NcclLine(
        **{**row, "regex": regex, "texts": texts, "cause": cause, "date": str(row["date"])}
    )


@functools.cache
def _harmless() -> re.Pattern[str]:
    return re.compile(_data()["harmless"])


def parse_nccl_log(text: str) -> NcclLog:
    """What `text`, the log of one rank, says. Lines that are not NCCL's are passed over, so that it may stand
    between others."""
    return _read(text.splitlines())


def _read(lines: Iterable[str]) -> NcclLog:
    found: dict[Kind, list[str]] = {}
    faults: dict[tuple[Kind, str], NcclFault] = {}
    count = 0
    for kind, value, cause in _events(lines):
        count += 1
        if kind in FAULTS:
            faults.setdefault((kind, value), NcclFault(kind, value, cause))
        elif value not in found.setdefault(kind, []):
            found[kind].append(value)
    versions = found.get("version", [""])
    return NcclLog(
        version=versions[0],
        networks=tuple(found.get("network", ())),
        transports=tuple(found.get("transport", ())),
        plugins=tuple(found.get("plugin", ())),
        providers=tuple(found.get("provider", ())),
        faults=tuple(faults.values()),
        lines=count,
    )


def _events(lines: Iterable[str]) -> Iterator[tuple[Kind, str, str]]:
    """(kind, what is kept, cause) of each line that says something."""
    for line in lines:
        match = _SAID.search(line)
        if match is None:
            if version := _VERSION.search(line):
                yield "version", version[1], ""
            continue
        text = match["text"].strip()
        if _harmless().search(text):
            continue
        for known in load_lines():
            if said := known.regex.search(text):
                yield known.kind, said[1], known.cause
                break
        else:
            if match["level"] == "WARN":
                yield "error", text, ""
