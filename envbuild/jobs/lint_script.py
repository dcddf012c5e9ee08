"""A parsed job script: its scheduler directives, and the torchruns that it starts."""

from __future__ import annotations

import functools
import posixpath
import re
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from envbuild.jobs.lint_expand import Variables
from envbuild.jobs.lint_shell import LAUNCHERS, Command, parse, starters
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.schedulers.base import ScriptFacts, option_values, whole

_FACTS = {name: one.script for name, one in SCHEDULERS.items() if one.script}
_DIRECTIVES = {name: re.compile(rf"{one.pattern or one.marker}\s+(.*)") for name, one in _FACTS.items()}
_MOST_PLACES = 1000  # texts to look for; a script of a person needs fewer than a hundred
_GPUS = re.compile(r"\b(?:gpus-per-node|gpus-per-task|gpu|ngpus)(?::[\w.-]+)?[:=](?:[a-zA-Z][\w.-]*:)?(\d{1,4})\b")
_CRAY = re.compile(
    r"\b(?:cray|craype|PrgEnv|hsn\d?|cxi|FI_CXI_\w+|LUMI|lumi(?:_\w+)?|(?:standard|small|dev)-g|singularity-AI-bindings|shifter)\b|filesystems="
)
_FLAGS = frozenset([
    "standalone", "no-python", "run-path", "module", "m", "multi-gpu", "same-network", "use-deepspeed", "use-fsdp",
    "cpu", "debug",
])  # fmt: skip
# Options of `accelerate launch`, by torchrun's names. Its --num-processes counts those of all nodes.
_ACCELERATE = {
    "num-machines": "nnodes", "machine-rank": "node-rank", "main-process-ip": "master-addr",
    "main-process-port": "master-port",
}  # fmt: skip
_ACCELERATE_NODES = {"nnodes", "node-rank", "master-addr", "rdzv-backend"}
_TORCHRUN = re.compile(r"torch\.distributed\.(?:run|launch)")


@dataclass(frozen=True, slots=True)
class Found:
    """A fault in a line of a script, with the values for its message."""

    id: str
    line: int
    value: str = ""
    nodes: str = "several"
    program: str = "torchrun"


@dataclass(frozen=True, slots=True)
class Launch:
    """One torchrun, or an `accelerate launch`, whose options have torchrun's names.

    `options` are its own, without leading dashes and with `_` as `-`. `around` are the words before it, in its
    command and in the enclosing ones; `started_by` names the enclosing launchers and containers.
    """

    command: Command
    options: Mapping[str, str]
    around: tuple[str, ...]
    started_by: tuple[str, ...]
    program: str = "torchrun"

    @property
    def launcher(self) -> str:
        """The launcher that starts it on nodes, "" for none."""
        return next((one for one in self.started_by if one in LAUNCHERS), "")

    @property
    def waits(self) -> bool:
        """Whether it waits for torchruns on other nodes, as far as the script tells."""
        fewest = self.options.get("nnodes", "1").partition(":")[0]
        number = whole(fewest)
        return "standalone" not in self.options and (number is None or number > 1)

    def option(self, *names: str) -> str:
        """Return the value of the launcher's option with one of these names, "" for none."""
        begin = [posixpath.basename(word) for word in self.around]
        words = self.around[begin.index(self.launcher) :] if self.launcher in begin else ()
        return next(option_values(words, names), "")


@dataclass(frozen=True)
class ParsedScript:
    """A parsed script.

    `kind` is the scheduler of its directives, "shell" without any. `directives` are (line, words); `values` are
    the words of all assignments to each variable; `everywhere` means that each node runs the script.
    """

    kind: str
    lines: tuple[str, ...]
    directives: tuple[tuple[int, tuple[str, ...]], ...]
    commands: tuple[Command, ...]
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    everywhere: bool = False

    def directive(self, *names: str) -> tuple[int, str] | None:
        """Return line and value of the last directive with one of these names."""
        last = None
        for line, words in self.directives:
            for value in option_values(words, names):
                last = (line, value)
        return last

    @property
    def facts(self) -> ScriptFacts | None:
        """The known facts about scripts of this kind."""
        return _FACTS.get(self.kind)

    @property
    def scheduler(self) -> str:
        """The scheduler that runs it, by its directives or else by the variables that it reads; "" if unknown."""
        if self.kind in _FACTS:
            return self.kind
        read = [name for name, facts in _FACTS.items() if facts.variables in self.text]
        return read[0] if read else ""

    @functools.cached_property
    def nodes(self) -> tuple[int, int] | None:
        """(line, number of requested nodes), None if the script does not tell."""
        return self.facts.nodes(self.directives) if self.facts else None

    @functools.cached_property
    def text(self) -> str:
        """The whole script."""
        return "\n".join(self.lines)

    @functools.cached_property
    def gpus(self) -> int:
        """The number of GPUs that the directives ask for on each node, 0 if they do not tell."""
        words = [word for _, line in self.directives for word in line]
        most = max((int(match[1]) for word in words for match in _GPUS.finditer(word)), default=0)
        of_job = next(option_values(words, ("--gpus", "-G")), "").rpartition(":")[2]
        return max(most, (whole(of_job) or 0) // max(1, self.nodes[1] if self.nodes else 1))

    @functools.cached_property
    def is_cray(self) -> bool:
        """Whether the script is for a Cray system: its network, modules and whole nodes are others."""
        return any(_CRAY.search(line) for line in self.lines if not line.lstrip().startswith("# "))

    @functools.cached_property
    def whole_nodes(self) -> bool:
        """Whether no other job runs on the nodes, as far as the script tells."""
        words = [word for _, line in self.directives for word in line]
        exclusive = any("excl" in word or word in ("--mem=0", "--gres=gpu:8") for word in words)
        return exclusive or self.gpus >= 8 or self.is_cray

    @functools.cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Every torchrun that this script starts."""
        return tuple(_launches(self))

    @functools.cached_property
    def variables(self) -> Variables:
        """The variables, for expansion; all rules together have one bound."""
        return Variables(self.values)

    @functools.cached_property
    def launchers_work(self) -> bool:
        """Whether the script starts anything on other nodes."""
        return any(
            command.started_by or posixpath.basename("".join(command.words[:1])) in LAUNCHERS
            for command in self.commands
        )

    @functools.cached_property
    def passed(self) -> frozenset[str]:
        """The words that commands pass to others: among them are the functions and files that launchers start."""
        found = {word for command in self.commands if command.started_by for word in command.words}
        return frozenset(found.union(*(word.split() for command in self.commands for word in command.words[1:])))

    @functools.cached_property
    def several(self) -> str:
        """The number of nodes if there are more than one ("several" if unknown), "" for one node."""
        if self.nodes is not None:
            return str(self.nodes[1]) if self.nodes[1] > 1 else ""
        numbers = [whole(one.options.get("nnodes", "1").rpartition(":")[2]) for one in self.launches]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            return "several"
        most = max(known, default=1)
        return str(most) if most > 1 else ""

    def where(self, text: str, near: int = 1) -> int:
        """Return the first line from `near` on that contains `text`, else one before it; `near` if there is none.

        Comments are skipped.
        """
        found = self._places.get(text)
        if found is None:
            if len(self._places) >= _MOST_PLACES:
                return near
            code = ((n, line) for n, line in enumerate(self.lines, 1) if not line.lstrip().startswith("#"))
            found = self._places[text] = [number for number, line in code if text in line]
        return found[bisect_left(found, near) % len(found)] if found else near

    def escapes(self, text: str) -> bool:
        """Return whether `text` stands behind a backslash in the script."""
        return self.where(f"\\{text}", 0) > 0

    @functools.cached_property
    def _places(self) -> dict[str, list[int]]:
        """The lines of each text that was looked for."""
        return {}

    def exported(self, name: str) -> Iterator[tuple[Command, str]]:
        """Yield (command, value) of each assignment to the variable `name`."""
        for command in self.commands:
            for variable, words in command.assignments:
                if variable.rstrip("+") == name:
                    yield command, " ".join(self.variables.expanded(words))
            for word in command.words:
                # env NAME=…, -x NAME=…, --export=NAME=…, --env NAME=…
                if match := re.search(rf"(?:^|[=,\s]){name}=([^,\s]+)", word):
                    yield command, match[1]


def read_script(text: str) -> ParsedScript:
    """Parse a script as far as the rules need it."""
    lines = text.splitlines()
    directives, kind = [], "shell"
    for number, line in enumerate(lines, start=1):
        for name, pattern in _DIRECTIVES.items():
            if match := pattern.match(line):
                kind = name
                directives.append((number, tuple(_split(match[1]))))
    commands = tuple(parse(text))
    values: dict[str, list[str]] = {}
    for command in commands:
        for name, words in command.assignments:
            values.setdefault(name.rstrip("+"), []).extend(words)
    return ParsedScript(kind, tuple(lines), tuple(directives), commands, values)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def _launches(script: ParsedScript) -> Iterator[Launch]:
    told = "".join(script.values.get("PET_NNODES", ())[-1:])
    given = {"nnodes": told} if told else {}
    for command in script.commands:
        words = script.variables.expanded(command.words)
        # Inside a string for another shell, it is parsed as a separate command.
        at = next((n for n, word in enumerate(words) if _is_torchrun(words, n)), None)
        if at is None and (at := _accelerate(words)) is not None:
            around = (*script.variables.expanded(command.around), *words[:at])
            options = {_ACCELERATE.get(name, name): value for name, value in _options(words[at + 2 :]).items()}
            # Its own default is the configuration of the user who started it.
            if options.keys() & _ACCELERATE_NODES:
                yield Launch(command, options, around, starters(command, words[:at]), "accelerate launch")
            continue
        if at is None or words[0] in ("echo", "printf", "which", "command", "type", "pkill", "cd"):
            continue
        around = (*script.variables.expanded(command.around), *words[:at])
        by = starters(command, words[:at])
        yield Launch(command, given | _options(words[at + 1 :]), around, by)


def _is_torchrun(words: list[str], at: int) -> bool:
    word = words[at]
    if _TORCHRUN.fullmatch(word):
        return at > 0 and words[at - 1] == "-m"
    return posixpath.basename(word) == "torchrun" and "=" not in word


def _accelerate(words: list[str]) -> int | None:
    pairs = enumerate(pairwise(words))
    return next((n for n, (one, two) in pairs if posixpath.basename(one) == "accelerate" and two == "launch"), None)


def _options(words: list[str]) -> dict[str, str]:
    """Return torchrun's options, up to the script that it starts."""
    found: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, equal, value = words[at].lstrip("-").partition("=")
        name = name.replace("_", "-")
        at += 1
        if name in _FLAGS:
            found[name] = "yes"
            continue
        if not equal and at < len(words):
            value = words[at]
            at += 1
        found[name] = value
    return found
