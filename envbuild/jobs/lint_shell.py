"""A shell script as a list of commands, far enough understood to find faults in it: words, assignments, nested scripts.

What is run in another shell (`srun bash -c '…'`, a here-document for `ssh`) is parsed as well, with what starts it. No
control flow: both branches of an `if` count.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from envbuild.jobs.lint_words import ASSIGNMENT, Reader, simple_command

LAUNCHERS = frozenset(
    [
        "srun",
        "mpirun",
        "mpiexec",
        "mpiexec.hydra",
        "orterun",
        "prun",
        "aprun",
        "jsrun",
        "pbsdsh",
        "pbs_tmrsh",
        "ssh",
        "pdsh",
        "clush",
        "parallel",
        "kubectl",
    ]
)
CONTAINERS = frozenset(
    ["apptainer", "singularity", "enroot", "docker", "podman", "ch-run", "shifter"]
)
_SHELLS = frozenset(["bash", "sh", "dash", "zsh", "ksh"])
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
_DEEPEST = 6


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command. `words` are without quotes, expansions as written; `assignments` (name, words) stand before it,
    or are all there is. `started_by` are the launchers and containers around it, outermost first; `per_node` tells that
    its text is expanded where it runs, not in the batch script; `file` that it is only written into a file."""

    line: int
    words: tuple[str, ...]
    assignments: tuple[tuple[str, tuple[str, ...]], ...] = ()
    started_by: tuple[str, ...] = ()
    per_node: bool = False
    file: bool = False
    function: str = ""


def parse(text: str, line: int = 1) -> list[Command]:
    """The commands of a script whose first line is number `line`. Those in other shells and in `$(…)` follow theirs."""
    return list(_commands(Reader(text, line), (), False, False, 0))


def _commands(
    reader: Reader, started_by: tuple[str, ...], per_node: bool, file: bool, depth: int
) -> Iterator[Command]:
    function, braces = "", 0
    while reader.at < len(reader.text):
        begun = reader.line
        words, subs, bodies, end = simple_command(reader)
        if end == "(" and len(words) == 1 and reader.text[reader.at : reader.at + 1] == ")":
            reader.take()
            function, braces = words[0][0], 0
            continue
        if function:
            braces += sum((w == "{") - (w == "}") for w, _ in words)
        command, rest = _made(begun, words, started_by, per_node, file, function)
        if command is not None:
            yield command
        if function and braces <= 0 and any(w == "}" for w, _ in words):
            function = ""
        if depth >= _DEEPEST:
            continue
        for at, inner in subs:
            yield from _commands(Reader(inner, at), started_by, per_node, file, depth + 1)
        yield from _nested(command, rest, bodies, depth)


def _nested(
    command: Command | None,
    words: list[tuple[str, bool]],
    bodies: list[tuple[int, str, bool]],
    depth: int,
) -> Iterator[Command]:
    """What other shells are given by a command: strings after -c, here-documents, ssh's last word."""
    if command is None:
        return
    names = [posixpath.basename(word) for word, _ in words]
    around = command.started_by + tuple(one for one in names if one in LAUNCHERS | CONTAINERS)
    if any(word.startswith("--container-image") for word, _ in words):
        around += ("pyxis",)
    for number, (word, literal) in enumerate(words):
        given = number and re.fullmatch(r"-\w*c", words[number - 1][0])
        if " " in word and (given or names[0] in ("ssh", "pdsh", "clush")):
            yield from _commands(
                Reader(word, command.line), around, literal or command.per_node, command.file, depth + 1
            )  # fmt: skip
    runs = any(one in _SHELLS or one in LAUNCHERS for one in names)
    for line, body, literal in bodies:
        if runs or names[:1] == ["cat"] or names[:1] == ["tee"]:
            yield from _commands(
                Reader(body, line), around, literal or command.per_node, command.file or not runs, depth + 1
            )  # fmt: skip


def _made(
    line: int,
    words: list[tuple[str, bool]],
    started_by: tuple[str, ...],
    per_node: bool,
    file: bool,
    function: str,
) -> tuple[Command | None, list[tuple[str, bool]]]:
    rest = list(words)
    assignments: list[tuple[str, tuple[str, ...]]] = []
    while rest:
        word = rest[0][0]
        if word in _KEYWORDS or (word.endswith(")") and "(" not in word):
            rest.pop(0)
        elif word in ("export", "declare", "local", "readonly", "typeset", "env"):
            rest.pop(0)
            while rest and rest[0][0].startswith("-"):
                rest.pop(0)
        elif found := ASSIGNMENT.match(word):
            value = word[found.end() :]
            parts = tuple(value[1:].split("\0")) if value.startswith("\0") else (value,)
            assignments.append((found[1] + ("+" if found[3] else ""), parts))
            rest.pop(0)
        else:
            break
    if not rest and not assignments:
        return None, rest
    texts = tuple(word for word, _ in rest)
    return Command(line, texts, tuple(assignments), started_by, per_node, file, function), rest


def expanded(words: tuple[str, ...], values: Mapping[str, tuple[str, ...]], depth: int = 0) -> list[str]:  # fmt: skip
    """`words` with `$NAME`, `${NAME}` and `${NAME[@]}` of the script replaced by the words of all their assignments."""
    out: list[str] = []
    for word in words:
        whole = re.fullmatch(r"\$\{?(\w+)(?:\[[@*]\])?\}?", word)
        if whole and whole[1] in values and depth < _DEEPEST:
            for value in expanded(values[whole[1]], values, depth + 1):
                out += value.split() if not value.startswith("$(") else [value]
            continue

        def fill(match: re.Match[str]) -> str:
            found = values.get(match[1] or match[2])
            if found is None or depth >= _DEEPEST or match[0] in " ".join(found):
                return match[0]
            return " ".join(expanded(found, values, depth + 1))

        out.append(re.sub(r"\$(?:(\w+)|\{(\w+)(?:\[[@*0]\])?\})", fill, word))
    return out
