"""Parsed job script: its scheduler directives, and the torchruns that it starts."""

from __future__ import annotations

import functools
import re
import shlex
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

from envbuild.jobcheck.lint.directives import Directive, ScriptFacts, option_values, whole_number
from envbuild.jobcheck.lint.launch import Launch, find_launches, starts_training
from envbuild.jobcheck.lint.shell import CONTAINERS, LAUNCHERS, SUBMITS, WORDS, Command, Reader, Variables, commands_of

PER_NODE = ("--ntasks-per-node", "--tasks-per-node")
_MOST_PLACES = 1000  # texts to look for; a script of a person needs fewer than a hundred
# A line of a template: ${NODES_OPTION}, {{ nodes }}, {% if nodes %}, {# nodes #}, {job.nodes}, @NODES@.
_PLACEHOLDER = re.compile(
    r"\s*(?:\$\{?(?P<name>[A-Za-z_]\w*)\}?|\{\{.*\}\}|\{%.*%\}|\{#.*#\}|\{[A-Za-z_][\w.]*\}|@[A-Za-z_]\w*@)\s*"
)
_MISSING = re.compile(
    r"\s*(?:el)?if [^!]{0,99}![^-\w]{0,3}(?:-[defxs] |(?:command -v|which|type|hash|pip3? show|python[\d.]* -c)\b)"
)
# Part of a directive that a program or a reader fills in.
_GAP = re.compile(r"\{\{|\{%|(?<!\$)\{[A-Za-z_][\w.]*\}|@[A-Za-z_]\w*@|<[A-Za-z][\w -]*>")
_OTHER_LANGUAGE = re.compile(r"#!.*\b(?:python|perl|julia|Rscript|R\b|ruby|node|groovy)")
# Variables that the scheduler sets: another value in a branch of an `if` is for a run outside of a job.
_OF_SCHEDULER = re.compile(r"(?:SLURM|PBS|LSB)_")
_GPUS = re.compile(
    r"(?<!per-)\b(?:gpus-per-node|(gpus-per-task)|gpu|ngpus|ngpus_excl_p|num)"
    r"(?::[\w.-]+)?[:=](?:[a-zA-Z][\w.-]*:)?(\d{1,4})\b"
)
_CRAY = re.compile("|".join(sorted(WORDS["cray_signs"])))

_OF_JOB = re.compile(r"(?:--(?:output|error|job-name|export|signal|requeue|open-mode)\b|-[oeJ])")
_SAYS = re.compile(r"\s*(?:#|(?:echo|printf)\b)")
_SHARED = re.compile(r"small|shared|dev|debug|interactive")


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault in a line of a script, with the values for its message; `level` overrides the fault's default."""

    id: str
    line: int
    value: str = ""
    nodes: str = "several"
    program: str = "torchrun"
    level: Literal["", "warning", "hint"] = ""


@dataclass(frozen=True)
class ParsedScript:
    """Parsed job script.

    `kind` is the scheduler of its directives, "shell" without any, and `facts` are the facts about its scripts.
    `scheduler` is the scheduler that runs it, from its directives or the variables that it reads, "" if unknown.
    `values` are the words of all assignments to each variable; `everywhere` means that each node runs the script, and
    `pod_gpus` are the GPUs of the pod that does. `late` are directives behind the first command, which the
    scheduler does not read. `writes`: its directives are those of a script that it writes.
    `template`: a program or a reader fills in parts of it before the scheduler gets it. `texts` are the lines of all
    here-documents, and `blocks` the compound commands and quotes that nothing closes.
    """

    kind: str
    facts: ScriptFacts | None
    scheduler: str
    lines: tuple[str, ...]
    directives: tuple[Directive, ...]
    commands: tuple[Command, ...]
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    everywhere: bool = False
    pod_gpus: int = 0
    late: tuple[Directive, ...] = ()
    template: bool = False
    writes: bool = False
    texts: frozenset[int] = frozenset()
    blocks: tuple[tuple[str, int], ...] = ()

    def directive(self, *names: str) -> tuple[int, str] | None:
        """Return (line, value) of the last directive with one of these names."""
        last = None
        for line, words in self.directives:
            for value in option_values(words, names):
                last = (line, value)
        return last

    @property
    def has_steps(self) -> bool:
        """Whether its scheduler starts the steps of a job itself, like Slurm with srun."""
        return self.facts is not None and self.facts.own_steps

    @functools.cached_property
    def nodes(self) -> tuple[int, int] | None:
        """(line, number of requested nodes), None if unknown."""
        return self.facts.nodes(self.directives) if self.facts else None

    @functools.cached_property
    def text(self) -> str:
        """The whole script."""
        return "\n".join(self.lines)

    @functools.cached_property
    def code(self) -> str:
        """The script without its comment lines."""
        return "\n".join(line for line in self.lines if not line.lstrip().startswith("#"))

    @functools.cached_property
    def code_lines(self) -> Sequence[tuple[int, str]]:
        """(number, line) of the lines that are no comments, printed texts or here-documents."""
        rows = enumerate(self.lines, 1)
        return [row for row in rows if row[0] not in self.texts and not _SAYS.match(row[1])]

    @functools.cached_property
    def tasks(self) -> int:
        """Number of tasks per node that the directives request, 0 if unknown."""
        each = self.directive(*PER_NODE)
        every = self.directive("--ntasks", "-n") if self.has_steps else None
        of_all = (whole_number(every[1]) or 0) // max(1, self.nodes[1] if self.nodes else 1) if every else 0
        most = (whole_number(each[1]) or 0) if each else of_all
        return min(most, of_all or most)  # with --ntasks, --ntasks-per-node is a limit

    @functools.cached_property
    def gpus(self) -> int:
        """Number of GPUs per node that the directives request, 0 if unknown."""
        words = [word for _, line in self.directives for word in line]
        counts = [count for word in words for count in _GPUS.finditer(word)]
        most = max((int(count[2]) * (max(1, self.tasks) if count[1] else 1) for count in counts), default=self.pod_gpus)
        of_job = next(option_values(words, ("--gpus", "-G")), "").rpartition(":")[2]
        return max(most, (whole_number(of_job) or 0) // max(1, self.nodes[1] if self.nodes else 1))

    @functools.cached_property
    def is_cray(self) -> bool:
        """Whether the script is for a Cray system, which has its own network, modules and allocation of whole nodes."""
        return any(_CRAY.search(line) for line in self.lines if not line.lstrip().startswith("# "))

    @functools.cached_property
    def undivided(self) -> bool:
        """Whether the system seems to allocate whole nodes, with all their CPUs and GPUs."""
        partition, constraint = (
            (self.directive(*names) or (0, ""))[1]
            for names in (("--partition", "-p", "--qos", "-q"), ("--constraint", "-C"))
        )
        return (self.is_cray or constraint == "gpu") and not _SHARED.search(partition)

    @functools.cached_property
    def whole_nodes(self) -> bool:
        """Whether no other job runs on the nodes, according to the script."""
        words = [word for _, line in self.directives for word in line]
        whole_by = self.facts.whole if self.facts else ()
        exclusive = bool(whole_by) and self.directive(*whole_by) is not None
        of_nodes = (re.sub(r"j_exclusive|exclusive_process", "", word) for word in words)
        exclusive |= any("excl" in word or word in ("--mem=0", "--gres=gpu:8") for word in of_nodes)
        most = max((self.gpus, *(launch.ranks for launch in self.launches)))
        return exclusive or most >= 8 or self.is_cray or (self.undivided and not 0 < self.gpus < 4)

    def moves_to(self, folder: str) -> bool:
        """Return whether the script changes to `folder`, so that the folder exists."""
        return any(folder in command.words for command in self.commands if command.program in ("cd", "pushd"))

    @functools.cached_property
    def sets_options(self) -> bool:
        """Whether variables of the script set options of torchrun."""
        return "PET_" in self.text

    @property
    def doubtful(self) -> Literal["", "hint"]:
        """Level of faults about shared nodes: "hint" if the job seems to take whole nodes: several, or four GPUs."""
        array = self.directive("--array", "-a") or (not self.has_steps and self.directive("-J"))
        cpus = (self.facts.cpus(self.directives) or 0) * max(1, self.tasks) if self.facts else 0
        return "hint" if (self.gpus >= 4 or self.several or cpus >= 64) and not array else ""

    @functools.cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Every torchrun that this script starts."""
        nodes = "".join(self.values.get("PET_NNODES", ())[-1:])
        return tuple(find_launches(self.commands, self.variables, {"nnodes": nodes} if nodes else {}))

    @functools.cached_property
    def choices(self) -> frozenset[str]:
        """Values of variables with several, as in the branches of an `if`, where the effective value is unknown."""
        several = (set(words) for words in self.values.values())
        return frozenset(word for words in several if len(words) > 1 for word in words)

    @functools.cached_property
    def set_on_nodes(self) -> str:
        """Values that commands on the nodes assign to variables."""
        return "\n".join(
            word for command in self.commands if command.per_node for _, row in command.assignments for word in row
        )

    @functools.cached_property
    def trainings(self) -> tuple[Command, ...]:
        """The commands that look like the training."""
        return tuple(command for command in self.commands if starts_training(command))

    @functools.cached_property
    def steps(self) -> tuple[Command, ...]:
        """Those that a launcher starts."""
        return tuple(command for command in self.trainings if command.program in LAUNCHERS)

    @functools.cached_property
    def trains(self) -> bool:
        """Whether the script starts a training."""
        return bool(self.launches or self.trainings)

    @functools.cached_property
    def variables(self) -> Variables:
        """Variables for expansion; all rules share one limit of work."""
        return Variables({name: row for name, row in self.values.items() if not _OF_SCHEDULER.match(name)})

    @functools.cached_property
    def launchers_work(self) -> bool:
        """Whether the script starts anything on other nodes."""
        return any(set(command.started_by) - CONTAINERS or command.program in LAUNCHERS for command in self.commands)

    @functools.cached_property
    def submits(self) -> bool:
        """Whether the script submits jobs, or writes their scripts."""
        return self.writes or any(command.program in SUBMITS for command in self.commands)

    @functools.cached_property
    def passed(self) -> frozenset[str]:
        """Arguments that may be commands, such as functions and files that launchers start."""
        words = {word for command in self.commands if command.started_by for word in command.words}
        return frozenset(words.union(*(word.split() for command in self.commands for word in command.words[1:])))

    @functools.cached_property
    def several(self) -> str:
        """Number of nodes if there are more than one ("several" if unknown), "" for one node."""
        if self.nodes is not None:
            return str(self.nodes[1]) if self.nodes[1] > 1 else ""
        numbers = [whole_number(launch.options.get("nnodes", "1").partition(":")[0]) for launch in self.launches]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            return "several"
        most = max(known, default=1)
        return str(most) if most > 1 else ""

    @functools.cached_property
    def held(self) -> Mapping[str, Sequence[str]]:
        """Variable → values of its assignments, except assignments that append."""
        values: dict[str, list[str]] = {}
        for name, words in (pair for command in self.commands for pair in command.assignments):
            values.setdefault(name, []).extend([" ".join(words)] * any(words))
        return values

    def where(self, text: str, near: int = 1) -> int:
        """Return the first line from `near` on that contains `text`, else an earlier line; `near` if there is none.

        Comments are skipped.
        """
        lines = self._places.get(text)
        if lines is None:
            if len(self._places) >= _MOST_PLACES:
                return near
            code = ((n, line) for n, line in enumerate(self.lines, 1) if not line.lstrip().startswith("#"))
            lines = self._places[text] = [number for number, line in code if text in line]
        return lines[bisect_left(lines, near) % len(lines)] if lines else near

    def escapes(self, text: str) -> bool:
        """Return whether `text` follows a backslash in the script."""
        return self.where(f"\\{text}", 0) > 0

    @functools.cached_property
    def _places(self) -> dict[str, list[int]]:
        """Cache of the lines that contain a text."""
        return {}

    def exported(self, name: str) -> Iterator[tuple[Command, str]]:
        """Yield (command, value) of each assignment to the variable `name`."""
        for command in self.commands:
            for variable, words in command.assignments:
                if variable.rstrip("+") == name:
                    yield command, " ".join(self.variables.expanded(words))
            for word in command.words:
                # env NAME=…, -x NAME=…, --export=NAME=…, --env NAME=…
                if match := re.search(rf"^{name}=(\S+)|[=,\s]{name}=([^,\s]+)", word):
                    yield command, match[1] or match[2]


# Options of the shell, as `set` and the first line give them.
ERREXIT, NOUNSET, PIPEFAIL = r"-[a-zA-Z]*e|errexit", r"-[a-zA-Z]*u|nounset", "pipefail"


def option_set(script: ParsedScript, pattern: str) -> bool:
    """Return whether the script sets an option of the shell: ERREXIT, NOUNSET or PIPEFAIL."""
    words = [word for command in script.commands if command.words[:1] == ("set",) for word in command.words[1:]]
    words += script.lines[0].split()[1:] if script.lines and script.lines[0].startswith("#!") else []
    return any(re.fullmatch(rf"(?:{pattern})\w*", word) for word in words)


def guarded(script: ParsedScript, line: int) -> bool:
    """Return whether a line runs only where a file, folder or program is missing."""
    rows = takewhile(lambda text: not re.match(r"\s*(?:fi|else)\b", text), script.lines[line - 1 :: -1])
    return "||" in script.lines[line - 1] or any(_MISSING.match(text) for text in rows)


def _filled_in(line: str, assigned: Collection[str]) -> bool:
    """Return whether `line` is just a placeholder, which may become a directive when the template is rendered."""
    match = _PLACEHOLDER.fullmatch(line)
    return match is not None and match["name"] not in assigned


def read_script(text: str, schedulers: Mapping[str, ScriptFacts]) -> ParsedScript:
    """Parse a script as far as the rules need it; `schedulers` are the facts about the scripts of each scheduler."""
    lines = text.splitlines()
    markers = {
        name: re.compile(rf"(?:{facts.pattern or facts.marker})(?:\s+|(?=--))(.*)")
        for name, facts in schedulers.items()
    }
    rows = []
    reader = Reader(text, 1)
    commands = () if _OTHER_LANGUAGE.match(lines[0] if lines else "") else tuple(commands_of(reader))
    for number, line in enumerate(lines, start=1):
        for name, pattern in markers.items():
            if match := pattern.match(line):
                rows.append((name, number, tuple(_split(match[1]))))
    # Those of a script that it writes, in a here-document or a string, count only where it has none of its own.
    own = [row for row in rows if row[1] in reader.comments or not commands]
    assigned = {name for command in commands for name, _ in command.assignments}
    real = (command.line for command in commands if not _filled_in(lines[command.line - 1], assigned))
    begun = min(real, default=len(lines) + 1)
    # A file of notes, which holds other scripts, is no job.
    second = next((n for n in sorted(reader.comments) if n > begun and re.match("#! ?/", lines[n - 1])), 0)
    own = [row for row in own if not 0 < second < row[1]]
    rows = [row for row in rows if not 0 < second < row[1]]
    last = max((row[1] for row in own), default=0)
    late = [row for row in own if row[1] > begun and "".join(row[2])[:1] == "-" and not schedulers[row[0]].reads_on]
    marked = set() if own else {row[1] for row in rows}
    written = [document for document in reader.documents if not marked.isdisjoint(range(document[0], document[1] + 1))]
    writes = bool(rows) and not own
    rows = own or rows
    kind = rows[-1][0] if rows else "shell"
    unread = {row[1] for row in late}
    directives = [row[1:] for row in rows if row[1] not in unread]
    inside = {line for first, last, _ in written for line in range(first, last + 1)}
    commands = tuple(replace(command, file=command.file and command.line not in inside) for command in commands)
    values: dict[str, list[str]] = {}
    for command in commands:
        for name, words in command.assignments:
            values.setdefault(name.rstrip("+"), []).extend(words)
    read = (name for name, facts in schedulers.items() if facts.variables in text)
    return ParsedScript(
        kind,
        schedulers.get(kind),
        kind if kind in schedulers else next(read, ""),
        tuple(lines),
        tuple(_of_components(directives)),
        commands,
        values,
        writes=writes,
        texts=frozenset(line for first, last, _ in reader.documents for line in range(first, last + 1)),
        blocks=tuple(reader.blocks),
        late=tuple(row[1:] for row in late),
        template=any(_GAP.search(lines[row[1] - 1]) for row in rows)
        or any(_filled_in(lines[command.line - 1], assigned) for command in commands if command.line < last),
    )


def _of_components(directives: list[Directive]) -> list[Directive]:
    """Return the directives; in a heterogeneous job, without the requests of its components.

    Source: Slurm, Heterogeneous Job Support: only --output, --error and the like are those of the whole job.
    """
    if not any(words[:1] in (("hetjob",), ("packjob",)) for _, words in directives):
        return directives
    return [(line, words if _OF_JOB.match("".join(words[:1])) else ()) for line, words in directives]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=re.search(r"=#", text) is None)  # --time=#LIMIT# of a template
    except ValueError:
        return text.split()
