"""The rules of `envbuild lint-job` for variables: addresses, interfaces, providers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from envbuild.data import load_table
from envbuild.jobcheck.lint.script import Found, ParsedScript
from envbuild.jobcheck.lint.shell import Command

LOCAL = re.compile(r"^\[?(localhost|127(\.\d+){3}|::1)\]?(:|$)")
_FALLBACK = re.compile(
    r"\$\{(?P<name>\w+)(?:\[[^]]{0,80}\])?:?[=-]\"?(?:localhost|127\.)|\|\|\s*echo\s+['\"]?(?:localhost\b|127\.)"
)
_POINTS = re.compile(r"(?:rdzv[-_]endpoint|master[-_]addr)[= ]['\"]?(\S+)", re.IGNORECASE)
_POINTED = re.compile(r"(?:rdzv[-_]endpoint|master[-_]addr)[= ]['\"]?(?:\$\([^)]*|\S*)$")
_BEFORE = 500  # characters before a fallback in which the option stands
_NAMES = re.compile(r"\$\{?(\w+)")
OF_RENDEZVOUS = re.compile(
    r"(?:PET_)?(?:MASTER_(?:ADDR|HOST|IP|NODE)|RDZV_\w+)|HEAD_?(?:NODE|ADDR|IP|HOST)\w*", re.IGNORECASE
)


def of_variables(script: ParsedScript) -> Iterator[Found]:
    """Find faults in the values of MASTER_ADDR, and of variables for interfaces and providers."""
    for variable in ("MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "RDZV_ENDPOINT"):
        for command, value in script.exported(variable):
            if LOCAL.match(value) and script.several:
                yield Found("localhost-endpoint", command.line, value, script.several)
            elif command.per_node and script.several and re.search(r"\$\(hostname\b|\$\{?HOSTNAME\b", value):
                yield Found("endpoint-per-node", command.line, value)
    read = {
        name: re.search(rf"\$\{{?{name}\b|\b(?:export|declare)\b[^\n]{{0,99}}\b{name}\b", script.text)
        for name in ("MASTER_PORT", "PET_MASTER_PORT")
    }
    given = any("master-port" in one.options for one in script.launches)
    for variable in read:
        for command, value in script.exported(variable):
            default = re.fullmatch(r"\$\{MASTER_PORT:?-(\d+)\}", value)
            value = default[1] if default and len(script.values.get(variable, ())) == 1 else value
            alike = "SLURM_ARRAY_JOB_ID" in value and "TASK_ID" not in value  # one number for all tasks of an array
            if alike and not script.whole_nodes:
                yield Found("fixed-port", command.line, value)
            if value.isdecimal() and not (given or script.whole_nodes) and (command.words or read[variable]):
                own = script.kind == "shell" and not script.several  # on a host of one's own
                yield Found("fixed-port", command.line, value, level="hint" if own else script.doubtful)
    seen: dict[str, Command] = {}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for command, value in script.exported(variable):
            if re.fullmatch(r"=?(?:lo|docker\d*|virbr\d*)", value) and script.several:
                yield Found("loopback-interface", command.line, f"{variable}={value}")
            elif "$" not in value and not value.startswith("^"):
                seen.setdefault(value.lstrip("="), command)
    if len(seen) > 1:
        yield Found("interfaces-differ", list(seen.values())[-1].line, " and ".join(seen))
    text = "\n".join(line for line in script.lines if not line.startswith("#!"))
    fabrics = load_table("fabrics")["fabrics"].values()
    others = [row["signs"] for row in fabrics if "signs" in row and row["provider"] != "efa"]
    signs = re.search("|".join(others), text, re.IGNORECASE)
    for command, value in script.exported("FI_PROVIDER"):
        if value.split(";")[0] == "efa" and signs:
            yield Found("efa-elsewhere", command.line, signs[0])


def of_fallbacks(script: ParsedScript) -> Iterator[Found]:
    """Find fallbacks to localhost in values that become the endpoint of the rendezvous."""
    names = _rendezvous_names(script) if script.several else frozenset()
    for command in script.commands if script.several else ():
        texts = [(name.rstrip("+"), word) for name, words in command.assignments for word in words]
        texts += [("", " ".join(pair)) for pair in pairwise(("", *command.words))]
        for name, text in texts:
            for match in _FALLBACK.finditer(text):
                told = any(one in names or OF_RENDEZVOUS.fullmatch(one) for one in (name, match["name"]) if one)
                if told or _POINTED.search(text, max(0, match.start() - _BEFORE), match.start()):
                    first = match[0].splitlines()[0]
                    yield Found("localhost-fallback", script.where(first, command.line))


def _rendezvous_names(script: ParsedScript) -> frozenset[str]:
    """Return the variables from which an endpoint is made."""
    text = "\n".join(line for line in script.lines if not line.lstrip().startswith("#"))
    names: set[str] = set()
    found = {name for value in _POINTS.findall(text) for name in _NAMES.findall(value)}
    found |= {name for name in script.values if OF_RENDEZVOUS.fullmatch(name)}
    while found:
        names |= found
        values = " ".join(" ".join(script.values.get(name, ())) for name in found)
        found = set(_NAMES.findall(values)) - names
    return frozenset(names)
