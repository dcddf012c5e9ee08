"""A shell script as a list of commands, parsed as far as the rules need: words, assignments, nested scripts.

Commands in another shell (`srun bash -c '…'`, a here-document for `ssh`) are parsed as well, with the commands
that start them. Control flow is ignored: both branches of an `if` count.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from envbuild.data import load_table
from envbuild.jobcheck.lint.words import ASSIGNMENT, Reader, simple_command

# Launchers of `envbuild job`, and others.
LAUNCHERS = frozenset(name for row in load_table("schedulers").values() for name in row["launchers"]) | frozenset(
    ["mpiexec.hydra", "orterun", "prun", "aprun", "jsrun", "pbs_tmrsh", "pdsh", "clush", "parallel", "kubectl"]
)
CONTAINERS = frozenset(["apptainer", "singularity", "enroot", "docker", "podman", "ch-run", "shifter"])
_SHELLS = frozenset(["bash", "sh", "dash", "zsh", "ksh"])
_OTHERS = re.compile(r"python|perl|ruby|julia|Rscript|node$|\$\{?\w{0,20}(?:PYTHON|python)")
_KEYWORDS = frozenset(
    [
        "if",
        "then",
        "elif",
        "else",
        "fi",
        "while",
        "until",
        "do",
        "done",
        "for",
        "case",
        "esac",
        "in",
        "function",
        "time",
        "!",
        "{",
        "}",
        "exec",
        "command",
        "nohup",
        "eval",
    ]
)
# Programs that start another one, and the words between them and it: options, durations, numbers, names of signals.
_WRAPPERS = frozenset(["timeout", "time", "nice", "ionice", "numactl", "taskset", "stdbuf", "setsid", "unbuffer"])
_OPERAND = re.compile(r"-.*|[\d.]\S*|[A-Z]{1,8}|\$\{?\w{0,40}(?:time|TIME|limit|LIMIT|dur|DUR)\w*\}?")
# Programs that write a here-document, or take it as a job.
SUBMITS = frozenset(["sbatch", "qsub", "bsub"])
_WRITES = SUBMITS | {"cat", "tee"}
_DEEPEST = 6
_AROUND = 200  # words before a nested command that are kept


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command.

    `words` are without quotes, with unexpanded variables; `assignments` (name, words) precede the command or
    stand alone. `started_by` are the enclosing launchers and containers, outermost first, and `around` the
    words of these commands. `per_node` means that its text is expanded on the node and not in the batch script;
    `file` that it is only written into a file. `end` is the operator behind it, and `background` tells whether
    that or an enclosing command's is `&`.
    """

    line: int
    words: tuple[str, ...]
    assignments: tuple[tuple[str, tuple[str, ...]], ...] = ()
    started_by: tuple[str, ...] = ()
    per_node: bool = False
    file: bool = False
    function: str = ""
    around: tuple[str, ...] = ()
    end: str = ""
    background: bool = False

    @property
    def program(self) -> str:
        """The name of its program, without a folder; "" for assignments alone."""
        return posixpath.basename(self.words[0]) if self.words else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """Its words, and those of the values that it assigns."""
        return (*self.words, *(word for _, words in self.assignments for word in words))


@dataclass(frozen=True, slots=True)
class _CommandPlace:
    """The context of commands: the fields of Command with these names, and the nesting depth of shells."""

    started_by: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    per_node: bool = False
    file: bool = False
    background: bool = False
    depth: int = 0


def parse(text: str) -> list[Command]:
    """Return the commands of a script.

    Commands in other shells and in `$(…)` follow the command that contains them.
    """
    return list(commands_of(Reader(text, 1)))


def commands_of(reader: Reader) -> Iterator[Command]:
    """Yield the commands from the reader's position on; afterwards it knows the comments and here-documents there."""
    yield from _commands(reader, _CommandPlace())


def _commands(reader: Reader, place: _CommandPlace) -> Iterator[Command]:
    function, braces = "", 0
    while reader.at < len(reader.text):
        begun = reader.line
        words, subs, bodies, end = simple_command(reader)
        if end in ("|", "&") and reader.text[reader.at : reader.at + 1] in (end, "&"):
            end += reader.take()
        if (
            end == "("
            and words
            and len(words) <= 1 + (words[0][0] == "function")
            and reader.text[reader.at : reader.at + 1] == ")"
        ):
            reader.take()
            function, braces = words[-1][0], 0
            continue
        if words and words[0] == ("function", False):
            function, braces = "".join(word for word, _ in words[1:2]), 0
        if function:
            braces += sum((w == "{") - (w == "}") for w, _ in words)
        command, rest = _made(begun, words, place, function)
        if command is not None:
            command = replace(command, end=end, background=place.background or end == "&")
            yield command
        if function and braces <= 0 and any(w == "}" for w, _ in words):
            function = ""
        if place.depth >= _DEEPEST:
            continue
        deeper = replace(place, depth=place.depth + 1)
        late = replace(deeper, per_node=place.per_node or reader.late)
        for at, inner in subs:
            yield from _commands(Reader(inner, at), late)
        if command is not None:
            yield from _nested(command, rest, bodies, deeper, reader.late)


def _nested(
    command: Command,
    words: list[tuple[str, bool]],
    bodies: list[tuple[int, str, bool]],
    place: _CommandPlace,
    late: bool,
) -> Iterator[Command]:
    """Yield the commands that a command passes to other shells: strings after -c, here-documents, ssh's last word."""
    names = [posixpath.basename(word) for word, _ in words]
    by = starters(command, [word for word, _ in words])
    texts = command.around + command.words[:_AROUND]
    place = replace(place, background=command.background)
    for number, (word, literal) in enumerate(words):
        before = next((name for name in reversed(names[: max(number - 1, 0)]) if not name.startswith("-")), "")
        shell = number and not _OTHERS.match(before)
        given = shell and re.fullmatch(r"-\w*c", words[number - 1][0])
        if " " in word and (given or names[0] in ("ssh", "pdsh", "clush")):
            around = texts[: min(len(command.around) + number, _AROUND)]
            there = literal and not late
            inner = replace(place, started_by=by, around=around, per_node=there or place.per_node)
            yield from _commands(Reader(word, command.line, late=not there), inner)
    runs = any(one in _SHELLS or one in LAUNCHERS for one in names)
    for line, body, literal in bodies:
        if runs or _WRITES & {*names}:
            there = literal and not late
            inner = replace(place, started_by=by, around=texts[:_AROUND], per_node=there or place.per_node)
            inner = replace(inner, file=place.file or not runs)
            yield from _commands(Reader(body, line, late=not there), inner)


def starters(command: Command, words: Sequence[str]) -> tuple[str, ...]:
    """Return the launchers and containers that start the command after `words` of `command`, outermost first."""
    names = (posixpath.basename(word) for word in words)
    found = command.started_by + tuple(one for one in names if one in LAUNCHERS | CONTAINERS)
    pyxis = any(word.startswith("--container-image") for word in words)
    return tuple(dict.fromkeys((*found, "pyxis") if pyxis else found))


def _made(
    line: int, words: list[tuple[str, bool]], place: _CommandPlace, function: str
) -> tuple[Command | None, list[tuple[str, bool]]]:
    assignments: list[tuple[str, tuple[str, ...]]] = []
    at, options, wrapped = 0, False, False
    for at, (word, _) in enumerate([*words, ("", False)]):  # noqa: B007 - it is used behind the loop
        if (options and word.startswith("-")) or (wrapped and _OPERAND.fullmatch(word)):
            continue
        wrapped = posixpath.basename(word) in _WRAPPERS
        options = word in ("export", "declare", "local", "readonly", "typeset", "env")
        if options or wrapped or word in _KEYWORDS or (word.endswith(")") and "(" not in word):
            continue
        if found := ASSIGNMENT.match(word):
            value = word[found.end() :]
            parts = tuple(value[1:].split("\0")) if value.startswith("\0") else (value,)
            assignments.append((found[1] + ("+" if found[3] else ""), parts))
        else:
            break
    rest = words[at:]
    if not rest and not assignments:
        return None, rest
    texts = tuple(word for word, _ in rest)
    made = Command(
        line, texts, tuple(assignments), place.started_by, place.per_node, place.file, function, place.around
    )
    return made, rest
