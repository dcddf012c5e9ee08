"""Faults of data/job_faults.toml, and the rule for faults with a pattern."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from envbuild.data import load_table
from envbuild.jobcheck.lint.script import Fault, ParsedScript, guarded
from envbuild.jobcheck.lint.shell import Command

Level = Literal["error", "warning", "hint"]
LEVELS: tuple[Level, ...] = ("error", "warning", "hint")
_SHOWN = 60
_OF_TRAININGS = ("install-in-job",)  # elsewhere it is the purpose of the script, and one finding is enough
_OF_NETWORKS = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE")
_OF_INFINIBAND = ("NCCL_IB_DISABLE",)  # Slingshot has none
_WHOLE = ("script", "manifest", "needs", "unless")  # keys of patterns that are searched in the whole text
_KEYS = ("directive", "command", "lines", *_WHOLE)
_OF_ADDRESSES = ("first-address", "own-address")
# A comment that says why a variable has its value.
_REASON = re.compile(
    r"#[^#\n]{0,200}?(?:\bhang|workaround|work around|do not remove|support|without (?:this|it)|fix(?:es)?\b|https?:)"
)
# GPUs whose driver offers no peer-to-peer access.
_CONSUMER = re.compile(r"RTX|(?<![0-9])[2345]0[6-9]0(?:ti)?\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LintRule:
    """Row of data/job_faults.toml, whose header explains each key.

    `of_scheduler` maps the script's scheduler to its advice.
    """

    id: str
    level: Level
    message: str
    hint: str
    of_nodes: bool = False
    of_values: bool = False
    of_scheduler: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    patterns: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    batch: bool = False

    def applies_to(self, text: str) -> bool:
        """Return whether a script or manifest has no text that rules the fault out, and the text that it needs."""
        needed, excluded = self.patterns.get("needs"), self.patterns.get("unless")
        return not ((excluded and excluded.search(text)) or (needed and not needed.search(text)))


@functools.cache
def load_faults() -> dict[str, LintRule]:
    """Return all faults of data/job_faults.toml by their ID."""
    schedulers = load_table("schedulers").keys()
    return {name: _rule(name, row, schedulers) for name, row in load_table("job_faults").items()}


def _rule(name: str, row: Mapping[str, Any], schedulers: Collection[str]) -> LintRule:
    return LintRule(
        id=name,
        level=row["level"],
        message=row["what"],
        hint=row["instead"],
        of_nodes=row.get("of_nodes", False),
        of_values=row.get("of_values", False),
        of_scheduler={key: text for key, text in row.items() if key in schedulers},
        variables={key: re.compile(text, re.IGNORECASE) for key, text in row.get("variables", {}).items()},
        patterns={
            key: re.compile("|".join(row[key]) if key == "lines" else row[key], re.MULTILINE if key in _WHOLE else 0)
            for key in _KEYS
            if key in row
        },
        batch=row.get("batch", False),
    )


def of_patterns(script: ParsedScript) -> Iterator[Fault]:
    """Find the faults whose row has a pattern."""
    for fault in load_faults().values():
        outside = fault.batch and (not script.facts or script.writes)
        if outside or (fault.of_nodes and not script.several) or not fault.applies_to(script.text):
            continue
        findings = _of_row(fault, script)
        yield from islice(findings, 1) if fault.patterns.keys() & {"needs", "unless"} else findings


def search_text(fault: LintRule, key: str, text: str) -> Iterator[Fault]:
    """Find the first match of the pattern `key` of a row in the whole text of a script or manifest."""
    match = fault.patterns[key].search(text) if key in fault.patterns and fault.applies_to(text) else None
    if match:
        group = match.lastindex or 0
        yield Fault(fault.id, text.count("\n", 0, match.start(group)) + 1, match[group].strip()[:_SHOWN])


def _of_row(fault: LintRule, script: ParsedScript) -> Iterator[Fault]:
    """Find a fault by the patterns of its row."""
    in_directive, in_command, in_line = (fault.patterns.get(key) for key in ("directive", "command", "lines"))
    for line, words in script.directives if in_directive else ():
        text = " ".join(word.replace(" ", "_") for word in words)
        if in_directive and (match := in_directive.search(text)):
            yield Fault(fault.id, line, match[0].strip())
    for line, text in script.code_lines if in_line else ():
        if in_line and (match := in_line.search(text)):
            yield Fault(fault.id, line, match[match.lastindex or 0].strip()[:_SHOWN])
    yield from search_text(fault, "script", script.text)
    doubts: list[Fault] = []
    meant = not (script.trains and (script.facts or script.everywhere))
    for command in script.commands if in_command else ():
        text = command_text(command)
        if text.startswith("$") and len(command.words) == 1:
            text = " ".join(script.variables.expanded(command.words))
        if in_command and in_command.search(text):
            if fault.id in _OF_ADDRESSES and _printed(command, script.lines[command.line - 1]):
                continue
            finding = Fault(fault.id, command.line, text[:_SHOWN])
            if fault.id not in _OF_TRAININGS:
                yield finding
            elif meant or "--no-index" in text or guarded(script, command.line):
                doubts.append(replace(finding, level="hint"))
            else:
                doubts = [finding]
                break
    yield from doubts[:1]
    for name, pattern in fault.variables.items():
        for command, value in script.exported(name):
            context = "".join(script.lines[max(command.line - 2, 0) : command.line])
            meant = _REASON.search(context) is not None
            if pattern.fullmatch(value) and not meant and not _elsewhere(name, fault.id, script):
                inside = name in _OF_NETWORKS and not script.several  # one node is all that is known
                yield Fault(fault.id, command.line, f"{name}={value}", level="hint" if inside else "")


def _elsewhere(variable: str, fault: str, script: ParsedScript) -> bool:
    """Return whether the fault of a variable is irrelevant in this script."""
    if variable in _OF_INFINIBAND and re.search(r"FI_PROVIDER=[\"']?efa", script.text):
        return True  # NCCL reaches EFA through its plugin, and not as InfiniBand
    meant = re.search("NCCL_NSOCKS_PERTHREAD|NCCL_SOCKET_NTHREADS", script.text)  # sockets that are tuned
    if variable == "NCCL_P2P_DISABLE":
        alone = script.gpus == 1 and not script.several
        return alone or any(_CONSUMER.search(" ".join(words)) for _, words in script.directives)
    one_node = not (script.several or script.everywhere) and (script.nodes or script.launches)
    return variable in _OF_INFINIBAND and (script.is_cray or meant is not None or bool(one_node))


def _printed(command: Command, line: str) -> bool:
    """Return whether the output of a command in this line is only printed."""
    text = line.strip()
    prints = text.startswith(("echo ", "printf ")) or text == " ".join(command.words)
    return prints and not command.function and not re.search(r">\s*[^\s&]", text)


def command_text(command: Command) -> str:
    """Return the words of a command, with its program's base name."""
    return " ".join((command.program, *command.words[1:]))
