"""The rules of `envbuild lint-job` for endpoints and for the numbers of ranks and nodes that a script makes itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from envbuild.jobcheck.lint.directives import whole_number
from envbuild.jobcheck.lint.launch import Launch, starts_training
from envbuild.jobcheck.lint.script import Found, ParsedScript
from envbuild.jobcheck.lint.shell import LAUNCHERS
from envbuild.jobcheck.lint.variables import OF_RENDEZVOUS

_RANK = re.compile(
    r"\$\{?(?:SLURM_(?:NODEID|PROCID|LOCALID)|PMI_RANK|PMIX_RANK|OMPI_COMM_WORLD_(?:LOCAL_)?RANK|PALS_(?:LOCAL_)?RANKID)\b"
)
_RANK_OPTION = re.compile(r"--(?:node|machine)[-_]rank(?:=(.*))?", re.DOTALL)
_RANK_NAMES = frozenset(["RANK", "LOCAL_RANK", "NODE_RANK", "MACHINE_RANK", "GROUP_RANK"])
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_READS = frozenset(["read", "mapfile", "readarray", "source", ".", "eval"])
_ENVIRONMENT = re.compile(r"bin/activate$|^activate$|conda\.sh$|etc/profile|bashrc$|modules\.sh$")
_MOST_LINES = 100  # of one command
# Variables of schedulers and of users' environments.
GIVEN = re.compile(r"(?:SLURM|SALLOC)\w*|PBS\w*|LSB\w*|PMI\w*|OMPI\w*|HOSTNAME|HOME|USER|PWD|RANDOM|PET_\w+")
# A list of nodes, whole or in Slurm's short form, and what takes one name out of it.
_LIST = re.compile(r"\bSLURM_(?:JOB_)?NODELIST\b|\bPBS_NODEFILE\b|scontrol show hostnames?\b")
_SHORT = re.compile(r"\bSLURM_(?:JOB_)?NODELIST\b")
_EXPANDS = re.compile(r"scontrol|hostlist|nodeset|python|sed|perl|expand|\btr\b|\\?\[")
_MOST_ARRAYS = 20
_HOSTS = re.compile(r"^\$\(\s*scontrol show hostnames?\b[^|]*\)$")
_QUOTED = re.compile(r"\s*(?:declare -a )?(\w+)=\(\s*\"(\$[^\"]*(?:\"[^\"]*\"[^\"]*)?)\"\s*\)\s*(?:#.*)?$")
_FIRST = re.compile(r"head|tail|sed|perl|awk|cut|grep|read|\[0\]|python|-m ?1")


def of_addresses(script: ParsedScript) -> Iterator[Found]:
    """Find endpoints of names and of several addresses, and endpoints that are never set."""
    for one in script.commands if script.several else ():
        if one.program == "srun" and "hostname" in one.words:
            after = one.words[one.words.index("hostname") :]
            if asked := set(after) & {"-i", "-I", "--ip-address", "--all-ip-addresses"}:
                own = asked <= {"-i", "--ip-address"}
                yield Found("own-address" if own else "first-address", one.line, " ".join(after))
    # enroot's hook 50-slurm-pytorch.sh sets MASTER_ADDR and MASTER_PORT in containers of pyxis.
    elsewhere = "--container-" in script.text or sets_elsewhere(script)
    loops = set(re.findall(r"\bfor (\w+) in\b|\$\{(\w+):?=", script.text))
    set_here = {name for found in loops for name in found} | script.values.keys()
    for launch in script.launches if not elsewhere and script.kind != "shell" else ():
        if "standalone" in launch.options:
            continue
        for name in ("rdzv-endpoint", "master-addr"):
            for variable in _NAME.findall(launch.options.get(name, "")):
                told = variable in set_here or GIVEN.fullmatch(variable)
                if variable.isupper() and not told:  # others are of a script that is left out here
                    yield Found("endpoint-unset", launch.command.line, variable)


def sets_elsewhere(script: ParsedScript) -> bool:
    """Return whether the script reads variables from elsewhere: not from the environment of Python or conda."""
    return any(
        one.program in _READS and not any(_ENVIRONMENT.search(word) for word in one.words[1:])
        for one in script.commands
    )


def of_endpoints(script: ParsedScript) -> Iterator[Found]:
    """Find torchruns without an endpoint, endpoints that are lists of nodes, and those that only a comment sets."""
    by_hand: Literal["", "warning"] = "warning" if script.kind == "shell" and not script.everywhere else ""
    for one in script.launches if script.several and not (script.sets_options or script.everywhere) else ():
        number = whole_number(one.options.get("nnodes", "").partition(":")[0]) or (script.nodes or (0, 0))[1]
        given = one.options.keys() & {"rdzv-endpoint", "master-addr", "standalone", "config-file", "rdzv-conf"}
        if one.waits and number > 1 and not given and one.complete:
            at = one.command.line
            yield Found("endpoint-missing", at, nodes=script.several, program=one.program, level=by_hand)
        numbered = one.options.keys() & {"node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-conf"}
        static = "master-addr" in one.options and one.program == "torchrun" and one.launcher and not by_hand
        if one.waits and number > 1 and static and one.complete and not numbered:
            yield Found("node-rank-missing", script.where("nnodes", one.command.line), nodes=script.several)
    for command in script.commands if script.several else ():
        for name, words in command.assignments:
            value = words[0] if len(words) == 1 else ""
            listed = OF_RENDEZVOUS.fullmatch(name) and not name.lower().endswith(("s", "list")) and _LIST.search(value)
            plain = f"{name}=(" not in "".join(script.lines[command.line - 1 : command.line]).replace(" ", "")
            wrong = not _EXPANDS.search(value) if _SHORT.search(value) else False
            parts = len(_SHORT.findall(value)) > 1  # of names that the author knows
            if listed and plain and not parts and (wrong or not (_FIRST.search(value) or "|" in value or "%" in value)):
                yield Found("endpoint-list", command.line, name)
    yield from _quoted_lists(script)
    commented = any(re.match(r"\s*#.*\bMASTER_ADDR=", line) for line in script.lines)
    code = "\n".join(line for line in script.lines if not line.lstrip().startswith("#"))
    named = re.search(r"MASTER_ADDR|://|\b(?:COMM|INIT|DIST|SYNC)_\w*=", code)
    told = script.launches or named or sets_elsewhere(script)
    if script.several and commented and not told:
        steps = [one for one in script.commands if one.program in LAUNCHERS and starts_training(one)]
        # Some programs ask Slurm themselves.
        yield from (Found("endpoint-unset", one.line, "MASTER_ADDR", level="hint") for one in steps[-1:])


def _quoted_lists(script: ParsedScript) -> Iterator[Found]:
    """Find arrays with one element, all hosts, from which the first is taken."""
    lists = {name for name, words in script.values.items() if any(_HOSTS.search(word) for word in words)}
    looked = 0
    for number, line in enumerate(script.lines if script.several else (), 1):
        match = _QUOTED.match(line)
        if not match or not (_HOSTS.search(match[2]) or ((name := _NAME.fullmatch(match[2])) and name[1] in lists)):
            continue
        looked += 1
        if looked > _MOST_ARRAYS:
            return
        if re.search(rf"\$(?:\{{{match[1]}(?:\[0\])?\}}|{match[1]}\b)", "\n".join(script.lines[number:])):
            yield Found("endpoint-list", number, match[1])


def of_numbers(script: ParsedScript) -> Iterator[Found]:
    """Find numbers of ranks and nodes that the batch host expands, and a world size that is not that of the tasks."""
    # A script without a number of nodes gets it on sbatch's command line.
    if script.kind == "shell":
        return
    if script.nodes is None or script.nodes[1] > 1:
        yield from _node_ranks(script)
    nodes = script.nodes[1] if script.nodes else 1
    total = script.tasks * nodes
    steps = [one for one in script.commands if one.program in LAUNCHERS and starts_training(one) and not one.file]
    if script.launches or not steps or total < 2:
        return
    for one in script.commands:
        for name, words in one.assignments:
            here = not (one.per_node or one.file or one.function) and one.line < steps[-1].line
            match = _RANK.match(" ".join(words)) if here and name in _RANK_NAMES else None
            if match and (name in ("RANK", "LOCAL_RANK") or script.several):
                # Most programs ask the scheduler's own variables.
                level: Literal["warning", "hint"] = "warning" if name in ("RANK", "LOCAL_RANK") else "hint"
                yield Found("node-rank", one.line, match[0].strip("${"), level=level)
            size = whole_number(" ".join(words)) if here and name == "WORLD_SIZE" else None
            if size is not None and size not in (total, nodes * script.gpus):  # a task can start more ranks
                yield Found("world-size", one.line, f"WORLD_SIZE={size}, {total} tasks", level="warning")


def of_order(script: ParsedScript) -> Iterator[Found]:
    """Find torchruns that are started one after the other, although each waits for all."""
    begun = False
    for one in script.launches:
        begun |= one.command.background
        if script.several and one.waits and not begun and not one.command.file and _blocks(one):
            yield Found("one-after-another", one.command.line, nodes=script.several)
            return


def _blocks(one: Launch) -> bool:
    return (one.launcher == "ssh" and "-f" not in one.around) or (
        one.launcher == "srun" and bool(one.option("--nodelist", "-w")) and one.option("--nodes", "-N") in ("", "1")
    )


def _node_ranks(script: ParsedScript) -> Iterator[Found]:
    seen: set[int] = set()
    for one in script.commands:
        if one.per_node or one.file or script.everywhere:
            continue
        words = script.variables.expanded(one.words)
        for number, word in enumerate(words):
            found = _RANK_OPTION.fullmatch(word)
            value = (found[1] or "".join(words[number + 1 : number + 2])) if found else ""
            match = _RANK.search(value)
            line = script.where(word.partition("=")[0], one.line) if found else 0
            if match and line not in seen and not (script.escapes(match[0]) or _kept(script, one.line, line, match[0])):
                seen.add(line)
                kind = "node-rank-unused" if "c10d" in " ".join(words) else "node-rank"
                yield Found(kind, line, match[0].strip("${"))


def _kept(script: ParsedScript, begun: int, line: int, text: str) -> bool:
    """Return whether `text` in line `line` of a command that began in line `begun` stands in single quotes."""
    first = min(begun, line)
    while first > max(1, line - _MOST_LINES) and script.lines[first - 2].endswith("\\"):
        first -= 1
    at = script.lines[line - 1].find(text)
    before = "\n".join([*script.lines[first - 1 : line - 1], script.lines[line - 1][: max(at, 0)]])
    quote = ""
    for one in re.sub(r"\\.", "", before, flags=re.DOTALL) if at >= 0 else "":
        if one == quote:
            quote = ""
        elif one in "'\"" and not quote:
            quote = one
    return quote == "'"
